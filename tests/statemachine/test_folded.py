"""A fold in a process beside comes to the same, and whatever becomes of that process, there is an answer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from surefoot.statemachine import folded as module
from surefoot.statemachine.folded import folded, folding
from surefoot.statemachine.log import build_rows
from surefoot.statemachine.sqllog import SqlLog, open_log

from .logs import HERE
from .scenario import whole_run

RUN = "a"


@pytest.fixture
def log(sqlite_url: str) -> Iterator[SqlLog]:
    """The log of a whole run, in a file."""
    log, events = open_log(sqlite_url, migrate=True), [event for _, event in whole_run().entries]
    head = log.create(RUN, events[0], HERE)  # which begins the incarnation as well
    rows = build_rows(RUN, head.head_seq, head.head_hash, 1, events[2:], "2026-01-01T00:00:00.000Z")
    log.append(RUN, head.head_seq, 1, rows)
    yield log
    log.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started beside, for logs of any length."""
    found: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr(module.subprocess, "Popen", Noted)
    monkeypatch.setattr(module, "BESIDE_FROM_EVENTS", 0)
    return found


def test_a_process_beside_folds_to_the_same(
    log: SqlLog, sqlite_url: str, started: list[subprocess.Popen[bytes]]
) -> None:
    seq = log.head(RUN).head_seq
    with folding(log, sqlite_url, RUN, seq) as result:
        assert result() == folded(log.read(RUN)) and result().phase == "Completed"
        assert result() is result()
    assert [child.returncode for child in started] == [0]
    assert not any(sqlite_url in str(argument) for child in started for argument in child.args)


def test_only_what_the_head_held_is_folded(
    log: SqlLog, sqlite_url: str, started: list[subprocess.Popen[bytes]]
) -> None:
    with folding(log, sqlite_url, RUN, 7) as result:
        assert result().events == result().totals["seq"] == 7


def test_a_process_beside_that_is_killed_leaves_the_work_to_its_parent(
    log: SqlLog, sqlite_url: str, started: list[subprocess.Popen[bytes]]
) -> None:
    seq = log.head(RUN).head_seq
    with folding(log, sqlite_url, RUN, seq) as result:
        started[0].kill()
        assert result() == folded(log.read(RUN))


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
def test_where_no_process_comes_up_beside_the_work_is_done_here(
    log: SqlLog, executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BESIDE_FROM_EVENTS", 0)
    monkeypatch.setattr(module.sys, "executable", executable)
    with folding(log, "sqlite:///nowhere", RUN, log.head(RUN).head_seq) as result:
        assert result() == folded(log.read(RUN))


def test_nobody_is_left_when_the_answer_is_not_wanted_any_more(
    log: SqlLog, sqlite_url: str, started: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(KeyboardInterrupt), folding(log, sqlite_url, RUN, log.head(RUN).head_seq):
        raise KeyboardInterrupt
    assert started[0].returncode is not None


def test_a_short_log_needs_no_process(log: SqlLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(module.subprocess, "Popen", never)
    with folding(log, "sqlite:///nowhere", RUN, log.head(RUN).head_seq) as result:
        assert result().phase == "Completed"
