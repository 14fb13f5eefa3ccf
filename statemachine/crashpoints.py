"""Named places where a process can be made to die, inert unless armed.

`SUREFOOT_CRASHPOINT=name[@type][:n[:stop]]` arms one: the n-th time (default the first) that the process
reaches the place, it kills itself with SIGKILL, as an out-of-memory killer would; with `stop` it stops itself
with SIGSTOP, so that a test can kill another process while this one stands there. Several are separated by
commas. The places of an append can be armed for one type of event: `log.append.inside@UpdateApplied:2` is the
second transaction that holds such an event.
`SUREFOOT_CRASHPOINTS_REACHED=FILE` has every process add the name of each place that it reaches to a file, a
line each, once a process.
Every place is listed in `CRASHPOINTS`; reaching one that is not raises, so the list is the whole truth.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from .events import EVENT_TYPES

CRASHPOINTS: dict[str, str] = {
    "log.created": "the run's first events are committed",
    "log.taken_over": "an incarnation has begun, nothing else has happened",
    "log.append.before": "events are built, none of them is written",
    "log.append.inside": "rows are written, their transaction is not committed",
    "log.append.after": "events are committed, nobody has been told",
    "budget.before": "the budget is resolved, not committed",
    "budget.after": "the budget is committed, no worker exists",
    "workers.started": "workers and ranks are up, nothing is redone",
    "workers.ready": "the event that says so is committed",
    "redo.update": "one recorded update has been executed again",
    "redo.done": "the redo's event is committed",
    "admit.before": "prompts are drawn, the event is not written",
    "admit.after": "the admission is committed, no worker was told",
    "group.write.before": "a group has arrived, its file is not begun",
    "group.write.inside": "a group file is half written",
    "group.write.after": "a group file is durable, no event names it",
    "group.stored": "the event that names the file is committed",
    "update.begun": "the batch's event is committed, the learner has not begun",
    "update.executed": "the learner has stepped, the event is not written",
    "update.committed": "the update is committed",
    "publish.gathered": "weights are gathered, the event is not written",
    "publish.committed": "the publication is committed, no worker has the weights",
    "publish.sent": "workers have confirmed the weights",
    "checkpoint.files": "a checkpoint's files are written, its manifest is not",
    "checkpoint.manifest": "the manifest is written, no event names it",
    "checkpoint.committed": "the checkpoint is committed",
    "retire.committed": "files are retired, not yet deleted",
    "retire.deleted": "retired files are deleted",
    "evaluate.before": "an evaluation is answered, its event is not written",
    "end.before": "all is trained, the last event is not written",
    "end.after": "the last event is committed, workers still live",
    "migrate.before": "the database is about to be migrated",
    "migrate.after": "the database is migrated, the run is not created",
}

OF_APPENDS = ("log.append.before", "log.append.inside", "log.append.after")
"""Places that know the events they are about, and can be armed for one type."""


class Typed(Protocol):
    """What a place may be about: a row of the log, by the type of its event."""

    @property
    def type(self) -> str: ...


_armed: dict[tuple[str, int], signal.Signals] = {}
_noted_in = os.environ.get("SUREFOOT_CRASHPOINTS_REACHED", "")
_noted: set[str] = set()
_watchers: list[Callable[[str], None]] = []


def _read_environment() -> None:
    for part in filter(None, os.environ.get("SUREFOOT_CRASHPOINT", "").split(",")):
        name, nth, how = (*part.split(":"), "", "")[:3]
        place, about, kind = name.partition("@")
        if place not in CRASHPOINTS:
            raise ValueError(f"SUREFOOT_CRASHPOINT names {place!r}, which is no crash point")
        if about and place not in OF_APPENDS:
            raise ValueError(f"SUREFOOT_CRASHPOINT has {name!r}, but only a log.append place takes a type")
        if about and kind not in EVENT_TYPES:
            raise ValueError(f"SUREFOOT_CRASHPOINT has {name!r}, and {kind!r} is no type of event")
        _armed[name, int(nth or 1)] = signal.SIGSTOP if how == "stop" else signal.SIGKILL


_read_environment()
_reached: dict[str, int] = {}


def crashpoint(name: str, rows: Sequence[Typed] = ()) -> None:
    """Die here if armed; `rows` are those that an append is about.

    Raises KeyError for a name that is not registered.
    """
    CRASHPOINTS[name]
    for watcher in _watchers:
        watcher(name)
    if _noted_in and name not in _noted:
        _noted.add(name)
        with open(_noted_in, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    if not _armed:
        return
    for key in (name, *sorted({f"{name}@{row.type}" for row in rows})):
        _reached[key] = _reached.get(key, 0) + 1
        if (key, _reached[key]) in _armed:
            os.kill(os.getpid(), _armed[key, _reached[key]])


@contextmanager
def watched(watcher: Callable[[str], None]) -> Generator[None]:
    """Call `watcher` at every place that is reached: a simulator dies by raising from it."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
