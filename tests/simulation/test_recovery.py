"""The driver on stand-ins: killed, run again, and the run goes on where its log ends."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from surefoot.statemachine.audit import audit
from surefoot.statemachine.errors import Diverged, LogUnavailable, RunFailedError
from surefoot.statemachine.events import GroupsAdmitted, WeightsPublished
from surefoot.statemachine.log import EventRow
from surefoot.statemachine.phases import Phase
from surefoot.trainer.protocols import UpdateResult

from .standins import StandInLearner, hashed
from .virtual import run_virtually
from .world import Faults, World, crash_at, ledger, small_config, trained


def test_schedule_goes_on_at_the_fortieth_step_after_a_kill_there() -> None:
    """Report 15: T=100, killed at 40: position 40, horizon 100, the next rate is that of step 40."""
    world = World(small_config(optim={"lr": 1.0}), data_len=200)
    crash_at(world, "update.committed", 40)
    assert world.state().optimizer_steps == 40
    world.run()
    steps = [step for event in world.events("UpdateApplied") for step in event.steps]
    assert [step.optimizer_step for step in steps] == list(range(100))  # report 16: no gap, no repeat
    expected = 0.5 * (1 + math.cos(math.pi * 40 / 100))
    assert steps[40].learning_rate == pytest.approx(expected, abs=1e-12)
    assert world.state().total.horizon == 100


def test_killed_at_an_epochs_end_goes_on_with_the_next() -> None:
    """Report 17: N=8 E=2 R=4, killed after update 2: two more updates, T=4."""
    world = World(small_config(data={"epochs": 2}, batch={"prompts": 4}), data_len=8)
    crash_at(world, "update.committed", 2)
    outcome = world.run()
    assert (outcome.exit_code, world.state().optimizer_steps) == (0, 4)
    assert trained(world) == list(range(16))


def test_groups_generated_before_a_kill_are_trained_after_it() -> None:
    """Report 18: prompts 0..7, R=2, four at once, checkpoint after (0,1): the next trained are (2,3)."""
    world = World(small_config(checkpoint={"every_updates": 1}), data_len=8)
    crash_at(world, "checkpoint.committed", 1)
    stored_before = {i for e in world.events("GroupsStored") for i in (g.prompt_index for g in e.groups)}
    assert {2, 3} <= stored_before
    world.run()
    assert trained(world)[2:4] == [2, 3]
    assert sum(trained(world)) == 28 and len(set(trained(world))) == 8
    attempts = {i: a for e in world.events("UpdateApplied") for i, a in e.groups}
    assert attempts[2] == attempts[3] == 1, "stored groups are trained as they are, not generated again"


def test_requests_under_way_at_a_kill_count_once_in_the_window() -> None:
    """Report 21: window of 4 and 3 in flight before the crash: 4 in flight after it, not 7."""
    sync = {"max_staleness": 1, "every_updates": 1}
    world = World(small_config(sync=sync, rollout={"workers": 3, "max_concurrent": 2}), data_len=16)
    crash_at(world, "admit.after", 1)
    assert len(world.state().live) == 3
    world.config = small_config(sync=sync, rollout={"workers": 8, "max_concurrent": 2})
    seen: list[int] = []

    def look(rows: object) -> None:
        state = world.state()
        if state.incarnation == 2 and state.policy_version == 0:
            seen.append(len(state.live))

    world.on_commit = look
    world.run()
    assert seen and max(seen) == 4


def test_admission_after_recovery_is_what_the_window_leaves() -> None:
    """Report 25: bound 2, version 5, R=4 S=1, 20 admitted: 12 more, not 32."""
    sections: dict[str, dict[str, int]] = {"batch": {"prompts": 4}, "sync": {"max_staleness": 2}}
    world = World(small_config(**sections, rollout={"workers": 1, "max_concurrent": 2}), data_len=400)

    def lose_the_worker(rows: object) -> None:
        if world.state().drawn == 20:
            world.pool.slots_lost = 1  # and none takes its place

    world.on_commit = lose_the_worker
    crash_at(world, "publish.committed", 5)
    state = world.state()
    assert (state.policy_version, state.drawn, state.groups_trained) == (5, 20, 20)
    world.config = small_config(**sections, rollout={"workers": 100, "max_concurrent": 8})
    world.on_commit = None
    crash_at(world, "publish.committed")
    assert world.state().policy_version == 6
    admitted: list[int] = []
    version = 0
    for event in world.events():
        if isinstance(event, WeightsPublished):
            version = event.version
        elif isinstance(event, GroupsAdmitted) and version == 5:
            admitted += [issue.prompt_index for issue in event.groups]
    assert admitted == list(range(20, 32))


def test_served_weights_after_a_kill_are_the_published_ones() -> None:
    """Reports 23 and 54: S=4, checkpoint every 3, killed after update 6: workers serve the very weights of
    version 1, and have them before the first group is admitted."""
    world = World(
        small_config(
            sync={"every_updates": 4},
            checkpoint={"every_updates": 3},
            rollout={"workers": 8, "max_concurrent": 8},
        ),
        data_len=32,
    )
    crash_at(world, "checkpoint.committed", 2)  # of update 6
    assert (world.state().updates, world.state().policy_version) == (6, 1)
    (published,) = world.events("WeightsPublished")
    at_admission: list[list[tuple[int, str]]] = []

    def look(rows: list[EventRow]) -> None:
        if any(row.type in ("GroupsAdmitted", "GroupsReissued") for row in rows):
            at_admission.append(list(world.pool.loaded))

    world.on_commit = look  # type: ignore[assignment]
    world.run()
    assert at_admission[0] == [(1, published.digest)]


def test_a_failed_append_stops_training_rather_than_lose_the_event() -> None:
    """Report 41: the update that could not be recorded did not happen, and no further one is executed."""
    world = World(data_len=16)
    append = world.log.append

    def fails(run_id: str, expected_seq: int, incarnation: int, rows: list[EventRow]) -> None:
        if rows[0].type == "UpdateApplied" and world.state().updates == 2:
            raise LogUnavailable("the disk is full; make room and run the same command again")
        append(run_id, expected_seq, incarnation, rows)

    world.log.append = fails  # type: ignore[method-assign,assignment]
    with pytest.raises(LogUnavailable, match="make room"):
        world.run()
    assert (world.learner.executed, world.state().updates) == ([1, 2, 3], 2)
    assert world.state().phase is Phase.UPDATE, "and nothing was written after it"
    world.log.append = append  # type: ignore[method-assign]
    assert world.run().exit_code == 0
    assert trained(world) == list(range(16))
    steps = [step.optimizer_step for event in world.events("UpdateApplied") for step in event.steps]
    assert steps == list(range(8))


def test_a_killed_run_equals_the_one_that_nobody_touched() -> None:
    config = small_config(sync={"max_staleness": 0}, checkpoint={"every_updates": 3})
    untouched = World(config, data_len=16)
    untouched.run()
    killed = World(config, data_len=16, seed=5)
    for nth in (2, 3, 1):
        crash_at(killed, "update.executed", nth)
    killed.run()
    assert ledger(untouched) == ledger(killed)
    assert (
        untouched.events("RunCompleted")[0].weights_digest == killed.events("RunCompleted")[0].weights_digest
    )


def test_what_a_start_waits_for_is_said_from_workers_to_each_update_redone() -> None:
    world = World(small_config(checkpoint={"every_updates": 2}), data_len=16)
    crash_at(world, "update.committed", 5)
    assert world.waited_for == ["building 1 learner rank and 2 rollout workers"]
    world.waited_for.clear()
    world.run()
    assert world.waited_for == [
        "building 1 learner rank and 2 rollout workers",
        "loading the checkpoint of update 4",
        "redoing updates 5 to 5 from the checkpoint of update 4",
        "redoing updates 5 to 5: 5 is done",
    ]


def test_a_redo_without_a_checkpoint_is_said_to_be_from_the_starting_weights() -> None:
    world = World(small_config(checkpoint={"every_updates": 100}), data_len=16)
    crash_at(world, "update.committed", 2)
    world.waited_for.clear()
    world.run()
    assert world.waited_for[1:4] == [
        "redoing updates 1 to 2 from the starting weights",
        "redoing updates 1 to 2: 1 is done",
        "redoing updates 1 to 2: 2 is done",
    ]


def test_a_redo_that_differs_on_the_same_execution_stops_the_run() -> None:
    world = World(data_len=16)
    crash_at(world, "update.committed", 5)
    world.noise = 1e-9
    with pytest.raises(Diverged, match=r"--accept-divergence"):
        world.run()
    assert world.state().updates == 5
    outcome = world.run(accept_divergence=True)
    assert outcome.exit_code == 0
    assert world.events("UpdatesRedone")[-1].accepted_divergence


def test_another_execution_records_its_deviation_and_goes_on() -> None:
    """Report 20, as far as the driver goes: other ranks, every group once, T unchanged."""
    world = World(data_len=16)
    crash_at(world, "update.committed", 5)
    world.noise, world.fingerprint = 1e-9, {"ranks": "3"}
    assert world.run().exit_code == 0
    redone = world.events("UpdatesRedone")[0]
    assert not redone.same_execution and 0 < redone.loss_deviation < 1e-8
    assert trained(world) == list(range(16)) and world.state().optimizer_steps == 8


def depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights differ by the machine that made them, as real ones do in their last bits."""
    update = StandInLearner.update

    async def on_a_machine(learner: StandInLearner, *arguments: Any) -> UpdateResult:
        result = await update(learner, *arguments)
        learner.weights = hashed(learner.weights, learner.world.fingerprint["ranks"])
        return result

    monkeypatch.setattr(StandInLearner, "update", on_a_machine)


