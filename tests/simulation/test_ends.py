"""How a run ends, on stand-ins: whatever is under way, its log is whole, and nothing stands after the end.

Every blocking call of a life is drawn on in turn, and calls may take their time, as on a slow disk.
"""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from surefoot.statemachine.audit import audit
from surefoot.statemachine.crashpoints import watched
from surefoot.statemachine.errors import IllegalEvent, RunClosed, RunFailedError
from surefoot.statemachine.events import RunPreempted, WorkerReplaced
from surefoot.statemachine.folded import folded
from surefoot.statemachine.phases import Phase
from surefoot.trainer.display import Display
from surefoot.trainer.driver import Driver
from surefoot.trainer.run import _claim, _outcome_if_over

from .fileworld import FileWorld
from .virtual import run_virtually
from .world import World, crash_at, small_config, trained

EVERY_UPDATE = {"checkpoint": {"every_updates": 1, "keep": 2}}
EVALUATED = {"eval": {"every_updates": 1, "size": 2, "source": "object:x"}}


def broken(world: World) -> list[tuple[str, str]]:
    """The identities of the audit that do not hold."""
    rows = world.rows()
    report = audit(rows, folded=lambda: folded(rows))
    return [(check.id, check.detail) for check in report.checks if not check.ok]


def lives_hit_at_each_call(
    what: Callable[[World, Driver], None], **sections: Any
) -> Iterator[tuple[World, Any]]:
    """A life for each of its blocking calls, at which `what` happens; the world and the outcome, or error."""
    for nth in range(1, 1000):
        world, hit = World(small_config(**sections), data_len=10), False

        async def life(world: World = world, nth: int = nth) -> Any:
            driver = world.new_driver()

            def look(calls: int) -> None:
                nonlocal hit
                if calls == nth:
                    hit = True
                    what(world, driver)

            world.hands.on_call = look
            return await driver.run()

        try:
            ended: Any = run_virtually(life())
        except Exception as error:
            ended = error
        if not hit:
            assert nth > 10
            return
        world.hands.on_call = None
        yield world, ended


@pytest.mark.parametrize("seconds", [0.0, 0.7])
@pytest.mark.parametrize("sections", [{}, {**EVERY_UPDATE, **EVALUATED, "sync": {"max_staleness": 0}}])
def test_a_signal_at_any_call_leaves_a_checkpoint_once_and_a_whole_log(
    sections: dict[str, Any], seconds: float
) -> None:
    def signal_on_a_slow_disk(world: World, driver: Driver) -> None:
        world.hands.hold(seconds)
        driver.preempt("SIGTERM")

    for world, outcome in lives_hit_at_each_call(signal_on_a_slow_disk, **sections):
        assert outcome.exit_code in (0, 75), outcome
        state = world.state()
        assert state.updates == 0 or state.updates in state.checkpoints
        updates = [event.update for event in world.events("CheckpointCommitted")]
        assert len(updates) == len(set(updates)), "a checkpoint was committed twice"
        assert broken(world) == []
        if not state.closed:
            assert world.run().exit_code == 0
        assert sorted(trained(world)) == list(range(10))
        assert broken(world) == []


def test_a_learner_lost_at_any_call_leaves_no_file_behind() -> None:
    def lose(world: World, driver: Driver) -> None:
        world.hands.hold(0.7)
        world.learner._alive = False

    for world, outcome in lives_hit_at_each_call(lose, checkpoint={"every_updates": 1, "keep": 1}):
        assert getattr(outcome, "exit_code", outcome) == 0
        assert broken(world) == []
        kept = {checkpoint.path for checkpoint in world.state().checkpoints.values()}
        assert set(world.disk.checkpoints) == kept
        assert set(world.disk.groups) == set(world.state().files)


@pytest.mark.parametrize("seconds", [0.2, 1.5])
def test_nothing_follows_a_failure_and_it_says_the_updates_that_the_log_has(seconds: float) -> None:
    def fail(world: World, driver: Driver) -> None:
        world.hands.hold(seconds)

        async def answers() -> Any:
            raise RunFailedError("a worker could not be replaced")

        world.pool.answers = answers  # type: ignore[method-assign]
        world.pool._queue.put_nowait(None)

    failures = 0
    for world, outcome in lives_hit_at_each_call(fail, **EVERY_UPDATE, **EVALUATED):
        failures += isinstance(outcome, Exception)
        assert broken(world) == []
    assert failures > 10


def test_a_decision_that_is_late_for_the_lock_is_refused_once_the_incarnation_has_ended() -> None:
    world = World(data_len=16)

    async def life() -> None:
        journal = world.new_driver()._journal
        state = journal.state
        end = RunPreempted(updates=0, optimizer_steps=0, checkpoint_update=0, because="asked")
        first = asyncio.ensure_future(journal.append(end))
        await asyncio.sleep(0)
        with pytest.raises(IllegalEvent, match="the run is Preempted"):
            await journal.append(WorkerReplaced(worker=0, because="killed"))
        await first
        assert state.phase is Phase.PREEMPTED

    run_virtually(life())
    assert [row.type for row in world.rows()][-1] == "RunPreempted"


