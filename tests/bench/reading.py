"""Events read back: from SQLite, chain-checked, decoded and folded a second, and audited as well a second.

The log is that of a valid run, made by the tests' scenario: groups of eight samples, each in a file of its
own, an update of eight groups, a publication after each, a checkpoint every ten. It is read in a process of
its own (`python -m tests.bench.reading`), whose peak memory is thereby the reader's.
"""

from __future__ import annotations

import resource
import sqlite3
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from surefoot.statemachine.audit import audit
from surefoot.statemachine.events import CheckpointCommitted, Event, IncarnationBegan
from surefoot.statemachine.folded import folding
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import EventLog, EventRow, build_rows, chained
from surefoot.statemachine.sqllog import open_log
from surefoot.statemachine.state import fold

from ..statemachine.scenario import Scenario
from .figures import Bench, Figure, answer, settings_of

SECONDS_OF_A_MILLION = 20.0
RUN = "bench"
WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)  # the fold's process as well
AT_ONCE = 5000  # rows of one append while the log is made
BATCH, MINIBATCHES, CHECKPOINT_EVERY = 8, 1, 10


def measure(bench: Bench) -> list[Figure]:
    """Folded, audited, and both against what a million events may take."""
    events = 20_000 if bench.quick else bench.events
    path = bench.folder / "reading" / "log.db"
    path.parent.mkdir()
    bench.say(f"making a log of {events:,} events")
    kinds = make_log(path, events)
    bench.say("reading it")
    read = bench.ask_child("reading", {"path": str(path), "what": "fold"})
    audited = bench.ask_child("reading", {"path": str(path), "what": "audit"})
    raw = bench.ask_child("reading", {"path": str(path), "what": "raw"})
    per_million = 1e6 * audited["seconds"] / audited["events"]
    details = {
        "events": read["events"],
        "events_by_type": kinds,
        "megabytes": path.stat().st_size / 1e6,
        "seconds_for_a_million_to_open_fold_and_audit": per_million,
    }
    return [
        Figure(
            "events_folded",
            read["events"] / read["seconds"],
            "events/s",
            says="read from SQLite, chain checked, decoded, folded",
            details={**details, **read, "against_raw_select": raw["seconds"] / read["seconds"]},
        ),
        Figure(
            "events_audited",
            audited["events"] / audited["seconds"],
            "events/s",
            says=f"read, folded and audited ({'all holds' if audited['ok'] else 'AUDIT FAILED'})",
            details=audited,
        ),
        Figure(
            "million_events",
            per_million / SECONDS_OF_A_MILLION,
            at_most=1.0,
            says=f"open, fold and audit of a million events / {SECONDS_OF_A_MILLION:g} s, from "
            f"{audited['events']:,}; peak {audited['peak_mb']:.0f} MB",
            details={"peak_mb": audited["peak_mb"]},
        ),
        Figure(
            "million_memory",
            audited["peak_mb"] / 1000.0,
            at_most=1.0,
            says=f"both processes of that audit / 1 GB, of {audited['events']:,} events",
        ),
    ]


def make_log(path: Path, events: int) -> dict[str, int]:
    """A valid run of about so many events in one life; how many of each type."""
    log = open_log(f"sqlite:///{path}", migrate=True)
    source = _events(events)
    head = log.create(RUN, next(source), DriverIdentity.here())
    assert isinstance(next(source), IncarnationBegan)  # the log has written its own
    seq, digest = head.head_seq, head.head_hash
    kinds: Counter[str] = Counter()
    while waiting := list(islice(source, AT_ONCE)):
        kinds.update(type(event).__name__ for event in waiting)
        seq, digest = _append(log, seq, digest, waiting)
    log.close()
    return dict(kinds)


def _append(log: EventLog, seq: int, digest: str, waiting: list[Event]) -> tuple[int, str]:
    """Append what waits, each checkpoint with the row before it as the head that it names."""
    rows: list[EventRow] = []
    for event in waiting:
        last_seq, last_hash = (rows[-1].seq, rows[-1].hash) if rows else (seq, digest)
        if isinstance(event, CheckpointCommitted):
            event = msgspec.structs.replace(event, head_seq=last_seq, head_hash=last_hash)
        rows += build_rows(RUN, last_seq, last_hash, 1, [event], "2026-01-01T00:00:00.000Z")
    log.append(RUN, seq, 1, rows)
    return rows[-1].seq, rows[-1].hash


def _events(events: int) -> Iterator[Event]:
    """The scenario's events as they come, none kept."""
    per_update = BATCH + 4 + 2 / CHECKPOINT_EVERY
    updates = max(2, int(events / per_update))
    scenario = Scenario(
        data_len=updates * BATCH, batch_prompts=BATCH, minibatches=MINIBATCHES, every_updates=1, group_size=8
    ).begin()

    def taken() -> Iterator[Event]:
        for _, event in scenario.entries:
            yield event
        scenario.entries.clear()

    for update in range(1, updates + 1):
        scenario.admit().store().update()
        if update % CHECKPOINT_EVERY == 0 or update == updates:
            scenario.checkpoint().retire(2)
        yield from taken()
    scenario.complete()
    yield from taken()


def _fold(path: str) -> tuple[int, bool]:
    log = open_log(f"sqlite:///{path}", migrate=False)
    state = fold(chained(log.read(RUN)))
    log.close()
    return state.seq, state.ended


def _audit(path: str) -> tuple[int, bool]:
    log = open_log(f"sqlite:///{path}", migrate=False)
    head = log.head(RUN)
    with folding(log, f"sqlite:///{path}", RUN, head.head_seq) as folded:  # as `surefoot audit` does it
        report = audit(log.read(RUN), head, folded)
    seq = head.head_seq
    log.close()
    for check in report.checks:
        if not check.ok:
            print(check, file=sys.stderr)
    return seq, report.ok


def _raw(path: str) -> tuple[int, bool]:
    """The bare select, which nothing that reads from SQLite can beat."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT * FROM events WHERE run_id = ? ORDER BY seq", (RUN,))
    (last,) = deque(rows, maxlen=1)
    connection.close()
    return last[1], True


def main() -> None:
    settings = settings_of(sys.argv)
    work = {"fold": _fold, "audit": _audit, "raw": _raw}[settings["what"]]
    started, processor = time.perf_counter(), time.process_time()
    events, ok = work(settings["path"])
    answer(
        {
            "events": events,
            "ok": ok,
            "seconds": time.perf_counter() - started,
            "processor_seconds": time.process_time() - processor,
            "peak_mb": sum(resource.getrusage(who).ru_maxrss for who in WHO) / 1024,
        }
    )


if __name__ == "__main__":
    main()