def test_what_began_with_a_redo_on_another_machine_is_not_asked_for_its_bits_though_it_ran_on_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its fingerprint is this machine's; the weights before it are not what this machine's records give."""
    depend_on_the_machine(monkeypatch)
    world = World(
        small_config(
            checkpoint={"every_updates": 3, "keep": 1}, groups={"keep": "all"}, sync={"max_staleness": 0}
        ),
        data_len=20,
    )
    world.fingerprint = {"ranks": "1"}
    crash_at(world, "update.committed", 6)
    world.fingerprint = {"ranks": "2"}
    crash_at(world, "workers.ready")
    assert list(world.state().checkpoints) == [6], "made again there"
    world.fingerprint = {"ranks": "1"}
    crash_at(world, "update.committed", 2)
    for path, saved in world.disk.checkpoints.items():
        world.disk.checkpoints[path] = {**saved, "weights": "spoiled"}
    assert world.run().exit_code == 0
    redone = world.events("UpdatesRedone")[-1]
    assert (redone.checkpoint_update, redone.last_update, redone.same_execution) == (0, 8, False)
    assert trained(world) == list(range(20)) and audit(world.rows()).ok


def test_a_checkpoint_of_a_redo_on_another_machine_is_not_held_against_the_records_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped in the middle of that redo, and gone on with on the machine that the records are of."""
    depend_on_the_machine(monkeypatch)
    world = World(small_config(checkpoint={"every_updates": 100}), data_len=20)
    world.fingerprint = {"ranks": "1"}
    crash_at(world, "update.committed", 7)
    world.fingerprint = {"ranks": "2"}

    async def life() -> int:
        driver = world.new_driver()
        asyncio.get_running_loop().call_later(3.5, driver.preempt, "SIGTERM")
        return (await driver.run()).exit_code

    assert run_virtually(life()) == 75
    (saved,) = world.events("CheckpointCommitted")
    assert 0 < saved.update < 7 and not saved.as_recorded
    world.fingerprint = {"ranks": "1"}
    assert world.run().exit_code == 0
    redone = world.events("UpdatesRedone")[-1]
    assert (redone.checkpoint_update, redone.last_update, redone.same_execution) == (saved.update, 7, False)
    assert trained(world) == list(range(20)) and audit(world.rows()).ok
    assert world.events("CheckpointCommitted")[-1].as_recorded


