"""Replay on stand-ins: the recorded updates are executed again, and one that differs is found and named."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from surefoot.statemachine.errors import LogBroken, RunFailedError, UserMistake
from surefoot.trainer.replay import Recording, Replay, replay, replay_run
from tests.simulation.virtual import run_virtually
from tests.simulation.world import StandInLearner, StandInStore, World, crash_at, small_config

KEEP_ALL = {"keep": "all"}


def finished(data_len: int = 14, **sections: dict[str, object]) -> World:
    """A world whose run of `data_len` / 2 updates is complete."""
    world = World(small_config(**sections), data_len)
    assert world.run().phase == "Completed"
    return world


def replayed(world: World, from_update: int | None = None) -> tuple[Replay, StandInLearner, list[int]]:
    """A replay on a fresh learner; also what it has told of."""
    learner, told = StandInLearner(world), list[int]()
    recording = Recording.of(world.rows())
    done = run_virtually(
        replay(
            recording,
            learner,
            StandInStore(world.disk),
            from_update,
            lambda update, last, equal: told.append(update),
        )
    )
    return done, learner, told


def test_every_update_is_executed_again_and_equal() -> None:
    world = finished(groups=KEEP_ALL)
    before = len(world.rows())
    done, learner, told = replayed(world)
    assert learner.executed == told == [1, 2, 3, 4, 5, 6, 7]
    assert done.ok and done.deviation.same_execution and done.deviation.loss == 0.0
    # a publication after each of 7 updates, checkpoints of 3, 6 and 7
    assert (done.weights_compared, done.weights_equal) == (10, 10)
    assert done.last_digest == world.events("RunCompleted")[0].weights_digest
    assert len(world.rows()) == before, "a replay writes nothing"


def test_it_begins_at_the_oldest_kept_checkpoint_where_groups_were_retired() -> None:
    world = finished()  # keeps the checkpoints of updates 6 and 7
    done, learner, _ = replayed(world)
    assert (done.checkpoint_update, learner.executed) == (6, [7])
    assert done.ok and done.last_digest == world.events("RunCompleted")[0].weights_digest


def test_from_an_update_it_begins_at_the_nearest_checkpoint_before_it() -> None:
    world = finished(groups=KEEP_ALL, checkpoint={"every_updates": 2, "keep": 3})  # 4, 6 and 7 are kept
    assert replayed(world, 6)[1].executed == [5, 6, 7]
    assert replayed(world, 7)[1].executed == [7]
    assert replayed(world, 4)[1].executed == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("from_update", [0, 8, -1])
def test_an_update_that_is_not_there_is_refused_with_the_range(from_update: int) -> None:
    with pytest.raises(UserMistake, match=f"--from {from_update}: the run's updates are 1 to 7"):
        Recording.of(finished().rows()).base(from_update)


def test_an_update_before_what_is_kept_is_refused_with_the_first_that_can_be() -> None:
    with pytest.raises(UserMistake, match=r"--from 3: what is kept begins after update 6; name update 7"):
        Recording.of(finished().rows()).base(3)


def test_a_loss_that_differs_on_the_same_execution_is_named_by_its_event() -> None:
    world = finished(groups=KEEP_ALL)
    seq = next(row.seq for row in world.rows() if row.type == "UpdateApplied")
    world.noise = 0.25
    done, _, _ = replayed(world)
    assert not done.ok
    assert done.differences[0].startswith(f"event {seq}: update 1: optimizer step 0 was recorded with loss")
    assert done.deviation.loss == pytest.approx(0.25)


def test_weights_that_differ_are_found_though_every_loss_is_equal() -> None:
    world = finished(groups=KEEP_ALL)

    class Other(StandInLearner):
        async def gather(self, version: int):  # type: ignore[no-untyped-def]
            published = await super().gather(version)
            return published if published.update != 5 else msgspec.structs.replace(published, digest="other")

    recording = Recording.of(world.rows())
    done = run_virtually(replay(recording, Other(world), StandInStore(world.disk), None, lambda *told: None))
    seq = next(e.seq for e in recording.weights if e.update == 5)
    assert [line.split(":")[0] for line in done.differences] == [f"event {seq}"]


def test_on_another_execution_deviations_are_measured_and_allowed() -> None:
    world = finished(groups=KEEP_ALL)
    world.fingerprint, world.noise = {"ranks": "2"}, 0.25
    done, _, _ = replayed(world)
    assert done.ok and not done.deviation.same_execution
    assert done.deviation.loss == pytest.approx(0.25)
    assert "recorded on another execution" in "\n".join(done.lines())


def test_another_learning_rate_is_never_allowed() -> None:
    world = finished(groups=KEEP_ALL)

    class Faster(StandInLearner):
        async def update(self, *given):  # type: ignore[no-untyped-def]
            result = await super().update(*given)
            steps = [msgspec.structs.replace(s, learning_rate=2 * s.learning_rate) for s in result.steps]
            return msgspec.structs.replace(result, steps=steps)

    world.fingerprint = {"ranks": "2"}
    done = run_virtually(
        replay(Recording.of(world.rows()), Faster(world), StandInStore(world.disk), None, lambda *told: None)
    )
    assert len(done.differences) == 7
    assert (
        "recorded with optimizer step 0 at learning rate 0.5, executed again with 0 at 1.0"
        in (done.differences[0])
    )


def test_a_run_that_was_killed_and_redone_replays_as_one() -> None:
    world = World(small_config(groups=KEEP_ALL), 14)
    crash_at(world, "update.committed", 5)
    assert (world.lives, world.state().updates) == (1, 5)
    assert world.run().phase == "Completed"
    assert world.events("UpdatesRedone")[0].first_update == 4
    done, learner, _ = replayed(world)
    assert learner.executed == [1, 2, 3, 4, 5, 6, 7] and done.ok
    assert done.weights_compared == done.weights_equal


def test_a_group_file_that_is_gone_is_named_with_the_update_that_needs_it() -> None:
    world = finished(groups=KEEP_ALL)
    file = Recording.of(world.rows()).updates[2].places[0][0]
    del world.disk.groups[file]
    with pytest.raises(RunFailedError, match=r"update \d needs group \d+: .*begin later with --from \d"):
        replayed(world)


def test_a_log_without_updates_has_nothing_to_replay() -> None:
    world = World()
    world.claim()
    with pytest.raises(UserMistake, match="no update yet"):
        Recording.of(world.rows()).base(None)


def test_a_log_that_was_edited_is_refused_before_anything_is_started() -> None:
    rows = finished(groups=KEEP_ALL).rows()
    rows[9] = msgspec.structs.replace(rows[9], time="2027-01-01T00:00:00+00:00")  # the fold would not mind
    with pytest.raises(LogBroken, match="event 10 "):
        asyncio.run(replay_run(rows, lambda config: "", None, lambda *told: None))
