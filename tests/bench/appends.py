"""Durable single-event appends a second, against raw sqlite3 with the same pragmas.

Both begin an immediate transaction, insert one row of the same size into a table of the same columns, and
commit to disk. Ours also builds the row (canonical JSON, hash chain), moves and checks the run's head, and
passes three triggers. Rounds of both are interleaved in one process.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from surefoot.statemachine.events import AnswerRefused, Event, encode
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import build_rows, utc_now
from surefoot.statemachine.sqllog import open_log

from ..statemachine.scenario import Scenario
from .figures import Bench, Figure, ratio_of_rounds, timed

COLUMNS = "run_id, seq, type, schema, payload, time, incarnation, hash"
RAW_TABLE = f"CREATE TABLE events ({COLUMNS}, PRIMARY KEY (run_id, seq))"
RAW_INSERT = f"INSERT INTO events ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


def measure(bench: Bench) -> list[Figure]:
    """One figure."""
    rounds, appends = (8, 50) if bench.quick else (30, 200)
    bench.say(f"{rounds} rounds of {appends} appends each")
    folder = bench.folder / "appends"
    folder.mkdir()
    ours, raw = SurefootAppends(folder / "ours.db"), RawAppends(folder / "raw.db")
    ours.append(appends)
    raw.append(appends)
    our_seconds: list[float] = []
    raw_seconds: list[float] = []
    for _ in range(rounds):
        raw_seconds.append(timed(lambda: raw.append(appends)))
        our_seconds.append(timed(lambda: ours.append(appends)))
    ours.close()
    raw.close()
    ratio = ratio_of_rounds(raw_seconds, our_seconds)
    return [
        Figure(
            "appends",
            ratio,
            at_least=0.7,
            says="durable single-event appends a second / raw sqlite3, same pragmas",
            details={
                "appends_per_second": rounds * appends / sum(our_seconds),
                "raw_appends_per_second": rounds * appends / sum(raw_seconds),
                "ratio_of_totals": sum(raw_seconds) / sum(our_seconds),
            },
        )
    ]


def event() -> Event:
    """One of some 200 bytes."""
    return AnswerRefused(prompt_index=12345, attempt=1, current_attempt=2, because="b" * 110)


class SurefootAppends:
    """A log with one run; each append is built and committed by itself."""

    def __init__(self, path: Path) -> None:
        self.log = open_log(f"sqlite:///{path}", migrate=True)
        created = Scenario().create().events[0]
        self.head = self.log.create("bench", created, DriverIdentity.here())
        self.seq, self.hash = self.head.head_seq, self.head.head_hash

    def append(self, appends: int) -> None:
        one = event()
        for _ in range(appends):
            rows = build_rows("bench", self.seq, self.hash, 1, [one], utc_now())
            self.log.append("bench", self.seq, 1, rows)
            self.seq, self.hash = rows[-1].seq, rows[-1].hash

    def close(self) -> None:
        self.log.close()


class RawAppends:
    """The same durability and nothing else; the row is there already."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", f"journal_size_limit = {64 << 20}"):
            self.connection.execute(f"PRAGMA {pragma}")
        self.connection.execute(RAW_TABLE)
        self.seq = 0
        time = "2026-01-01T00:00:00.000Z"
        self.rest = ("AnswerRefused", 1, encode(event()).decode(), time, 1, "0" * 64)

    def append(self, appends: int) -> None:
        execute = self.connection.execute
        for _ in range(appends):
            self.seq += 1
            execute("BEGIN IMMEDIATE")
            execute(RAW_INSERT, ("bench", self.seq, *self.rest))
            execute("COMMIT")

    def close(self) -> None:
        self.connection.close()
