"""The driver on stand-ins: asked to stop, or taken over from while it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from surefoot.rollout.protocols import Published
from surefoot.statemachine.errors import FencedOut
from surefoot.statemachine.log import EventRow
from surefoot.statemachine.phases import Phase
from surefoot.statemachine.state import fold

from .virtual import run_virtually
from .world import World, crash_at, ledger, small_config, trained


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
    asked_with, *_ = world.hurried_seconds
    assert 0.8 * grace_seconds < asked_with <= 0.9 * grace_seconds, "told at once, and not only at the end"
    state = world.state()
    assert (state.phase, state.updates) == (Phase.PREEMPTED, updates)
    assert (5 in state.checkpoints) is (updates == 5), "a checkpoint where time allows"
    assert not world.learner._alive
    assert world.run().exit_code == 0
    assert world.state().optimizer_steps == 7 and trained(world) == list(range(14))


def test_a_signal_while_workers_are_handed_the_weights_at_a_resume_keeps_those_weights() -> None:
    """The checkpoint is newer than the last publication: without them no later life could serve it."""
    world = World(small_config(checkpoint={"every_updates": 3}), data_len=16)
    crash_at(world, "update.committed", 4)
    assert world.state().published_update == 3

    async def life() -> int:
        driver, publish = world.new_driver(), world.pool.publish

        async def slow(served: Published) -> None:
            driver.preempt("SIGTERM")
            await asyncio.sleep(1.0)
            await publish(served)

        world.pool.publish = slow  # type: ignore[method-assign]
        return (await driver.run()).exit_code

    assert run_virtually(life()) == 75
    assert 4 in world.state().checkpoints
    assert world.run().exit_code == 0
    assert world.events("CheckpointLost") == []
    assert trained(world) == list(range(16))


def test_a_checkpoint_without_the_weights_that_are_served_is_lost_and_an_older_one_is_used() -> None:
    world = World(small_config(checkpoint={"every_updates": 3, "keep": 2}), data_len=16)
    crash_at(world, "update.committed", 4)

    async def life() -> int:
        driver, save = world.new_driver(), world.learner.save

        async def forgetful(path: str, head_seq: int, head_hash: str, served: Published | None) -> None:
            await save(path, head_seq, head_hash, None)

        world.learner.save = forgetful  # type: ignore[method-assign]
        world.on_commit = lambda rows: driver.preempt("SIGTERM") if world.state().updates == 4 else None
        return (await driver.run()).exit_code

    assert run_virtually(life()) == 75
    world.on_commit = None
    newest = world.state().latest_checkpoint()
    assert newest is not None and newest.update == 4
    assert world.run().exit_code == 0
    (lost,) = world.events("CheckpointLost")
    assert lost.update == 4 and "lacks the weights of policy version 3" in lost.because
    assert world.events("UpdatesRedone")[-1].checkpoint_update == 3
    assert trained(world) == list(range(16))


def test_a_run_that_is_stopped_in_each_of_its_redos_gets_on() -> None:
    """An update takes a second, and no life is long enough for the whole redo."""
    sections = {"checkpoint": {"every_updates": 100}, "sync": {"max_staleness": 0}}
    world, untouched = (World(small_config(**sections), data_len=40) for _ in range(2))
    untouched.run()
    crash_at(world, "update.committed", 12)

    async def life(seconds: float) -> int:
        driver = world.new_driver()
        asyncio.get_running_loop().call_later(seconds, driver.preempt, "SIGTERM")
        return (await driver.run()).exit_code

    held = [0]
    while not world.state().closed:
        assert run_virtually(life(4.5)) in (0, 75)
        held.append(max(world.state().checkpoints, default=0))
        assert held[-1] > held[-2], "each life commits what it has done"
        assert not world.learner._alive
    assert ledger(world) == ledger(untouched)


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
