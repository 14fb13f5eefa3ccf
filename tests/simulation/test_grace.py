"""Asked to stop while something hangs, on stand-ins: the run ends within its grace time all the same."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from surefoot.statemachine.errors import FencedOut, LogUnavailable, TimedOut
from surefoot.statemachine.log import EventRow
from surefoot.statemachine.phases import Phase
from surefoot.trainer.ending import CHECKPOINT, RAY, WORKERS, Ending
from surefoot.trainer.outcome import Outcome

from .virtual import run_virtually
from .world import World, small_config, trained

GRACE_SECONDS = 10.0


class Hanging:
    over = False  # the life: until then, what hangs does
    asked_at: float | None = None  # by the loop's clock


async def hang(*_: object) -> Any:
    """As a call to a Ray that hangs, made in what must be done though it is cancelled."""
    while not Hanging.over:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def ask(world: World) -> None:
    if Hanging.asked_at is None:
        Hanging.asked_at = asyncio.get_running_loop().time()
    world.driver.preempt("SIGTERM")


def stopped(
    world: World,
    spoil: Callable[[World], None],
    updates: int | None = None,
) -> Any:
    """A life that `spoil` makes hang as it is asked to stop, at so many updates, or from its start on if what
    hangs asks itself. Its outcome, or what it raised. Fails if it took longer than the grace time."""
    Hanging.over, Hanging.asked_at = False, None

    async def life() -> Any:
        driver = world.new_driver()

        def watch(rows: Sequence[EventRow]) -> None:
            if Hanging.asked_at is None and world.state().budget and world.state().updates == updates:
                spoil(world)
                ask(world)

        world.on_commit = watch
        if updates is None:
            spoil(world)
        try:
            ended: Any = await driver.run()
        except Exception as error:
            ended = error
        Hanging.over = True
        assert asyncio.get_running_loop().time() - (Hanging.asked_at or 0.0) <= GRACE_SECONDS
        return ended

    try:
        return run_virtually(life())
    finally:
        world.on_commit = None


def small_world() -> World:
    return World(small_config(preempt={"grace_seconds": GRACE_SECONDS}), data_len=16)


def closing(world: World) -> None:
    world.pool.close = hang  # type: ignore[method-assign]
    world.learner.close = hang  # type: ignore[method-assign]


def saving(world: World) -> None:
    world.learner.saved = hang  # type: ignore[method-assign, assignment]


def everything(world: World) -> None:
    closing(world)
    saving(world)
    world.learner.update = hang  # type: ignore[method-assign, assignment]
    world.pool.publish = hang  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [closing, saving, everything])
@pytest.mark.parametrize("updates", [0, 4])
def test_parts_that_hang_keep_no_run_that_is_asked_to_stop(
    spoil: Callable[[World], None], updates: int
) -> None:
    world = small_world()
    outcome = stopped(world, spoil, updates)
    assert (outcome.exit_code, outcome.unwritten) == (75, "")
    state = world.state()
    assert (state.phase, state.updates) == (Phase.PREEMPTED, updates)
    assert world.run().exit_code == 0
    assert trained(world) == list(range(16))


def test_a_learner_that_hangs_as_it_is_built_keeps_no_run_that_is_asked_to_stop() -> None:
    world = small_world()

    async def start(*_: object) -> None:
        ask(world)
        await hang()

    def spoil(world: World) -> None:
        world.learner.start = start  # type: ignore[method-assign, assignment]

    assert stopped(world, spoil).exit_code == 75
    assert world.events("RunPreempted") and not world.events("WorkersReady")


def test_a_ray_that_does_not_answer_in_time_is_no_failure_of_a_run_that_stops() -> None:
    world = small_world()

    def spoil(world: World) -> None:
        async def late(*_: object) -> Any:
            ask(world)
            await asyncio.sleep(1.0)
            raise TimedOut("Ray did not answer put within 120 s", waited_for="put", seconds=120.0)

        world.learner.update = late  # type: ignore[method-assign]
        world.pool.close = late  # type: ignore[method-assign]

    outcome = stopped(world, spoil)
    assert isinstance(outcome, Outcome) and outcome.exit_code == 75
    assert world.state().phase is Phase.PREEMPTED


def hangs(world: World) -> None:
    world.hands.hold(1e6)


def refuses(world: World) -> None:
    def append(*_: object) -> None:
        raise LogUnavailable("the log at log.db did not do as it was asked: it is locked")

    world.driver._journal.log.append = append  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("spoil", "said"), [(hangs, "the database of the log did not answer"), (refuses, "it is locked")]
)
@pytest.mark.parametrize("updates", [0, 4])
def test_a_database_that_is_away_makes_no_failure_of_a_stop_and_the_outcome_says_so(
    spoil: Callable[[World], None], said: str, updates: int
) -> None:
    world = small_world()
    outcome = stopped(world, spoil, updates)
    assert isinstance(outcome, Outcome)
    assert (outcome.exit_code, outcome.phase, outcome.updates) == (75, Phase.PREEMPTED, updates)
    assert said in outcome.unwritten
    assert f"RunPreempted could not be written: {outcome.unwritten}" in outcome.message
    assert "the same command goes on with the run" in outcome.message
    assert not world.state().ended
    assert world.run().exit_code == 0
    assert trained(world) == list(range(16))


def test_a_database_that_was_away_before_anybody_asked_fails_the_run() -> None:
    world = small_world()

    async def life() -> None:
        world.new_driver()
        refuses(world)
        await world.driver.run()

    with pytest.raises(LogUnavailable):
        run_virtually(life())


def test_a_driver_that_was_taken_over_from_says_so_though_it_was_asked_to_stop() -> None:
    world = small_world()
    assert isinstance(stopped(world, lambda world: world.claim(ask=True) and None, 4), FencedOut)


def test_a_wait_that_was_under_way_ends_by_its_share_of_the_grace_time() -> None:
    async def life() -> None:
        ending, loop = Ending(GRACE_SECONDS), asyncio.get_running_loop()
        never: asyncio.Future[None] = loop.create_future()
        waits = [asyncio.ensure_future(ending.wait(never, by=by)) for by in (CHECKPOINT, WORKERS, RAY)]
        loop.call_later(100.0, ending.ask)
        loop.call_later(101.0, ending.ask)  # of no effect: the first asking counts
        for wait, by in zip(waits, (CHECKPOINT, WORKERS, RAY), strict=True):
            assert not await wait
            assert loop.time() == pytest.approx(100.0 + by * GRACE_SECONDS)
        assert not never.cancelled()

    run_virtually(life())


def test_a_wait_that_nobody_asked_to_end_has_the_bound_it_was_given_and_no_other() -> None:
    async def life() -> None:
        ending, loop = Ending(GRACE_SECONDS), asyncio.get_running_loop()
        assert not await ending.wait(loop.create_future(), by=CHECKPOINT, seconds=300.0)
        assert loop.time() == pytest.approx(300.0)

    run_virtually(life())


def fails_to_close(world: World) -> None:
    async def close() -> None:
        raise RuntimeError("an actor did not end as it should")

    world.pool.close = close  # type: ignore[method-assign]


def listener_fails(world: World) -> None:
    def full(row: EventRow, event: object, state: object) -> None:
        if row.type == "RunPreempted":
            raise OSError(28, "No space left on device")

    world.driver._journal.listeners.append(full)


@pytest.mark.parametrize("spoil", [fails_to_close, listener_fails])
def test_what_goes_wrong_once_the_log_says_that_the_run_was_preempted_changes_no_outcome(
    spoil: Callable[[World], None],
) -> None:
    world = small_world()
    outcome = stopped(world, spoil, 4)
    assert isinstance(outcome, Outcome) and outcome.exit_code == 75
    assert world.rows()[-1].type == "RunPreempted"


def test_parts_that_do_not_even_end_when_they_are_cancelled_keep_no_run_for_ever() -> None:
    """Nobody has asked it to stop."""
    world = small_world()
    Hanging.over, Hanging.asked_at = False, None

    async def life() -> tuple[int, float]:
        driver = world.new_driver()
        closing(world)
        outcome = await driver.run()
        Hanging.over = True
        return outcome.exit_code, asyncio.get_running_loop().time()

    code, seconds = run_virtually(life())
    assert code == 0 and seconds < 100.0
    assert world.log.head(world.run_id).released


def test_what_a_program_does_before_it_leaves_a_run_that_has_stopped_is_not_of_the_grace_time() -> None:
    async def life() -> None:
        ending = Ending(GRACE_SECONDS)
        ending.ask()
        await asyncio.sleep(3.0)
        ending.pause()
        await asyncio.sleep(1_000.0)
        ending.resume()
        assert ending.left(RAY) == pytest.approx(RAY * GRACE_SECONDS - 3.0)
        await asyncio.sleep(1_000.0)
        assert ending.left(RAY) == 0.0

    run_virtually(life())


def test_an_error_of_what_is_cancelled_is_not_printed_as_unseen() -> None:
    printed: list[dict[str, Any]] = []

    async def life() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: printed.append(said))

        async def fails(seconds: float) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(seconds)
            raise TimedOut("Ray did not answer put", waited_for="put", seconds=1.0)

        tasks = [asyncio.ensure_future(fails(0.0)), asyncio.ensure_future(fails(10.0))]
        await asyncio.sleep(0.1)
        assert await Ending().cancel(*tasks, None, by=RAY)
        tasks.clear()
        gc.collect()

    run_virtually(life())
    assert printed == []
