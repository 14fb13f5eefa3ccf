"""The driver on stand-ins: what a run does when nobody kills it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from surefoot.rollout.protocols import GroupRequest
from surefoot.statemachine.errors import LearnerGone, RunClosed, RunFailedError
from surefoot.statemachine.events import AttemptFailed, UpdateApplied
from surefoot.statemachine.log import EventRow
from surefoot.statemachine.phases import Phase
from surefoot.statemachine.state import RunState
from surefoot.trainer import feeder
from surefoot.trainer.display import Progress, line_of
from surefoot.trainer.driver import HEARTBEAT_SECONDS
from surefoot.trainer.metrics import metrics_rows
from surefoot.trainer.protocols import LearnerReady

from .standins import StandInLearner, hashed
from .world import Faults, World, small_config, trained


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
    with pytest.raises(RunClosed, match=r"RunCompleted"):
        world.run()
    assert world.rows() == rows and rows[-1].type == "RunCompleted"


def test_a_reward_that_raises_for_good_fails_the_run_when_its_batch_comes_up() -> None:
    """Report 26: N=30 R=4, prompt 9 raises for good: fails at batch 3, names the prompt, updates=2."""
    world = World(small_config(batch={"prompts": 4}), data_len=30, faults=Faults(raises_on=frozenset({9})))
    with pytest.raises(RunFailedError, match=r"prompt 9 failed 3 times"):
        world.run()
    (failed,) = world.events("RunFailed")
    assert failed.updates == 2 and failed.facts["prompt_index"] == 9
    assert world.driver.outcome().exit_code == 1
    assert len([e for e in world.events("AttemptFailed") if e.prompt_index == 9]) == 3


def test_the_end_of_data_ends_the_run() -> None:
    """Report 27: N=10 R=4: 2 updates, 2 prompts unused, ends. Report 33: nothing beyond is asked for."""
    world = World(small_config(batch={"prompts": 4}), data_len=10)
    outcome = world.run()
    assert (outcome.exit_code, world.state().updates, world.state().total.prompts_unused) == (0, 2, 2)
    assert {request.prompt_index for request in world.pool.submitted} == set(range(8))


def test_rejected_groups_make_room_again() -> None:
    """Report 28: 8 admitted, 2 rejected: room for 2 more."""
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
    """Report 11: N=40 E=1 R=4, half the groups carry no signal: 5 of 10 updates, exit code not 0."""
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
    """Report 29: attempt 1 is lost, attempt 2 is trained, then 1 arrives: trained once."""
    world = World(faults=Faults(once=["lost"]), data_len=16)
    late: list[GroupRequest] = []  # those whose answer is still to come

    def look(rows: Sequence[EventRow]) -> None:
        for event in [row.event() for row in rows]:
            if isinstance(event, AttemptFailed):
                late.extend(r for r in world.pool.submitted if r.prompt_index == event.prompt_index)
            elif isinstance(event, UpdateApplied) and late and late[0].prompt_index in dict(event.groups):
                assert dict(event.groups)[late[0].prompt_index] == 2
                world.pool.answer(late.pop())

    world.on_commit = look
    assert world.run().exit_code == 0
    (failed,), (refused,) = world.events("AttemptFailed"), world.events("AnswerRefused")
    lost = failed.prompt_index
    assert (failed.attempt, refused.prompt_index, refused.attempt) == (1, lost, 1)
    assert [(i, a) for e in world.events("UpdateApplied") for i, a in e.groups if i == lost] == [(lost, 2)]
    assert sorted(trained(world)) == list(range(16))
    kinds = [row.type for row in world.rows()]
    assert kinds.index("AttemptFailed") < kinds.index("UpdateApplied") < kinds.index("AnswerRefused")


def test_answers_that_come_twice_are_trained_once() -> None:
    world = World(faults=Faults(answer_repeats=1.0), data_len=16)
    assert world.run().exit_code == 0
    assert sorted(trained(world)) == list(range(16))
    assert len(world.events("AnswerRefused")) == 16


def test_a_driver_says_that_it_lives_while_an_update_takes_long() -> None:
    world = World(data_len=2)  # one update
    world.learner_seconds = 33.0
    world.run()
    (update,) = world.events("UpdateApplied")
    assert update.seconds["update"] >= 33.0
    beats = world.heartbeats_at
    assert len(beats) >= 6  # one in every five of 33 seconds
    gaps = [after - before for before, after in itertools.pairwise([0.0, *beats])]
    assert max(gaps) <= HEARTBEAT_SECONDS == 5.0


@pytest.mark.parametrize("on_stale", ["wait", "reissue"])
def test_answers_that_nobody_waits_for_hold_up_nothing(
    on_stale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be held for ever: batches, lost attempts and rejected groups still get theirs at once."""
    monkeypatch.setattr(feeder, "HELD_SECONDS", 1e9)
    world = World(
        small_config(
            batch={"prompts": 3},
            algorithm={"drop_no_spread": True},
            sync={"on_stale": on_stale, "max_staleness": 2},
            rollout={"max_attempts": 40},
        ),
        data_len=40,
        faults=Faults(no_spread=frozenset(range(0, 40, 9)), worker_dies=0.1, work_raises=0.1),
    )
    assert world.run().phase is Phase.STOPPED  # 35 of 40 groups have a signal: 11 batches of 13
    assert world.state().updates == 11


