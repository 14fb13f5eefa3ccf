"""The driver on stand-ins: what a run does when nothing, and when one thing, goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from surefoot.statemachine.crashpoints import watched
from surefoot.statemachine.errors import Diverged, FencedOut, RunFailedError
from surefoot.statemachine.log import EventRow
from surefoot.statemachine.phases import Phase
from surefoot.statemachine.state import RunState, fold

from .virtual import run_virtually
from .world import Crashed, Faults, World, die, ledger, small_config, touch, trained


def crash_at(world: World, name: str, nth: int = 1) -> None:
    """One life that dies at the n-th time it reaches the place."""
    reached = 0

    def watcher(place: str) -> None:
        nonlocal reached
        touch()
        if place == name:
            reached += 1
            if reached == nth:
                die()

    with watched(watcher), pytest.raises(Crashed):
        world.run()
    assert reached >= nth, f"{name} was not reached {nth} times"


def test_an_untouched_run_takes_exactly_the_budgets_steps() -> None:
    world = World(data_len=16)
    outcome = world.run()
    state = world.state()
    assert (outcome.exit_code, state.updates, state.optimizer_steps) == (0, 8, 8)
    assert trained(world) == list(range(16))
    assert state.published_update == 8 and 8 in state.checkpoints


def test_the_budget_is_committed_before_any_worker_exists() -> None:
    world = World()
    world.run()  # the stand-in pool and learner assert it when they start
    kinds = [row.type for row in world.rows()]
    assert kinds.index("BudgetResolved") < kinds.index("WorkersReady")
    assert kinds.count("BudgetResolved") == 1


def test_a_run_that_ended_appends_nothing_and_cannot_be_taken_over() -> None:
    world = World()
    world.run()
    rows = world.rows()
    with pytest.raises(Exception, match=r"Completed"):
        world.run()
    assert [r.type for r in rows][-1] == "RunCompleted"


def test_schedule_goes_on_at_the_fortieth_step_after_a_kill_there() -> None:
    # Report 15: T=100, killed at 40: position 40, horizon 100, the next rate is that of step 40.
    import math

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
    # Report 17: N=8 E=2 R=4, killed after update 2: two more updates, T=4.
    world = World(small_config(data={"epochs": 2}, batch={"prompts": 4}), data_len=8)
    crash_at(world, "update.committed", 2)
    outcome = world.run()
    assert (outcome.exit_code, world.state().optimizer_steps) == (0, 4)
    assert trained(world) == list(range(16))


def test_groups_generated_before_a_kill_are_trained_after_it() -> None:
    # Report 18: prompts 0..7, R=2, four at once, checkpoint after (0,1): the next trained are (2,3).
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
    # Report 21: window of 4 and fewer in flight before the crash: 4 in flight after it, not 7.
    world = World(small_config(sync={"max_staleness": 1, "every_updates": 1}), data_len=16)
    crash_at(world, "admit.after", 1)
    assert len(world.state().live) == 4
    seen: list[int] = []

    def look(rows: object) -> None:
        state = world.state()
        if state.incarnation == 2 and state.policy_version == 0:
            seen.append(len(state.live))

    world.on_commit = look
    world.run()
    assert seen and max(seen) == 4


def test_admission_after_recovery_is_what_the_window_leaves() -> None:
    # Report 25: bound 2, version 5, R=4 S=1, 20 admitted: 12 more, not 32.
    world = World(
        small_config(
            batch={"prompts": 4}, sync={"max_staleness": 2}, rollout={"workers": 20, "max_concurrent": 8}
        ),
        data_len=400,
    )
    crash_at(world, "publish.committed", 5)
    state = world.state()
    assert state.policy_version == 5
    assert state.room() + state.survivors == (2 + 5 + 1) * 1 * 4  # 32 in all
    state.drawn = 20
    assert state.room() == 12


def test_a_reward_that_raises_for_good_fails_the_run_when_its_batch_comes_up() -> None:
    # Report 26: N=30 R=4, prompt 9 raises for good: fails at batch 3, names the prompt, updates=2.
    world = World(small_config(batch={"prompts": 4}), data_len=30, faults=Faults(raises_on=frozenset({9})))
    with pytest.raises(RunFailedError, match=r"prompt 9 failed 3 times"):
        world.run()
    (failed,) = world.events("RunFailed")
    assert failed.updates == 2 and failed.facts["prompt_index"] == 9
    assert world.driver.outcome().exit_code == 1
    assert len([e for e in world.events("AttemptFailed") if e.prompt_index == 9]) == 3


def test_the_end_of_data_ends_the_run() -> None:
    # Report 27: N=10 R=4: 2 updates, 2 prompts unused, ends. Report 33: nothing beyond is asked for.
    world = World(small_config(batch={"prompts": 4}), data_len=10)
    outcome = world.run()
    assert (outcome.exit_code, world.state().updates, world.state().total.prompts_unused) == (0, 2, 2)
    assert {request.prompt_index for request in world.pool.submitted} == set(range(8))


def test_rejected_groups_make_room_again() -> None:
    # Report 28: 8 admitted, 2 rejected: room for 2 more.
    world = World(
        small_config(
            batch={"prompts": 4},
            sync={"max_staleness": 1},
            rollout={"workers": 8, "max_concurrent": 8},
            algorithm={"drop_no_spread": True},
        ),
        data_len=40,
        faults=Faults(no_spread=frozenset({0, 1})),
    )
    rooms: list[tuple[int, int]] = []

    def look(rows: object) -> None:
        state = world.state()
        if state.policy_version == 0:
            rooms.append((state.groups_dropped, state.survivors + state.room()))

    world.on_commit = look
    world.run()
    assert {total for _, total in rooms} == {8}
    assert (2, 8) in rooms
    assert 0 not in trained(world) and trained(world)[:4] == [2, 3, 4, 5]


def test_filtered_groups_leave_the_run_short_and_it_says_so() -> None:
    # Report 11: N=40 E=1 R=4, half the groups carry no signal: 5 of 10 updates, exit code not 0.
    import math

    world = World(
        small_config(batch={"prompts": 4}, algorithm={"drop_no_spread": True}, optim={"lr": 1.0}),
        data_len=40,
        faults=Faults(no_spread=frozenset(range(0, 40, 2))),
    )
    outcome = world.run()
    state = world.state()
    assert outcome.phase is Phase.STOPPED and outcome.exit_code == 3
    (stopped,) = world.events("RunStopped")
    assert (state.updates, stopped.updates_short, stopped.optimizer_steps_short) == (5, 5, 5)
    last = world.events("UpdateApplied")[-1].steps[-1]
    assert last.learning_rate == pytest.approx(0.5 * (1 + math.cos(math.pi * 4 / 10)), abs=1e-12)
    assert state.published_update == 5 and 5 in state.checkpoints


def test_a_late_answer_is_refused_and_recorded() -> None:
    # Report 29: attempt 1 is lost, attempt 2 is trained, then 1 arrives: trained once.
    world = World(faults=Faults(answer_repeats=1.0), data_len=16)
    outcome = world.run()
    assert outcome.exit_code == 0
    assert sorted(trained(world)) == list(range(16))
    assert len(world.events("AnswerRefused")) >= 1


def test_bound_zero_is_on_policy() -> None:
    # Report 31: R=4 S=1 bound 0: prompts 4..7 carry version 1.
    world = World(small_config(batch={"prompts": 4}, sync={"max_staleness": 0}), data_len=16)
    world.run()
    versions = {
        group.prompt_index: (group.oldest_versions, group.newest_versions)
        for event in world.events("GroupsStored")
        for group in event.groups
    }
    for prompt_index in range(4, 8):
        assert versions[prompt_index] == ([1, 1], [1, 1])
    assert all(event.staleness_max == 0 for event in world.events("UpdateApplied"))


def test_sync_interval_counts_updates() -> None:
    # Report 32: R=8 S=4: one publication after 4 updates, 32 prompts.
    world = World(
        small_config(
            batch={"prompts": 8}, sync={"every_updates": 4}, rollout={"workers": 8, "max_concurrent": 8}
        ),
        data_len=64,
    )
    world.run()
    published = world.events("WeightsPublished")
    assert [(e.version, e.update) for e in published] == [(1, 4), (2, 8)]


def test_the_last_update_is_in_a_committed_checkpoint() -> None:
    # Report 53: T=7, checkpoint every 10.
    world = World(small_config(checkpoint={"every_updates": 10}), data_len=14)
    world.run()
    state = world.state()
    assert state.optimizer_steps == 7 and list(state.checkpoints) == [7]


def test_served_weights_after_a_kill_are_the_published_ones() -> None:
    # Reports 23 and 54: S=4, checkpoint every 3, killed after update 6: workers serve version 1's weights.
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
    world.run()
    assert world.pool.loaded[0] == (1, published.digest)


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
    assert world.waited_for == ["building 1 learner ranks and 2 rollout workers"]
    world.waited_for.clear()
    world.run()
    assert world.waited_for == [
        "building 1 learner ranks and 2 rollout workers",
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
    # Report 20, as far as the driver goes: other ranks, every group once, T unchanged.
    world = World(data_len=16)
    crash_at(world, "update.committed", 5)
    world.noise, world.fingerprint = 1e-9, {"ranks": "3"}
    assert world.run().exit_code == 0
    redone = world.events("UpdatesRedone")[0]
    assert not redone.same_execution and 0 < redone.loss_deviation < 1e-8
    assert trained(world) == list(range(16)) and world.state().optimizer_steps == 8


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
    assert "building 1 learner ranks" in world.waited_for  # and no workers, which are there


def test_a_learner_that_never_comes_back_fails_the_run() -> None:
    world = World(faults=Faults(learner_dies=1.0))
    with pytest.raises(RunFailedError, match="lost 3 times"):
        world.run()
    assert world.state().phase is Phase.FAILED


def test_workers_that_die_lose_no_group() -> None:
    world = World(faults=Faults(worker_dies=0.3), data_len=16, seed=3)
    world.config = small_config(rollout={"max_attempts": 50, "workers": 2, "max_concurrent": 4})
    assert world.run().exit_code == 0
    assert sorted(trained(world)) == list(range(16))
    assert len(world.events("WorkerReplaced")) >= 1


def test_a_skipped_step_uses_its_place_in_the_schedule() -> None:
    # Report 12: T=7, step 3 not finite: attempted 7, applied 6, both in the log, the schedule at 7.
    world = World(data_len=14)
    world.not_finite = frozenset({3})
    world.run()
    state = world.state()
    assert (state.optimizer_steps, state.optimizer_steps_applied) == (7, 6)


@pytest.mark.parametrize("updates_before", [0, 1, 4])
def test_preemption_leaves_a_checkpoint_and_goes_on_later(updates_before: int) -> None:
    # Report 36: within the grace time the log ends whole, a checkpoint if time allows, exit code 75.
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


def test_reissue_mode_keeps_the_bound_and_trains_every_group_once() -> None:
    world = World(
        small_config(sync={"max_staleness": 0, "on_stale": "reissue"}),
        data_len=24,
        faults=Faults(slow_group=0.2),
        seed=11,
    )
    assert world.run().exit_code == 0
    assert sorted(trained(world)) == list(range(24))
    assert all(event.staleness_max == 0 for event in world.events("UpdateApplied"))


def test_evaluations_are_of_the_versions_that_are_due() -> None:
    world = World(
        small_config(eval={"every_updates": 3, "size": 3, "source": "object:held_out"}), data_len=16
    )
    world.run()
    # Version 0, the first publications at or after updates 3 and 6, and the last.
    assert [e.update for e in world.events("EvaluationDone")] == [0, 3, 6, 8]


def test_an_evaluation_that_a_kill_took_is_done_again_first() -> None:
    world = World(
        small_config(eval={"every_updates": 3, "size": 3, "source": "object:held_out"}), data_len=16
    )
    crash_at(world, "evaluate.before", 2)
    world.run()
    assert [e.update for e in world.events("EvaluationDone")] == [0, 3, 6, 8]


def test_every_event_file_and_line_says_in_which_unit_it_counts() -> None:
    # Report 34: R=4 S=4, after 4 updates: update 4, policy version 1, prompts 16.
    from surefoot.trainer.display import Progress, line_of
    from surefoot.trainer.metrics import metrics_rows

    world = World(
        small_config(
            batch={"prompts": 4},
            sync={"every_updates": 4},
            checkpoint={"every_updates": 4},
            eval={"every_updates": 4, "size": 3, "source": "object:held_out"},
            rollout={"workers": 4, "max_concurrent": 8},
        ),
        data_len=16,
    )
    world.run()
    state = world.state()
    assert (state.updates, state.policy_version, state.groups_trained) == (4, 1, 16)
    (published,), (saved,) = world.events("WeightsPublished"), world.events("CheckpointCommitted")
    assert (published.version, published.update) == (1, 4)
    assert (saved.update, saved.optimizer_steps, saved.policy_version) == (4, 4, 1)
    assert saved.path.startswith("u000004-")
    assert [(e.policy_version, e.update) for e in world.events("EvaluationDone")] == [(0, 0), (1, 4)]
    last = [row for row in metrics_rows(world.rows()) if "optim/lr" in row][-1]
    assert (last["update"], last["optimizer_step"], last["policy_version"]) == (4, 4, 0)
    progress, so_far = Progress(), RunState()
    for row in world.rows():
        progress.take(row, so_far.apply(row), so_far)
    line = line_of(progress.figures())
    assert "update 4/4" in line and "optimizer step 4/4" in line and "policy version 1" in line


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
