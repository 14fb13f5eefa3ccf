"""A real run as a child process that says what happens when, on the machine's monotonic clock.

Owns the run that it drives. Every line that it prints is a JSON object with `what` and `at`; another process
on the machine reads the same clock. It watches from outside: a listener on the journal, and wrappers around
the learner's calls and the log's append.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from .figures import settings_of

LEARNER_CALLS = ("start", "load", "update", "gather", "save", "saved")


def say(what: str, **facts: Any) -> None:
    """One line, out at once: this process may be killed at any moment."""
    print(json.dumps({"what": what, "at": time.monotonic(), **facts}), flush=True)


def watch_learner() -> None:
    """Say how long each of the learner's calls takes."""
    from surefoot.trainer.learner import RayLearner

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        async def wrapper(self: Any, *arguments: Any) -> Any:
            began = time.monotonic()
            result = await call(self, *arguments)
            facts = {"update": arguments[0]} if name == "update" else {}
            say(f"learner.{name}", seconds=time.monotonic() - began, began=began, **facts)
            return result

        return wrapper

    for name in LEARNER_CALLS:
        setattr(RayLearner, name, watched(name, getattr(RayLearner, name)))


class AppendWatch:
    """Seconds that the log's thread spends in appends, without the way there and back."""

    def __init__(self, log: Any) -> None:
        self.seconds, self.appends = 0.0, 0
        self._append = log.append
        log.append = self

    def __call__(self, *arguments: Any) -> None:
        began = time.perf_counter()
        self._append(*arguments)
        self.seconds += time.perf_counter() - began
        self.appends += 1


def processor_seconds() -> dict[str, float]:
    """Processor time so far, by what the process is for."""
    own = psutil.Process()
    found: dict[str, float] = {}
    for process in [own, *own.children(recursive=True)]:
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        kinds = {"RolloutWorker": "worker", "RankActor": "rank", "ray::IDLE": "idle", "raylet": "raylet"}
        kind = next((short for mark, short in kinds.items() if mark in title), "ray")
        kind = "driver" if process.pid == own.pid else kind
        found[kind] = found.get(kind, 0.0) + times.user + times.system
    return found


def memory_bytes() -> int:
    """What all processes of the run hold, shared pages counted once."""
    own, found = psutil.Process(), 0
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found += process.memory_full_info().pss
    return found


async def drive(settings: dict[str, Any]) -> None:
    """The whole run."""
    from surefoot.trainer.run import Run

    say("began")
    watch_learner()
    journals: list[Any] = []
    appends: list[AppendWatch] = []
    processors_at, memory_at = settings.get("processors_at", ()), settings.get("memory_at", ())

    def listener(row: Any, event: Any, state: Any) -> None:
        facts: dict[str, Any] = {}
        if journals:
            facts["appending"] = journals[0].seconds_appending
            facts["in_thread"], facts["appends"] = appends[0].seconds, appends[0].appends
        if row.type == "UpdateApplied":
            facts |= {"update": event.update, "seconds": event.seconds}
            if event.update in processors_at:  # looking at every process takes time itself
                facts["processors"] = processor_seconds()
            if event.update in memory_at:
                facts["memory_bytes"] = memory_bytes()
        elif row.type == "EvaluationDone":
            facts["reward_mean"] = event.reward_mean
        say("event", type=row.type, seq=row.seq, **facts)

    started = Run.start(
        settings["config"],
        name="bench",
        runs_dir=Path(settings["runs_dir"]),
        sets=settings.get("sets", ()),
        listeners=[listener],
    )
    async with started as run:
        journals.append(run._journal)
        appends.append(AppendWatch(journals[0].log))
        await run.outcome()
    say("ended")


if __name__ == "__main__":
    asyncio.run(drive(settings_of(sys.argv)))