def test_a_checkpoint_at_a_stop_is_of_the_moment_whatever_is_committed_meanwhile() -> None:
    """The publication that was under way when the signal came is not in it, and is not said to be."""
    world, asked = World(data_len=16), False

    async def life() -> Any:
        driver = world.new_driver()
        save = world.learner.save

        async def slow(*given: Any) -> None:
            await asyncio.sleep(0.5)
            await save(*given)

        world.learner.save = slow  # type: ignore[method-assign]

        def watcher(place: str) -> None:
            nonlocal asked
            state = world.state()
            if place == "publish.gathered" and state.updates == 4 and not asked:
                asked = True
                world.hands.hold(0.3)
                asyncio.get_running_loop().call_later(0.1, driver.preempt, "SIGTERM")

        with watched(watcher):
            return await driver.run()

    assert run_virtually(life()).exit_code == 75 and asked
    assert broken(world) == []


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_publication_that_cannot_be_sent_ends_the_run(max_staleness: int) -> None:
    world = World(small_config(sync={"max_staleness": max_staleness}), data_len=16)

    async def life() -> None:
        driver = world.new_driver()
        publish = world.pool.publish

        async def refuse(weights: Any) -> None:
            if weights.version == 3:
                raise RunFailedError("policy version 3 could not be handed to the cluster")
            await publish(weights)

        world.pool.publish = refuse  # type: ignore[method-assign]
        await driver.run()

    with pytest.raises(RunFailedError, match="could not be handed"):
        run_virtually(life())
    assert world.state().phase is Phase.FAILED


def test_a_run_that_fails_while_it_is_being_stopped_has_failed() -> None:
    world = World(data_len=12)

    async def life() -> None:
        driver = world.new_driver()
        update = world.learner.update

        async def differ(number: int, batch: Any, rows: Any) -> Any:
            if number == 3:
                driver.preempt("SIGTERM")
                await asyncio.sleep(0.5)
                raise RunFailedError("update 3: rank 1 took other steps than rank 0")
            return await update(number, batch, rows)

        world.learner.update = differ  # type: ignore[method-assign]
        await driver.run()

    with pytest.raises(RunFailedError, match="other steps"):
        run_virtually(life())
    assert world.state().phase is Phase.FAILED


def test_a_checkpoint_that_failed_is_noticed_at_the_next_update() -> None:
    world = World(small_config(checkpoint={"every_updates": 6}), data_len=48)

    async def life() -> None:
        driver = world.new_driver()

        async def saved() -> Any:
            await asyncio.sleep(0.1)
            raise OSError(errno.ENOSPC, "No space left on device")

        world.learner.saved = saved  # type: ignore[method-assign]
        await driver.run()

    with pytest.raises(OSError, match="No space"):
        run_virtually(life())
    assert world.state().updates <= 7


def test_a_listener_that_raises_in_a_transaction_fails_the_run_and_leaves_log_and_fold_equal() -> None:
    world = World(data_len=12)

    async def life() -> None:
        driver = world.new_driver()

        def listen(row: Any, event: Any, state: Any) -> None:
            if row.type == "WeightsPublished" and event.version == 2:
                raise OSError(errno.ENOSPC, "No space left on device")

        driver._journal.listeners.append(listen)
        await driver.run()

    with pytest.raises(OSError, match="No space"):
        run_virtually(life())
    assert world.state().phase is Phase.FAILED
    assert broken(world) == []


def test_a_reader_of_the_display_that_goes_away_ends_no_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    world = World(data_len=12)

    async def life() -> Any:
        driver = world.new_driver()
        with Display("a", Console(file=Gone())) as display:
            driver._journal.listeners.append(display.on_event)
            return await driver.run()

    assert run_virtually(life()).exit_code == 0


def test_no_slot_is_given_away_twice_however_long_a_commit_takes() -> None:
    for seed in range(20):
        config = small_config(
            sync={"max_staleness": 3},
            rollout={"workers": 1, "max_concurrent": 6},  # 3 groups at once
        )
        world, under_way = World(config, data_len=40, seed=seed), list[int]()

        async def life(world: World = world, under_way: list[int] = under_way) -> None:
            driver = world.new_driver()
            submit = world.pool.submit

            def look(requests: Sequence[Any]) -> None:
                submit(requests)
                under_way.append(len(world.pool._under_way))

            world.pool.submit = look  # type: ignore[method-assign]
            world.hands.on_call = lambda calls: world.hands.hold(0.3)
            await driver.run()

        run_virtually(life())
        assert max(under_way) == 3


@pytest.mark.parametrize("take_over", [False, True])
def test_a_run_that_completes_while_a_second_command_starts_its_ray_is_not_taken_over(
    tmp_path: Path, take_over: bool
) -> None:
    world = FileWorld(tmp_path)
    crash_at(world, "update.committed", 7)
    world.log.release("sim", 1)
    second = FileWorld(tmp_path)
    assert _outcome_if_over(second.place, second.prepared, take_over=take_over) is None
    assert world.run().exit_code == 0  # meanwhile
    world.log.release("sim", world.state().incarnation)
    before = len(world.rows())
    with pytest.raises(RunClosed, match="RunCompleted"):
        _claim(second.place, second.prepared, take_over, False)
    assert len(world.rows()) == before
    over = _outcome_if_over(second.place, second.prepared, take_over=take_over)
    assert over is not None and over.exit_code == 0 and over.already