def test_the_groups_of_a_batch_share_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder, "HELD_SECONDS", 1e9)
    world = World(small_config(batch={"prompts": 4}, sync={"max_staleness": 0}), data_len=16)
    world.run()
    assert [len(event.groups) for event in world.events("GroupsStored")] == [4, 4, 4, 4]


def test_bound_zero_is_on_policy() -> None:
    """Report 31: R=4 S=1 bound 0: prompts 4..7 carry version 1."""
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
    """Report 32: R=8 S=4: one publication after 4 updates, 32 prompts."""
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
    """Report 53: T=7, checkpoint every 10."""
    world = World(small_config(checkpoint={"every_updates": 10}), data_len=14)
    world.run()
    state = world.state()
    assert state.optimizer_steps == 7 and list(state.checkpoints) == [7]


def test_workers_that_die_lose_no_group() -> None:
    world = World(faults=Faults(worker_dies=0.3), data_len=16, seed=3)
    world.config = small_config(rollout={"max_attempts": 50, "workers": 2, "max_concurrent": 4})
    assert world.run().exit_code == 0
    assert sorted(trained(world)) == list(range(16))
    assert len(world.events("WorkerReplaced")) >= 1


def test_a_learner_lost_once_the_workers_are_built_costs_no_worker() -> None:
    class DiesAtFirst(StandInLearner):
        async def start(self, rows: Sequence[EventRow], learner_try: int) -> LearnerReady:
            ready = await super().start(rows, learner_try)
            assert world.pool.is_up
            if learner_try == 1:
                await self.close()
                raise LearnerGone("rank 0 died", learner_try=1, rank=0)
            return ready

    world = World(data_len=16)
    world.new_learner = lambda: DiesAtFirst(world)  # type: ignore[method-assign]
    assert world.run().exit_code == 0  # the stand-in pool asserts that it is built once
    assert trained(world) == list(range(16))
    kinds = [row.type for row in world.rows()]
    assert kinds[2:5] == ["BudgetResolved", "LearnerLost", "WorkersReady"]
    assert [event.learner_try for event in world.events("WorkersReady")] == [2]


def test_a_skipped_step_uses_its_place_in_the_schedule() -> None:
    """Report 12: T=7, step 3 not finite: attempted 7, applied 6, both in the log, the schedule at 7."""
    world = World(data_len=14)
    world.not_finite = frozenset({3})
    world.run()
    state = world.state()
    assert (state.optimizer_steps, state.optimizer_steps_applied) == (7, 6)


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


def test_an_evaluation_is_the_mean_over_the_answers_of_the_version_served() -> None:
    """The stand-ins reward an odd seed with 1, the rest with 0, and answer one to four tokens by seed and
    weights, four of them cut off: seeds and published digests give every figure."""
    held_out = [40, 43, 51, 57, 60]
    world = World(
        small_config(eval={"every_updates": 3, "size": 5, "source": "object:held_out"}), data_len=16
    )
    world.held_out_seeds = held_out
    world.run()
    digests = {0: world.initial_weights().digest}
    digests |= {event.version: event.digest for event in world.events("WeightsPublished")}
    evaluated = world.events("EvaluationDone")
    assert [event.policy_version for event in evaluated] == [0, 3, 6, 8]
    for event in evaluated:
        digest = digests[event.policy_version]
        lengths = [1 + int(hashed(seed, digest), 16) % 1000 % 4 for seed in held_out]
        assert event.size == 5
        assert event.reward_mean == 3 / 5  # 43, 51 and 57
        assert event.length_mean == sum(lengths) / 5
        assert event.truncated_frac == lengths.count(4) / 5
        assert event.seconds == pytest.approx(0.3)  # virtual ones, all of them the pool's
    assert len({event.length_mean for event in evaluated}) > 1
    assert any(event.truncated_frac not in (0.0, 1.0) for event in evaluated)


def test_every_event_file_and_line_says_in_which_unit_it_counts() -> None:
    """Report 34: R=4 S=4, after 4 updates: update 4, policy version 1, prompts 16."""
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
