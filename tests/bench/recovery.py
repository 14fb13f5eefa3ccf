"""After a kill: what a redo costs, and how long until the run gets on.

One run is killed with its whole process group some updates after a checkpoint, and the same command is given
again at once. Its first life is the fresh run that the second is measured against.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .figures import Bench, Figure
from .workload import write_config

LIFE_SECONDS = 600.0


def measure(bench: Bench) -> list[Figure]:
    """Two figures."""
    checkpoint, killed = (4, 9) if bench.quick else (10, 19)
    updates = killed + 6
    folder = bench.folder / "recovery"
    config = write_config(folder, bench.model, updates=updates, bound=1, checkpoint_every=checkpoint)
    settings = {"config": str(config), "runs_dir": str(folder / "runs")}
    bench.say(f"a run that is killed at update {killed}")
    first = _life(bench, settings, until=killed)
    bench.say("the same command again")
    second = _life(bench, settings, until=killed + 1)
    fresh = _seconds_to_first_update(first, after=0)
    resumed = _seconds_to_first_update(second, after=killed)
    redone = [line for line in second if line["what"] == "learner.update" and line["update"] <= _last(first)]
    redo_seconds = redone[-1]["at"] - redone[0]["began"]
    # Everything that each costs: reading the groups and the learner's work. The first one warms torch up.
    again = {late["update"]: late["at"] - early["at"] for early, late in itertools.pairwise(redone)}
    once = {line["update"]: sum(line["seconds"][part] for part in ("read", "update"))
            for line in first if line.get("type") == "UpdateApplied"}  # fmt: skip
    both = [update for update in again if update in once]
    ratios = [again[update] / once[update] for update in both]
    return [
        Figure(
            "redo",
            statistics.median(ratios),
            at_most=1.1,
            says="seconds of an update's redo / its first execution (reading its groups included)",
            details={
                "updates": both,
                "redo_seconds": [again[update] for update in both],
                "first_seconds": [once[update] for update in both],
                "ratio_of_totals": sum(again[u] for u in both) / sum(once[u] for u in both),
            },
        ),
        Figure(
            "resume",
            (resumed - redo_seconds) / fresh,
            at_most=1.5,
            says="command to first new optimizer step after a kill, less its redo / of a fresh run",
            details={
                "fresh_seconds": fresh,
                "resumed_seconds": resumed,
                "redo_seconds": redo_seconds,
                "fresh_parts": _parts(first),
                "resumed_parts": _parts(second),
            },
        ),
    ]


def _life(bench: Bench, settings: dict[str, Any], *, until: int) -> list[dict[str, Any]]:
    """Drive until an update is applied, then kill the process group; what was said until then."""
    given = time.monotonic()
    lines: list[dict[str, Any]] = [{"what": "command", "at": given}]
    with _killed_in_the_end(bench.child("drive", settings)) as process:
        assert process.stdout is not None and process.stderr is not None
        for text in process.stdout:
            if not text.startswith('{"what"'):
                continue
            lines.append(json.loads(text))
            if lines[-1].get("type") == "UpdateApplied" and lines[-1]["update"] >= until:
                return lines
        raise RuntimeError(f"the run ended too early:\n{process.stderr.read()[-4000:]}")


@contextmanager
def _killed_in_the_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    late = threading.Timer(LIFE_SECONDS, kill)
    late.start()
    try:
        yield process
    finally:
        late.cancel()
        kill()
        process.wait()


def _seconds_to_first_update(lines: list[dict[str, Any]], *, after: int) -> float:
    applied = [line for line in lines if line.get("type") == "UpdateApplied" and line["update"] > after]
    return applied[0]["at"] - lines[0]["at"]


def _last(lines: list[dict[str, Any]]) -> int:
    return max(line["update"] for line in lines if line.get("type") == "UpdateApplied")


def _parts(lines: list[dict[str, Any]]) -> dict[str, float]:
    """When what had happened, in seconds after the command."""
    wanted = ("began", "learner.start", "learner.load", "WorkersReady", "GroupsStored", "UpdateApplied")
    found: dict[str, float] = {}
    for line in lines:
        name = line.get("type", line["what"])
        if name in wanted:
            found.setdefault(name, round(line["at"] - lines[0]["at"], 3))
    return found