def test_a_lost_learner_is_rebuilt_while_workers_live_on() -> None:
    world = World(data_len=16)
    lost: list[int] = []

    def kill_once(rows: object) -> None:
        if world.state().updates == 5 and not lost:
            lost.append(1)
            world.learner._alive = False

    world.on_commit = kill_once
    outcome = world.run()
    assert outcome.exit_code == 0 and lost
    assert len(world.events("LearnerLost")) == 1 and world.state().incarnation == 1
    assert world.learner.starts == 2 and trained(world) == list(range(16))
    assert "building 1 learner rank" in world.waited_for  # and no workers, which are there


def test_a_learner_that_never_comes_back_fails_the_run() -> None:
    world = World(faults=Faults(learner_dies=1.0))
    with pytest.raises(RunFailedError, match="lost 3 times"):
        world.run()
    assert world.state().phase is Phase.FAILED


def test_a_full_disk_fails_the_run_and_the_log_stays_whole() -> None:
    world = World(data_len=16)

    def fill(rows: object) -> None:
        world.disk.full = world.state().updates >= 3

    world.on_commit = fill
    with pytest.raises(OSError, match="No space left"):
        world.run()
    assert world.state().phase is Phase.FAILED
    world.on_commit, world.disk.full = None, False
    assert world.run().exit_code == 0
    assert trained(world) == list(range(16))


