"""Claims of a run: of two drivers that start at the same instant one holds it, and the log is whole; a config
that is not the run's is refused before anything is changed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from surefoot.statemachine.errors import ConfigChanged, LogBroken, LogUnavailable, RunClosed, UserMistake
from surefoot.statemachine.log import EventRow, RunHead, driver_of, verify_chain
from surefoot.statemachine.sqllog import SqlLog, open_log
from surefoot.trainer.ending import Ending
from surefoot.trainer.outcome import Outcome
from surefoot.trainer.plan import first_event
from surefoot.trainer.run import Run, _outcome_if_over, _taken, train
from surefoot.trainer.threads import Threads
from tests.simulation.fileworld import FileWorld, prepared
from tests.simulation.world import crash_at, small_config, trained
from tests.statemachine.logs import ROOT, dead_driver

from .claiming import APPENDS

TIMES = {"first": 40, "of a dead run": 30, "with --take-over": 30}
"""A hundred in all."""


class Process:
    """A process that claims runs when it is told to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.claiming"],
            cwd=ROOT,
            env={**os.environ, "SUREFOOT_CRASHPOINT": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.hear() == "ready"

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def two() -> Iterator[list[Process]]:
    processes = [Process(), Process()]
    yield processes
    for one in processes:
        one.process.communicate(timeout=60)


def both(two: list[Process], *words: object) -> list[str]:
    """Tell both at once; what they say."""
    for one in two:
        one.tell(*words)
    return [one.hear() for one in two]


def look(runs_dir: Path, run: str = "a") -> tuple[list[int], int]:
    """The incarnation of each row of a log that is whole, and the one that holds the run."""
    with closing(open_log(f"sqlite:///{runs_dir}/{run}/log.db", migrate=False)) as log:
        rows, head = list(log.read(run)), log.head(run)
    assert [row.seq for row in rows] == list(range(1, head.head_seq + 1))
    assert verify_chain(rows) == head.head_hash
    numbers = [row.incarnation for row in rows]
    assert numbers == sorted(numbers), "nothing of an older driver stands after a newer one began"
    return numbers, head.incarnation


@pytest.mark.parametrize("start", ["first", "of a dead run"])
def test_of_two_that_start_at_one_instant_one_holds_the_run_and_one_is_refused(
    two: list[Process], tmp_path: Path, start: str
) -> None:
    """Two first starts make, and migrate, one database at once."""
    dead = dead_driver()
    for number in range(TIMES[start]):
        runs_dir = tmp_path / str(number)
        before = 0
        if start == "of a dead run":
            with closing(open_log(f"sqlite:///{runs_dir}/a/log.db", migrate=True)) as log:
                before = log.create("a", first_event(prepared(small_config(), 16)), dead).incarnation
        mine = before + 1
        assert sorted(both(two, "claim", runs_dir, "-")) == [f"holds {mine}", "in use"], number
        assert sorted(both(two, "again")) == [f"holds {mine}", "in use"], number
        numbers, holder = look(runs_dir)
        assert holder == mine
        assert numbers == [1] * (2 * before) + [mine] * ((1 if before else 2) + APPENDS + 1)


def test_of_two_that_take_over_at_one_instant_the_later_fences_the_earlier(
    two: list[Process], tmp_path: Path
) -> None:
    """Two first starts with --take-over: the earlier one may write until then, and never after."""
    for number in range(TIMES["with --take-over"]):
        runs_dir = tmp_path / str(number)
        said = both(two, "claim", runs_dir, "take-over")
        assert {word[-1] for word in said} == {"1", "2"}, (number, said)
        assert "holds 2" in said
        assert sorted(both(two, "again")) == ["fenced 1", "holds 2"], number
        numbers, holder = look(runs_dir)
        assert holder == 2
        assert 2 <= numbers.count(1) <= 2 + APPENDS
        assert numbers.count(2) == 1 + APPENDS + 1


FIXED = [("data", "epochs", 1, 2), ("batch", "prompts", 2, 4), ("batch", "minibatches", 1, 2)]


@pytest.mark.parametrize(("section", "key", "old", "new"), FIXED)
def test_a_change_of_what_fixes_the_accounting_is_refused_before_the_run_is_taken_over(
    tmp_path: Path, section: str, key: str, old: int, new: int
) -> None:
    """Report 24: data, batch, epochs; both values are said."""
    crash_at(world := FileWorld(tmp_path), "update.committed", 3)
    world.log.close()
    changed = FileWorld(tmp_path, small_config(**{section: {key: new}}))
    with pytest.raises(ConfigChanged, match=rf"{section}\.{key} = {new}.*{old}"):
        changed.run()
    assert look(tmp_path, "sim")[1] == 1


@pytest.mark.parametrize("what", ["seed", "data"])
def test_another_seed_or_other_rows_are_refused_before_the_run_is_taken_over(
    tmp_path: Path, what: str
) -> None:
    """Report 24."""
    crash_at(world := FileWorld(tmp_path), "update.committed", 3)
    world.log.close()
    changed = FileWorld(tmp_path, small_config(seed=8) if what == "seed" else None)  # type: ignore[arg-type]
    if what == "data":
        changed.prepared.digests["data"] = "of other rows"
    with pytest.raises(ConfigChanged, match=r"seed = 8.*7" if what == "seed" else "of other rows.*with d"):
        changed.run()
    assert look(tmp_path, "sim")[1] == 1


def test_a_change_of_workers_and_logging_is_accepted_and_recorded(tmp_path: Path) -> None:
    """Report 24."""
    crash_at(world := FileWorld(tmp_path), "update.committed", 3)
    world.log.close()
    changed = FileWorld(tmp_path, small_config(rollout={"workers": 5}, metrics={"jsonl": False}))
    assert changed.run().exit_code == 0
    began = changed.events("IncarnationBegan")[-1]
    assert began.config_changes == {"rollout.workers": [2, 5], "metrics.jsonl": [True, False]}
    assert trained(changed) == list(range(16)) and changed.state().optimizer_steps == 8
    changed.log.close()


def test_a_run_that_ends_while_ray_starts_is_told_of_as_any_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = FileWorld(tmp_path)
    assert world.run().exit_code == 0
    over = _outcome_if_over(world.place, world.prepared, take_over=False)
    looks = iter([None, over])  # before Ray is up, and once the claim was refused
    monkeypatch.setattr("surefoot.trainer.run._prepare", lambda *_: world.prepared)
    monkeypatch.setattr("surefoot.trainer.run._outcome_if_over", lambda *_: next(looks))

    async def refused(*_: object) -> None:
        raise RunClosed("run 'sim' is over", run="sim", ending="RunCompleted")

    monkeypatch.setattr(Run, "_begin", refused)

    async def started() -> Outcome:
        async with Run.start({}, name="sim", runs_dir=tmp_path) as run:
            assert not run.driven
            return await run.outcome()

    assert asyncio.run(started()).message.startswith("already completed")


class HeldLog:
    """A log that says what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def hurry(self, seconds: float) -> None:
        pass

    def read(self, run_id: str) -> list[EventRow]:
        return []

    def release(self, run_id: str, incarnation: int) -> None:
        self.asked.append((run_id, incarnation))

    def close(self) -> None:
        self.asked.append("close")


@pytest.mark.parametrize(("grace_seconds", "in_time"), [(30.0, True), (0.05, False)])
async def test_a_claim_that_nobody_waits_for_any_more_is_gone_on_with_to_tell_the_log_or_let_go_of(
    grace_seconds: float, in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that claims cannot be cancelled, and an incarnation that has begun has an end in its log."""
    log, began, goes_on = HeldLog(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def claim(*_: object) -> tuple[HeldLog, RunHead]:
        loop.call_soon_threadsafe(began.set)
        goes_on.wait()
        return log, RunHead("a", 2, "h", 7, None, 0.0, False)

    monkeypatch.setattr("surefoot.trainer.run._claim", claim)
    threads, ending = Threads("test"), Ending(grace_seconds)
    taking = asyncio.ensure_future(_taken(threads, ending))
    await began.wait()
    taking.cancel()
    if in_time:
        loop.call_soon(goes_on.set)
        taken = await taking
        assert isinstance(taken.cancelled, asyncio.CancelledError) and ending.asked
        assert log.asked == [], "the driver is going to tell the log, and lets go then"
    else:
        with pytest.raises(asyncio.CancelledError):
            await taking
        goes_on.set()
    threads.close()
    assert log.asked == ([] if in_time else [("a", 7), "close"])


async def test_a_taken_log_that_cannot_be_read_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    log = HeldLog()

    def broken(run_id: str) -> list[EventRow]:
        raise LogBroken("event 2 is missing", seq=2)

    monkeypatch.setattr(log, "read", broken)
    monkeypatch.setattr(
        "surefoot.trainer.run._claim", lambda *_: (log, RunHead("a", 2, "h", 7, None, 0.0, False))
    )
    threads = Threads("test")
    with pytest.raises(LogBroken):
        await _taken(threads, Ending())
    threads.close()
    assert log.asked == [("a", 7), "close"]


def test_a_driver_whose_append_failed_lets_go_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that it was part of may live on, and is asked for the same run again."""
    world, append = FileWorld(tmp_path), SqlLog.append

    def full(log: SqlLog, run_id: str, expected_seq: int, *rest: Any) -> None:
        if expected_seq > 20:
            raise LogUnavailable("the disk is full")
        append(log, run_id, expected_seq, *rest)

    monkeypatch.setattr(SqlLog, "append", full)
    with pytest.raises(LogUnavailable):
        world.run()
    head = world.log.head("sim")
    assert head.released and driver_of(head) == "left"
    monkeypatch.undo()
    world.log.close()
    again = FileWorld(tmp_path)
    assert again.run().exit_code == 0
    again.log.close()


async def test_train_inside_an_event_loop_is_refused_with_what_to_use_there() -> None:
    with pytest.raises(UserMistake, match=r"async with Run\.start"):
        train({})


async def test_a_start_that_is_cancelled_before_it_asks_for_ray_waits_for_nothing_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, began, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    def prepare(ending: Ending, *_: object) -> None:
        ending.grace_seconds = 0.2
        loop.call_soon_threadsafe(began.set)
        hangs.wait()

    monkeypatch.setattr("surefoot.trainer.run._prepare", prepare)

    async def start() -> None:
        async with Run.start({}, name="a", runs_dir=tmp_path):
            raise AssertionError("it was not to start")

    starting = asyncio.ensure_future(start())
    await began.wait()
    starting.cancel()
    await asyncio.wait({starting}, timeout=60.0)
    assert starting.cancelled()
    hangs.set()
