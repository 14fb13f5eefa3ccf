"""The log in memory keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from surefoot.statemachine.log import EventLog
from surefoot.statemachine.memorylog import MemoryLog

from .log_contract import LogContract


class TestMemoryLog(LogContract):
    seconds = 1000.0

    @pytest.fixture
    def log(self) -> Iterator[EventLog]:
        yield MemoryLog(seconds=lambda: self.seconds)

    def again(self, log: EventLog) -> EventLog:
        return log

    def let_pass(self, log: EventLog, run_id: str, seconds: float) -> None:
        self.seconds += seconds
