"""The log in memory: the same contract as a database's, for simulation and tests.

Owns its rows and heads; they end with the object. Several drivers share one by sharing the object. Its
clocks and its view of other processes are arguments, so that a simulator can own them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .crashpoints import crashpoint
from .events import Event, TakeReason
from .liveness import DriverIdentity, lives
from .log import (
    GENESIS_HASH,
    EventRow,
    RunHead,
    build_rows,
    incarnation_began,
    refuse_closed,
    refuse_misbuilt,
    run_exists,
    run_unknown,
    take_reason,
    utc_now,
    verify_chain,
    why_refused,
)


class _Run(msgspec.Struct):
    rows: list[EventRow]
    incarnation: int
    driver: DriverIdentity
    heartbeat_at: float
    released: bool


class MemoryLog:
    """An EventLog without a database.

    `seconds` is the clock of heartbeats, `now` makes the time of rows, `lives` looks at a driver.
    """

    def __init__(
        self,
        *,
        seconds: Callable[[], float] = time.monotonic,
        now: Callable[[], str] = utc_now,
        lives: Callable[[DriverIdentity], bool | None] = lives,
    ) -> None:
        self._seconds = seconds
        self._now = now
        self._lives = lives
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()

    def create(self, run_id: str, first: Event, driver: DriverIdentity) -> RunHead:
        with self._lock:
            if run_id in self._runs:
                raise run_exists(run_id)
            events = (first, incarnation_began(1, TakeReason.NEW, driver))
            rows = build_rows(run_id, 0, GENESIS_HASH, 1, events, self._now())
            self._runs[run_id] = _Run(rows, 1, driver, self._seconds(), False)
            return self._head(run_id)

    def take_over(
        self,
        run_id: str,
        driver: DriverIdentity,
        *,
        ask: bool = False,
        config_changes: Mapping[str, list[Any]] | None = None,
        digest_changes: Mapping[str, list[str]] | None = None,
        accept_divergence: bool = False,
    ) -> RunHead:
        with self._lock:
            head = self._head(run_id)
            refuse_closed(run_id, self._runs[run_id].rows[-1].type)
            reason = take_reason(head, ask=ask, lives=self._lives)
            mine = head.incarnation + 1
            began = incarnation_began(mine, reason, driver, config_changes, digest_changes, accept_divergence)
            rows = build_rows(run_id, head.head_seq, head.head_hash, mine, (began,), self._now())
            run = self._runs[run_id]
            self._runs[run_id] = _Run(run.rows + rows, mine, driver, self._seconds(), False)
            return self._head(run_id)

    def append(self, run_id: str, expected_seq: int, incarnation: int, rows: Sequence[EventRow]) -> None:
        refuse_misbuilt(run_id, expected_seq, incarnation, rows)
        crashpoint("log.append.before", rows)
        with self._lock:
            head, run = self._head(run_id), self._runs[run_id]
            if (head.head_seq, head.incarnation) != (expected_seq, incarnation):
                if run.rows[expected_seq : expected_seq + len(rows)] == list(rows):
                    return
                raise why_refused(head, expected_seq, incarnation)
            verify_chain(rows, head.head_hash, expected_seq)
            run.rows.extend(rows)
            run.heartbeat_at = self._seconds()
        crashpoint("log.append.after", rows)

    def read(self, run_id: str, after_seq: int = 0, limit: int | None = None) -> Iterator[EventRow]:
        run = self._run(run_id)
        end = len(run.rows) if limit is None else min(len(run.rows), after_seq + limit)
        return iter(run.rows[after_seq:end])

    def head(self, run_id: str) -> RunHead:
        with self._lock:
            return self._head(run_id)

    def runs(self) -> list[RunHead]:
        with self._lock:
            return [self._head(run_id) for run_id in sorted(self._runs)]

    def heartbeat(self, run_id: str, incarnation: int) -> None:
        with self._lock:
            head = self._head(run_id)
            if head.incarnation != incarnation:
                raise why_refused(head, head.head_seq, incarnation)
            self._runs[run_id].heartbeat_at = self._seconds()

    def hurry(self, seconds: float) -> None:
        """Memory is never away."""

    def release(self, run_id: str, incarnation: int) -> None:
        with self._lock:
            run = self._run(run_id)
            if run.incarnation == incarnation:
                run.released = True

    def close(self) -> None:
        """Nothing to let go of; the rows stay with the object."""

    def _run(self, run_id: str) -> _Run:
        if run_id not in self._runs:
            raise run_unknown(run_id)
        return self._runs[run_id]

    def _head(self, run_id: str) -> RunHead:
        run = self._run(run_id)
        return RunHead(
            run_id=run_id,
            head_seq=len(run.rows),
            head_hash=run.rows[-1].hash,
            incarnation=run.incarnation,
            driver=run.driver,
            heartbeat_age_seconds=max(self._seconds() - run.heartbeat_at, 0.0),
            released=run.released,
        )
