"""What the bench measures with: a figure, the table of them, and child processes that answer in JSON.

Owns nothing. A figure is a ratio of two things measured in the same run on the same machine, so that it means
the same on a slow one; absolute numbers stand beside it as details. Nothing here passes or fails.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHILD_SECONDS = 900.0


@dataclass(frozen=True)
class Figure:
    """One measured value. `at_most` or `at_least` is its target, where it has one."""

    name: str
    value: float
    unit: str = "ratio"
    at_most: float | None = None
    at_least: float | None = None
    says: str = ""  # what was divided by what
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"<= {_short(self.at_most)}"
        return f">= {_short(self.at_least)}" if self.at_least is not None else ""

    @property
    def within(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.at_most is not None:
            return self.value <= self.at_most
        return self.value >= self.at_least if self.at_least is not None else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "within": self.within}


@dataclass(frozen=True)
class Bench:
    """What a group of figures is measured with."""

    folder: Path  # scratch, on the filesystem where runs would lie
    model: Path  # the quickstart's kind of model
    quick: bool
    events: int  # of the log that is read

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"  .. {text}", file=sys.stderr, flush=True)

    def ask_child(self, module: str, settings: dict[str, Any]) -> Any:
        """What `python -m tests.bench.MODULE` prints as its last line: a process of its own, so that threads,
        memory and imports of one measurement are not another's."""
        process = self.child(module, settings)
        out, err = process.communicate(timeout=CHILD_SECONDS)
        if process.returncode != 0:
            raise RuntimeError(f"{module} ended with {process.returncode}:\n{err[-4000:]}")
        return json.loads(out.strip().splitlines()[-1])

    def child(self, module: str, settings: dict[str, Any]) -> subprocess.Popen[str]:
        """The process itself, in a session of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", f"tests.bench.{module}", json.dumps(settings)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip


def settings_of(arguments: Sequence[str]) -> dict[str, Any]:
    """What a child was started with."""
    return json.loads(arguments[1])


def answer(result: Any) -> None:
    """A child's result, as its last line."""
    print(json.dumps(result), flush=True)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios: the machine's moods hit both sides of a round alike."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def table(figures: Sequence[Figure]) -> str:
    """The figures as text."""
    lines = [("figure", "measured", "target", "", "what it is")]
    for figure in figures:
        met = {None: "", True: "ok", False: "MISSED"}[figure.within]
        unit = "" if figure.unit == "ratio" else f" {figure.unit}"
        lines.append((figure.name, f"{_short(figure.value)}{unit}", figure.target, met, figure.says))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    rows = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]])
            for line in lines]  # fmt: skip
    return "\n".join(row.rstrip() for row in rows)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
