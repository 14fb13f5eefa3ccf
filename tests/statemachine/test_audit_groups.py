"""For every identity of groups, a log that breaks just it: admission, fates, attempts, samples, bias."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from surefoot.statemachine.events import (
    AnswerRefused,
    AttemptFailed,
    DropReason,
    GroupsAdmitted,
    GroupsDropped,
    GroupsReissued,
    GroupsStored,
    Issue,
    IssueReason,
    StoredGroup,
    UpdateApplied,
    WorkersReady,
)

from .audits import assert_only, detail, failures, report_of
from .scenario import Scenario, whole_run


def begun(**options: Any) -> Scenario:
    return Scenario(**options).begin()


# -- admission ----------------------------------------------------------------------------------------


def test_a_prompt_drawn_out_of_order_is_found() -> None:
    run = begun().add(GroupsAdmitted(groups=[Issue(0, 1, 0), Issue(2, 1, 0)]))
    assert_only(run, "admission", f"event {len(run.entries)}", "prompt 2", "next in draw order is 1")


def test_a_prompt_drawn_far_ahead_is_found_and_not_followed() -> None:
    run = begun().add(GroupsAdmitted(groups=[Issue(10**15, 1, 0), Issue(-1, 1, 0)]))
    assert_only(run, "admission", f"prompt {10**15}", "prompt -1")


@pytest.mark.parametrize("version", [-1, 1])
def test_a_group_admitted_at_another_version_is_found(version: int) -> None:
    run = begun().add(GroupsAdmitted(groups=[Issue(0, 1, version)]))
    assert_only(run, "admission", f"admitted at version {version}", "policy version was 0")


def test_more_groups_than_the_window_holds_are_found() -> None:
    """Bound 1, S = 2, R = 2, version 0: (1 + 0 + 1) * 2 * 2 = 8 groups, and a ninth is one too many."""
    assert failures(begun().admit(8)) == {}
    run = begun().admit(8).admit(1)
    assert_only(run, "admission", f"event {len(run.entries)}", "9 groups", "holds 8")


def test_the_window_opens_with_each_publication() -> None:
    run = begun(data_len=40).admit().store().update().update()
    assert failures(run.admit(4)) == {}  # version 1: 12 in all, 4 of them trained
    assert_only(run.admit(1), "admission", "13 groups", "holds 12")


def test_a_dropped_group_makes_room_for_another() -> None:
    run = begun(data_len=40).admit(8).drop(3, 4).admit(2)
    assert failures(run) == {}
    assert_only(run.admit(1), "admission", "9 groups", "holds 8")


def test_a_group_that_the_budget_does_not_need_is_found() -> None:
    """13 prompts in batches of 2: the last is in no batch, and nothing was dropped that it could replace."""
    run = begun(data_len=13, max_staleness=9)
    assert failures(run.admit(12)) == {}
    assert_only(run.admit(1), "admission", "13 groups", "needs 12")


def test_a_replacement_is_drawn_up_to_the_prompts_there_are_and_never_past_them() -> None:
    run = begun(data_len=13, max_staleness=9).admit(12).drop(0).admit(1)
    assert failures(run) == {}
    run.drop(1).admit(1)
    assert_only(run, "admission", "14 prompts were drawn", "prompts_total is 13")


def test_an_admission_after_the_rest_was_dropped_is_found() -> None:
    run = begun(data_len=3, max_staleness=9).admit(2).drop(0, 1, reason=DropReason.UNUSED).admit(1)
    failed = failures(run)
    assert "after what was left had been dropped" in failed["admission"]


# -- fates --------------------------------------------------------------------------------------------


def test_a_group_admitted_twice_is_found() -> None:
    run = begun().admit(2).add(GroupsAdmitted(groups=[Issue(1, 1, 0)]))
    failed = failures(run)
    assert set(failed) == {"admission", "fates"}  # it is out of draw order as well
    assert f"event {len(run.entries)}: group 1 was admitted, but was admitted already" in failed["fates"]


def test_a_group_stored_without_admission_is_found() -> None:
    run = begun().admit(1).store()
    stored = run.event(GroupsStored).groups[0]
    run.add(GroupsStored(file="other", groups=[msgspec.structs.replace(stored, prompt_index=5)]))
    assert_only(run, "fates", "group 5", "never admitted")


def test_a_group_stored_twice_is_found() -> None:
    run = begun().admit(1).store()
    run.add(GroupsStored(file="other", groups=run.event(GroupsStored).groups))
    assert_only(run, "fates", "group 0", "stored already")


def test_a_group_stored_after_it_was_dropped_is_found() -> None:
    run = begun().admit(1).store()
    stored = run.event(GroupsStored)
    run.remove(GroupsStored).drop(0).add(stored)
    assert_only(run, "fates", "group 0", "dropped already")


@pytest.mark.parametrize("index", [7, -1, 10**15])
def test_a_group_dropped_that_was_never_admitted_is_found(index: int) -> None:
    run = begun().admit(2).add(GroupsDropped(prompt_indices=[index], reason=DropReason.NO_SPREAD))
    assert_only(run, "fates", f"group {index} was dropped, but was not drawn")


def test_a_group_dropped_twice_is_found() -> None:
    run = begun().admit(2).drop(0).add(GroupsDropped(prompt_indices=[0], reason=DropReason.NO_SPREAD))
    assert_only(run, "fates", "group 0 was dropped, but was dropped")


def test_a_group_dropped_after_it_was_trained_is_found() -> None:
    run = begun().admit().store().update()
    run.add(GroupsDropped(prompt_indices=[1], reason=DropReason.NO_SPREAD))
    assert_only(run, "fates", "group 1 was dropped, but was trained")


def test_a_group_trained_that_was_not_stored_is_found() -> None:
    run = begun().admit().store(0, 1)
    run.began().applied()
    run.remove(GroupsStored, 1)
    failed = failures(run)
    assert f"event {len(run.entries)}: group 1 is trained, but was admitted" in failed["fates"]
    assert set(failed) <= {"fates", "staleness"}


def test_a_trained_group_issued_again_is_found() -> None:
    run = begun().admit().store().update()
    run.add(GroupsReissued(groups=[Issue(0, 2, 0)], reason=IssueReason.BAD_FILE))
    assert_only(run, "fates", "group 0 was issued again, but was trained")


def test_groups_are_counted_by_fate() -> None:
    run = begun().admit(8).drop(7).store(0, 1, 2).update()
    assert report_of(run).totals["groups"] == {"admitted": 4, "stored": 1, "trained": 2, "dropped": 1}


def test_a_group_whose_attempt_is_lost_is_still_admitted() -> None:
    run = begun().admit(8).store(0).take_over()
    assert report_of(run).totals["groups"] == {"admitted": 7, "stored": 1, "trained": 0, "dropped": 0}


# -- attempts -----------------------------------------------------------------------------------------


def test_a_first_attempt_that_is_not_1_is_found() -> None:
    run = begun().add(GroupsAdmitted(groups=[Issue(0, 2, 0)]))
    assert_only(run, "attempts", "group 0", "attempt 2")


@pytest.mark.parametrize("attempt", [1, 3])
def test_a_new_attempt_that_does_not_follow_is_found(attempt: int) -> None:
    run = begun().admit().add(GroupsReissued(groups=[Issue(0, attempt, 0)], reason=IssueReason.WORKER_LOST))
    assert_only(run, "attempts", f"attempt {attempt} of group 0", "after attempt 1")


def test_a_late_answer_that_was_stored_is_found() -> None:
    """Attempt 1 was issued again as 2; what is stored is 1."""
    run = begun().admit().reissue(IssueReason.FAILED, 0).store(0)
    run.change(GroupsStored, 0, groups=lambda groups: [msgspec.structs.replace(groups[0], attempt=1)])
    assert_only(run, "attempts", "attempt 1 of group 0 was stored", "attempt 2")


def test_an_answer_of_a_dead_driver_s_attempt_that_was_stored_is_found() -> None:
    """The attempt was lost with the old incarnation, and the group not issued again yet."""
    run = begun().admit(1).take_over().store(0)
    assert_only(run, "attempts", "attempt 1 of group 0 was stored", "none")


def test_an_answer_after_its_attempt_failed_that_was_stored_is_found() -> None:
    run = begun().admit(1)
    run.add(AttemptFailed(prompt_index=0, attempt=1, reason=IssueReason.FAILED, error="x")).store(0)
    assert_only(run, "attempts", "attempt 1 of group 0 was stored", "none")


@pytest.mark.parametrize(("index", "attempt"), [(0, 2), (1, 1), (9, 1)])
def test_a_failure_of_an_attempt_that_is_not_under_way_is_found(index: int, attempt: int) -> None:
    """Group 0 is at attempt 1, group 1 is stored, group 9 was never drawn."""
    run = begun().admit(2).store(1)
    run.add(AttemptFailed(prompt_index=index, attempt=attempt, reason=IssueReason.FAILED, error="x"))
    assert_only(run, "attempts", f"attempt {attempt} of group {index} failed")


def test_an_older_attempt_that_was_trained_is_found() -> None:
    run = begun().admit().store(1).reissue(IssueReason.FAILED, 0).store(0)
    old = [(0, 1), (1, 1)]
    run.began(old).applied(old)
    assert_only(run, "attempts", "attempt 1 of group 0 is trained", "attempt 2 is stored")


def refused(index: int, attempt: int, current: int) -> AnswerRefused:
    return AnswerRefused(prompt_index=index, attempt=attempt, current_attempt=current, because="late")


def test_a_late_answer_that_is_refused_is_right_and_counted() -> None:
    run = begun().admit().reissue(IssueReason.FAILED, 0).store(0, 1).add(refused(0, 1, 2), refused(0, 2, 2))
    run.update().add(refused(0, 1, 0)).drop(3).add(refused(3, 1, 0))
    assert failures(run) == {}
    assert report_of(run).totals["answers_refused"] == 4


@pytest.mark.parametrize(("index", "attempt"), [(0, 1), (0, 2), (99, 1)])
def test_a_refusal_of_an_answer_that_was_wanted_is_found(index: int, attempt: int) -> None:
    run = begun().admit().add(refused(index, attempt, 1))
    assert_only(run, "attempts", f"of group {index} was refused")


# -- reissue ------------------------------------------------------------------------------------------


def test_a_group_issued_again_keeps_its_admission_version() -> None:
    run = begun().admit(8).store(0, 1, 2, 3).update().update().reissue(IssueReason.FAILED, 4)
    assert failures(run) == {}
    run.change(GroupsReissued, 0, groups=[Issue(4, 2, 1)])
    assert_only(run, "admission", "group 4 was issued again at version 1", "due is 0")


def test_a_stale_group_is_issued_again_at_the_current_version() -> None:
    run = begun(on_stale="reissue").admit(8).store(0, 1, 2, 3).update().update()
    run.reissue(IssueReason.STALE, 4)
    assert failures(run) == {}
    run.change(GroupsReissued, 0, groups=[Issue(4, 2, 0)])
    assert_only(run, "admission", "group 4 was issued again at version 0", "due is 1")


def test_a_stale_group_issued_again_where_batches_wait_is_found() -> None:
    run = begun().admit(8).store(0, 1, 2, 3).update().update().reissue(IssueReason.STALE, 4)
    assert_only(run, "admission", "sync.on_stale is not reissue")


def test_a_stored_group_whose_file_is_bad_is_issued_again_and_trained_as_the_new_attempt() -> None:
    run = begun().admit().store(0, 1).reissue(IssueReason.BAD_FILE, 0).store(0).update()
    assert failures(run) == {}


# -- samples ------------------------------------------------------------------------------------------


def spoil_stored(**changes: Any) -> Scenario:
    run = begun().admit().store(0)
    return run.change(GroupsStored, 0, groups=lambda groups: [msgspec.structs.replace(groups[0], **changes)])


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": [1.0]},
        {"lengths": [5, 5, 5]},
        {"truncated": []},
        {"newest_versions": [0]},
        {"oldest_versions": [0]},
        {
            "rewards": [1.0] * 3,
            "lengths": [5] * 3,
            "truncated": [False] * 3,
            "oldest_versions": [0] * 3,
            "newest_versions": [0] * 3,
        },
        {"rewards": [], "lengths": [], "truncated": [], "oldest_versions": [], "newest_versions": []},
    ],
    ids=str,
)
def test_a_group_without_its_samples_is_found(changes: dict[str, Any]) -> None:
    assert_only(spoil_stored(**changes), "samples", "group 0", "batch.group_size is 2")


@pytest.mark.parametrize(
    ("oldest", "newest"),
    [([0, 0], [0, 1]), ([-1, 0], [0, 0])],
    ids=["newer than what was published", "older than its admission"],
)
def test_tokens_of_versions_that_cannot_be_are_found(oldest: list[int], newest: list[int]) -> None:
    assert_only(spoil_stored(oldest_versions=oldest, newest_versions=newest), "samples", "group 0")


def test_a_group_that_started_on_older_weights_than_it_was_admitted_at_is_found() -> None:
    run = begun().admit(4).store().update().update().admit(1).store(4)
    run.change(
        GroupsStored,
        -1,
        groups=lambda groups: [msgspec.structs.replace(groups[0], oldest_versions=[0, 1])],
    )
    assert_only(run, "samples", "versions 0 to 1", "admitted at 1")


def test_a_sample_whose_oldest_token_is_newer_than_its_newest_is_found() -> None:
    run = begun().admit(5).store(0, 1, 2, 3).update().update().store(4)
    run.change(
        GroupsStored,
        -1,
        groups=lambda groups: [
            msgspec.structs.replace(groups[0], oldest_versions=[0, 1], newest_versions=[1, 0])
        ],
    )
    assert_only(run, "samples", "group 4")


# -- trained once -------------------------------------------------------------------------------------


def test_a_group_trained_twice_is_found() -> None:
    run = whole_run()
    again = run.event(UpdateApplied, 0).groups
    run.change(UpdateApplied, 2, groups=again)
    failed = failures(run)
    assert f"event {run.seq(UpdateApplied, 2)}: group 0 is trained a second time" in failed["trained_once"]
    assert "batches" in failed  # it is not the batch that began, either


def test_a_group_twice_in_one_batch_is_found() -> None:
    run = begun().admit().store()
    run.began([(0, 1), (0, 1)])
    run.add(
        msgspec.structs.replace(whole_run().event(UpdateApplied), groups=[(0, 1), (0, 1)], staleness_mean=0.0)
    )
    assert "group 0 is trained a second time" in failures(run)["trained_once"]


# -- bias ---------------------------------------------------------------------------------------------


def test_dropped_and_reissued_groups_are_set_against_trained_ones() -> None:
    run = begun(on_stale="reissue").admit(8)
    run.store(0, 1, rewards=[0.0, 1.0], lengths=[4, 6]).store(2, rewards=[1.0, 1.0], lengths=[10, 10]).drop(2)
    run.store(3, 4, rewards=[0.0, 0.5], lengths=[20, 40]).reissue(IssueReason.STALE, 3)
    run.reissue(IssueReason.FAILED, 5).drop(6).update()
    report = report_of(run)
    assert report.ok
    assert report.totals["bias"] == {
        "trained": {"groups": 2, "unanswered": 0, "mean_length": 5.0, "mean_reward": 0.5},
        "dropped": {"groups": 1, "unanswered": 1, "mean_length": 10.0, "mean_reward": 1.0},
        "reissued": {"groups": 1, "unanswered": 1, "mean_length": 30.0, "mean_reward": 0.25},
    }
    assert "dropped: 1 groups, mean length 10.0, mean reward 1.000, 1 without an answer" in detail(
        report, "bias"
    )


def test_a_reward_that_is_no_number_does_not_end_the_audit() -> None:
    run = begun().admit().store()
    spoilt: list[StoredGroup] = [
        msgspec.structs.replace(group, rewards=["nan", 1.0]) for group in run.event(GroupsStored).groups
    ]
    run.change(GroupsStored, 0, groups=spoilt).update()
    report = report_of(run)
    assert report.ok
    assert math.isnan(report.totals["bias"]["trained"]["mean_reward"])


# -- work needs workers -------------------------------------------------------------------------------


def test_groups_admitted_before_workers_are_ready_are_found() -> None:
    run = whole_run()
    ready = run.event(WorkersReady)
    run.remove(WorkersReady).insert_after(GroupsAdmitted, 0, ready)
    assert_only(run, "workers", "event 4", "groups were admitted before the workers")
