"""The driver on stand-ins: asked to stop, or taken over from while it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from surefoot.statemachine.errors import FencedOut
from surefoot.statemachine.log import EventRow
from surefoot.statemachine.phases import Phase
from surefoot.statemachine.state import fold

from .virtual import run_virtually
from .world import World, crash_at, small_config, trained


@pytest.mark.parametrize("updates_before", [0, 1, 4])
def test_preemption_leaves_a_checkpoint_and_goes_on_later(updates_before: int) -> None:
    """Report 36: within the grace time the log ends whole, a checkpoint if time allows, exit code 75."""
    world = World(data_len=16)

    async def life() -> object:
        driver = world.new_driver()

        def watch(rows: object) -> None:
            if world.state().updates >= updates_before and world.state().budget:
                driver.preempt("SIGTERM")

        world.on_commit = watch
        return await driver.run()

    outcome = run_virtually(life())
    world.on_commit = None
    assert outcome.exit_code == 75  # type: ignore[attr-defined]
    state = world.state()
    assert state.phase is Phase.PREEMPTED
    assert state.updates == 0 or state.updates in state.checkpoints
    assert world.run().exit_code == 0
    assert trained(world) == list(range(16))


@pytest.mark.parametrize(("grace_seconds", "updates"), [(30.0, 5), (0.5, 4)])
def test_sigterm_in_the_middle_of_update_5_of_7_is_obeyed_within_the_grace_time(
    grace_seconds: float, updates: int
) -> None:
    """Report 36: update 5 is committed or 4 is, never half; exit code 75, all ranks gone."""
    world = World(small_config(preempt={"grace_seconds": grace_seconds}), data_len=14)
    asked: list[float] = []

    async def life() -> tuple[int, float]:
        driver, loop = world.new_driver(), asyncio.get_running_loop()

        def watch(rows: object) -> None:
            state = world.state()
            if state.phase is Phase.UPDATE and state.updates == 4 and not asked:
                asked.append(loop.time())
                driver.preempt("SIGTERM")

        world.on_commit = watch
        outcome = await driver.run()
        return outcome.exit_code, loop.time() - asked[0]

    code, took_seconds = run_virtually(life())
    world.on_commit = None
    assert code == 75 and took_seconds <= grace_seconds
    assert world.hurried_seconds is not None and 0.0 < world.hurried_seconds <= grace_seconds
    state = world.state()
    assert (state.phase, state.updates) == (Phase.PREEMPTED, updates)
    assert (5 in state.checkpoints) is (updates == 5), "a checkpoint where time allows"
    assert not world.learner._alive
    assert world.run().exit_code == 0
    assert world.state().optimizer_steps == 7 and trained(world) == list(range(14))


def test_an_update_longer_than_the_grace_time_is_given_up_unrecorded() -> None:
    world = World(small_config(preempt={"grace_seconds": 0.5}), data_len=16)

    async def life() -> object:
        driver = world.new_driver()

        def watch(rows: object) -> None:
            state = world.state()
            if state.phase is Phase.UPDATE and state.updates == 4:
                driver.preempt("SIGTERM")

        world.on_commit = watch
        return await driver.run()

    assert run_virtually(life()).exit_code == 75  # type: ignore[attr-defined]
    world.on_commit = None
    assert world.state().updates == 4, "never half"
    assert world.run().exit_code == 0
    assert trained(world) == list(range(16))


def test_the_driver_that_was_taken_over_from_stops_and_writes_nothing_more() -> None:
    world = World(data_len=16)

    async def two_drivers() -> tuple[BaseException, int]:
        first = asyncio.ensure_future(world.new_driver().run())
        third = asyncio.Event()
        world.on_commit = lambda rows: third.set() if world.state().updates >= 3 else None
        await third.wait()
        world.claim(ask=True)
        taken_at = world.state().seq
        (error,) = await asyncio.gather(first, return_exceptions=True)
        assert isinstance(error, BaseException)
        return error, taken_at

    error, taken_at = run_virtually(two_drivers())
    assert isinstance(error, FencedOut)
    assert world.state().seq == taken_at, "nothing was written by the fenced driver"
    assert fold(world.rows()).incarnation == 2


def test_a_take_over_sweeps_what_older_drivers_left_and_nothing_of_a_newer_one() -> None:
    world = World(data_len=16)
    crash_at(world, "group.write.after", 3)
    (stray,) = set(world.disk.groups) - set(world.state().files)
    newer = {"g0009-0000001.msgpack": [b"of a newer driver"]}
    world.disk.groups.update(newer)
    world.disk.checkpoints["u000003-i0001-009"] = {}
    world.disk.checkpoints["u000003-i0009-001"] = {}
    assert world.run().exit_code == 0
    assert stray not in world.disk.groups and "u000003-i0001-009" not in world.disk.checkpoints
    assert world.disk.groups["g0009-0000001.msgpack"] == newer["g0009-0000001.msgpack"]
    assert "u000003-i0009-001" in world.disk.checkpoints


def test_a_driver_that_was_taken_over_from_before_it_read_the_log_takes_no_name_of_the_newer_ones() -> None:
    """It finds the newer incarnation in the log that it reads, and is fenced at its first event; until then
    it redoes updates and writes checkpoints beside the newer one, under its own number."""
    world = World(small_config(checkpoint={"every_updates": 1}), data_len=16)
    crash_at(world, "update.committed", 3)

    async def two_drivers() -> list[object]:
        late, heir = world.claim(ask=True), world.claim(ask=True)
        drivers = [asyncio.ensure_future(world.new_driver(head).run()) for head in (late, heir)]
        return list(await asyncio.gather(*drivers, return_exceptions=True))

    ends = run_virtually(two_drivers())
    assert isinstance(ends[0], FencedOut)
    assert ends[1].exit_code == 0, ends[1]  # type: ignore[attr-defined]
    assert trained(world) == list(range(16))


@pytest.mark.parametrize("node", ["of ranks", "of the driver"])
def test_a_drained_node_of_ranks_or_driver_is_a_preemption_in_order(node: str) -> None:
    world = World(data_len=16)

    def notice(rows: Sequence[EventRow]) -> None:
        if any(row.type == "UpdateApplied" for row in rows) and world.state().updates == 4:
            world.draining = frozenset({node})

    world.on_commit = notice
    outcome = world.run()
    assert outcome.exit_code == 75 and f"node {node} is being drained" in outcome.message
    assert world.state().updates in world.state().checkpoints
    world.draining, world.on_commit = frozenset(), None
    assert world.run().exit_code == 0
    assert trained(world) == list(range(16))


def test_a_drained_node_of_workers_alone_stops_nothing() -> None:
    world = World(data_len=16)
    world.draining = frozenset({"of workers"})
    assert world.run().exit_code == 0
    assert world.pool.drained == {"of workers"}
