"""Whatever is asked of a log in a database, in whatever order: it answers as the one in memory does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from surefoot.statemachine.errors import SurefootError
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import EventLog, EventRow, build_rows, verify_chain
from surefoot.statemachine.memorylog import MemoryLog
from surefoot.statemachine.sqllog import open_log

from .logs import ELSEWHERE, FIRST, HERE, note

TIME = "2026-01-02T03:04:05.678Z"
RUNS = st.sampled_from(["a", "b"])
DRIVERS = st.sampled_from([HERE, ELSEWHERE, DriverIdentity(HERE.host, 1, "dead")])


def lives_here(driver: DriverIdentity) -> bool | None:
    return None if driver == ELSEWHERE else driver == HERE


class LogsAgree(RuleBasedStateMachine):
    """Rows are built once, from heads of then and of now, and sent as often as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        url = f"sqlite:///{Path(self.folder.name) / 'log.db'}"
        self.sql = open_log(url, migrate=True, now=lambda: TIME, lives=lives_here)
        self.other = open_log(url, migrate=True, now=lambda: TIME, lives=lives_here)
        self.memory = MemoryLog(now=lambda: TIME, lives=lives_here)
        self.built: list[tuple[str, int, int, list[EventRow]]] = []

    def teardown(self) -> None:
        self.sql.close()
        self.other.close()
        self.folder.cleanup()

    def both(self, use_other: bool, ask: Callable[[EventLog], object]) -> None:
        """Ask both the same and compare the answers, errors with their facts."""
        answers: list[object] = []
        for log in (self.memory, self.other if use_other else self.sql):
            try:
                answers.append(ask(log))
            except SurefootError as error:
                facts = {k: v for k, v in error.facts.items() if k != "heartbeat_age_seconds"}
                answers.append((type(error), facts))
        memory, sql = (
            msgspec.structs.replace(answer, heartbeat_age_seconds=None)
            if isinstance(answer, msgspec.Struct)
            else answer
            for answer in answers
        )
        assert memory == sql

    @rule(run_id=RUNS, driver=DRIVERS, other=st.booleans())
    def create(self, run_id: str, driver: DriverIdentity, other: bool) -> None:
        self.both(other, lambda log: log.create(run_id, FIRST, driver))

    @rule(run_id=RUNS, driver=DRIVERS, ask=st.booleans(), other=st.booleans())
    def take_over(self, run_id: str, driver: DriverIdentity, ask: bool, other: bool) -> None:
        self.both(other, lambda log: log.take_over(run_id, driver, ask=ask))

    @rule(run_id=RUNS, text=st.text(max_size=3), events=st.integers(1, 3), stale=st.integers(0, 1))
    def build(self, run_id: str, text: str, events: int, stale: int) -> None:
        heads = [head for head in self.memory.runs() if head.run_id == run_id]
        for head in heads:
            mine = max(head.incarnation - stale, 1)
            rows = build_rows(run_id, head.head_seq, head.head_hash, mine, [note(text)] * events, TIME)
            self.built.append((run_id, head.head_seq, mine, rows))

    @rule(which=st.integers(0, 5), other=st.booleans())
    def send(self, which: int, other: bool) -> None:
        for run_id, seq, incarnation, rows in self.built[-1 - which : len(self.built) - which]:
            self.both(other, lambda log, a=(run_id, seq, incarnation, rows): log.append(*a))

    @rule(run_id=RUNS, incarnation=st.integers(1, 3), other=st.booleans())
    def heartbeat(self, run_id: str, incarnation: int, other: bool) -> None:
        self.both(other, lambda log: log.heartbeat(run_id, incarnation))

    @rule(run_id=RUNS, incarnation=st.integers(1, 3), other=st.booleans())
    def release(self, run_id: str, incarnation: int, other: bool) -> None:
        self.both(other, lambda log: log.release(run_id, incarnation))

    @rule(run_id=RUNS, after=st.integers(0, 9), limit=st.none() | st.integers(0, 9), other=st.booleans())
    def read(self, run_id: str, after: int, limit: int | None, other: bool) -> None:
        self.both(other, lambda log: list(log.read(run_id, after, limit)))

    @invariant()
    def the_logs_are_the_same_and_whole(self) -> None:
        for head in self.memory.runs():
            self.both(False, lambda log, run_id=head.run_id: log.head(run_id))
            rows = list(self.sql.read(head.run_id))
            assert rows == list(self.memory.read(head.run_id))
            assert verify_chain(rows) == head.head_hash


TestLogsAgree = LogsAgree.TestCase
TestLogsAgree.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