def test_a_damaged_group_that_is_not_trained_yet_is_generated_again() -> None:
    world = World(data_len=16)
    crash_at(world, "group.stored", 3)
    file = world.events("GroupsStored")[-1]
    world.disk.groups[file.file] = [b"damaged" for _ in file.groups]
    assert world.run().exit_code == 0
    assert trained(world) == list(range(16))
    assert any(event.reason == "bad_file" for event in world.events("GroupsReissued"))


def test_a_damaged_group_that_a_redo_needs_stops_the_run_and_names_the_update() -> None:
    world = World(data_len=16)
    crash_at(world, "update.committed", 2)
    world.disk.groups.clear()
    with pytest.raises(RunFailedError, match="update 1 must be redone"):
        world.run()


def test_a_damaged_checkpoint_is_said_and_an_older_one_is_used() -> None:
    world = World(small_config(checkpoint={"every_updates": 2}), data_len=16)
    crash_at(world, "update.committed", 6)
    newest = world.state().latest_checkpoint()
    assert newest is not None
    world.disk.checkpoints.pop(newest.path)
    assert world.run().exit_code == 0
    assert [e.update for e in world.events("CheckpointLost")] == [newest.update]
    assert world.events("UpdatesRedone")[-1].checkpoint_update == newest.update - 2
    assert trained(world) == list(range(16))


def test_every_checkpoint_damaged_costs_time_alone_where_all_groups_are_kept() -> None:
    world, untouched = (
        World(
            small_config(
                checkpoint={"every_updates": 1, "keep": 2}, groups={"keep": "all"}, sync={"max_staleness": 0}
            ),
            data_len=16,
        )
        for _ in range(2)
    )
    untouched.run()
    crash_at(world, "retire.deleted", 3)
    assert 1 not in world.state().records, "the fold has let go of what kept checkpoints cover"
    head = world.state().updates
    for path, saved in world.disk.checkpoints.items():
        world.disk.checkpoints[path] = {**saved, "weights": "spoiled"}
    assert world.run().exit_code == 0
    assert len(world.events("CheckpointLost")) == 2
    (redone,) = world.events("UpdatesRedone")
    assert (redone.checkpoint_update, redone.first_update, redone.last_update) == (0, 1, head)
    assert ledger(world) == ledger(untouched)


def test_an_evaluation_that_a_kill_took_is_done_again_first() -> None:
    world = World(
        small_config(eval={"every_updates": 3, "size": 3, "source": "object:held_out"}), data_len=16
    )
    crash_at(world, "evaluate.before", 2)
    world.run()
    assert [e.update for e in world.events("EvaluationDone")] == [0, 3, 6, 8]


def test_the_first_checkpoint_damaged_costs_time_and_not_the_run() -> None:
    """While there are fewer checkpoints than are to be kept, the starting weights stand in for one."""
    world = World(small_config(checkpoint={"every_updates": 3, "keep": 2}), data_len=16)
    crash_at(world, "update.committed", 5)
    ((path, saved),) = world.disk.checkpoints.items()
    assert world.state().covered_update() == 3, "it is the only one"
    world.disk.checkpoints[path] = {**saved, "weights": "spoiled"}
    assert world.run().exit_code == 0
    (redone,) = world.events("UpdatesRedone")
    assert (redone.checkpoint_update, redone.first_update, redone.last_update) == (0, 1, 5)
    assert world.events("CheckpointLost")[0].update == 3
    assert trained(world) == list(range(16))
