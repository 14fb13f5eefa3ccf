"""For every identity of a run's lives, a log that breaks just it: budget, config, incarnations, ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from surefoot.statemachine.events import (
    BudgetResolved,
    CheckpointCommitted,
    GroupsDropped,
    IncarnationBegan,
    LearnerLost,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunPreempted,
    RunStopped,
    WeightsPublished,
    WorkerReplaced,
    WorkersReady,
)

from .audits import assert_only, detail, failures, report_of
from .scenario import Scenario, whole_run


def begun(**options: Any) -> Scenario:
    return Scenario(**options).begin()


# -- creation and config ------------------------------------------------------------------------------


def test_a_run_created_twice_is_found() -> None:
    run = whole_run()
    run.insert_after(WorkersReady, 0, run.event(RunCreated))
    assert_only(run, "events", "event 5", "only its first event")


def test_a_log_without_a_creation_is_found() -> None:
    failed = failures(whole_run().remove(RunCreated))
    assert "an incarnation began before the run was created" in failed["events"]


def test_a_config_without_a_bound_is_found() -> None:
    run = whole_run().change(RunCreated, 0, config=lambda config: config | {"sync": {}})
    assert "sync.max_staleness is None" in failures(run)["config"]


@pytest.mark.parametrize(
    "key", ["seed", "data.epochs", "batch.prompts", "optim.lr", "sync.max_staleness", "rollout.temperature"]
)
def test_a_change_of_what_fixes_the_accounting_is_found(key: str) -> None:
    run = begun().take_over(config_changes={key: [1, 2]})
    assert_only(run, "config", f"event {run.seq(IncarnationBegan, 1)}", key, "2")


@pytest.mark.parametrize("key", ["rollout.workers", "learner.ranks", "checkpoint.keep", "metrics.jsonl"])
def test_a_change_of_what_does_not_is_right(key: str) -> None:
    assert failures(begun().take_over(config_changes={key: [1, 2]})) == {}


def test_another_code_of_the_reward_is_no_violation_and_is_said() -> None:
    run = begun().take_over(digest_changes={"reward": ["a", "b"]})
    assert failures(run) == {}
    (config,) = (check for check in report_of(run).checks if check.id == "config")
    assert config.detail.endswith("1 times the reward had other code than before")


def test_other_data_under_a_run_is_found() -> None:
    run = begun().take_over(digest_changes={"data": ["a", "b"]})
    assert_only(run, "config", f"event {run.seq(IncarnationBegan, 1)}", "data", "from a to b")


def with_schedule(run: Scenario, **keys: Any) -> Scenario:
    """The config says how the schedule is asked for; what it leaves out is not set."""
    schedule = {"warmup_steps": None, "warmup_ratio": None, "horizon": None} | keys
    return run.change(
        RunCreated, 0, config=lambda config: config | {"optim": config["optim"] | {"schedule": schedule}}
    )


# -- budget -------------------------------------------------------------------------------------------


def test_workers_before_the_budget_are_found() -> None:
    run = whole_run()
    budget = run.event(BudgetResolved)
    run.remove(BudgetResolved).insert_after(WorkersReady, 0, budget)
    assert_only(run, "budget", "event 3", "workers were ready before a budget was committed")


def test_a_run_without_a_budget_is_found_wherever_it_works() -> None:
    failed = failures(whole_run().remove(BudgetResolved))
    assert "workers were ready before a budget" in failed["budget"]
    assert "groups were admitted before a budget" in failed["budget"]


def test_a_budget_committed_twice_is_found() -> None:
    run = whole_run()
    run.insert_after(WorkersReady, 0, run.event(BudgetResolved))
    assert_only(run, "budget", "event 5", "a second time")


def test_a_budget_of_a_resumed_run_is_not_committed_again() -> None:
    run = begun().work(1).take_over(ready=False)
    run.add(run.event(BudgetResolved)).redo().ready()
    assert_only(run, "budget", "a second time")


@pytest.mark.parametrize(
    ("total", "value"),
    [
        ("prompts_available", 13),
        ("prompts_total", 11),
        ("prompts_unused", 1),
        ("updates_total", 7),
        ("optimizer_steps_total", -1),
        ("optimizer_steps_total", 0),
        ("publications_total", 2),
        ("warmup_steps", 1),
    ],
)
def test_a_total_that_does_not_follow_from_its_inputs_is_found(total: str, value: int) -> None:
    """The budget alone, before anything has been done with it."""
    run = Scenario().create()
    run.add(msgspec.structs.replace(run.budget, **{total: value}))
    assert_only(with_schedule(run), "budget", "event 3", f"{total} is {value}")


def test_a_placeholder_horizon_is_found() -> None:
    run = Scenario(horizon=1000).create()
    run.add(run.budget)
    assert_only(with_schedule(run), "budget", "horizon is 1000", "inputs give 12")


def test_a_warmup_ratio_is_worked_out_again() -> None:
    for warmup_steps, right in ((2, True), (1, False)):
        run = Scenario(warmup_steps=warmup_steps).create()
        run.add(run.budget)
        assert (failures(with_schedule(run, warmup_ratio="0.1")) == {}) == right


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "epochs", 2),
        ("data", "max_prompts", 11),
        ("batch", "prompts", 3),
        ("batch", "tail", "train"),
        ("sync", "every_updates", 1),
        ("optim", "lr", 1.0),
    ],
)
def test_a_budget_that_is_not_the_config_s_is_found(section: str, key: str, value: Any) -> None:
    run = Scenario().create()
    run.add(run.budget)
    run.change(RunCreated, 0, config=lambda config: config | {section: config[section] | {key: value}})
    assert_only(run, "budget", f"{section}.{key} in the config is {value!r}")


def test_a_budget_for_other_data_is_found() -> None:
    run = whole_run().change(RunCreated, 0, data_len=11)
    assert_only(run, "budget", "the budget is for 12 rows, the run has 11")


def test_a_budget_that_no_inputs_can_give_is_found() -> None:
    run = Scenario().create()
    run.add(msgspec.structs.replace(run.budget, minibatches=5))
    assert "no budget follows from its inputs" in failures(run)["budget"]


def test_a_budget_whose_schedule_is_none_is_found() -> None:
    run = Scenario().create()
    run.add(msgspec.structs.replace(run.budget, horizon=12, warmup_steps=13))
    assert "warmup_steps 13 is not within 0..12" in failures(run)["budget"]


# -- incarnations -------------------------------------------------------------------------------------


def test_an_event_of_an_older_incarnation_is_found() -> None:
    """A driver that was thought dead writes once more."""
    run = begun().take_over()
    run.entries.append((1, WorkerReplaced(worker=0, because="x")))
    assert_only(run, "incarnations", f"event {len(run.entries)}", "by incarnation 1", "held by 2")


def test_an_event_of_an_incarnation_that_has_not_begun_is_found() -> None:
    run = begun()
    run.entries.append((2, WorkerReplaced(worker=0, because="x")))
    assert_only(run, "incarnations", "by incarnation 2", "held by 1")


def test_an_incarnation_that_does_not_follow_is_found() -> None:
    run = begun()
    run.incarnation = 2
    run.take_over()
    assert_only(run, "incarnations", "incarnation 3 began after 1")


def test_an_incarnation_that_began_with_another_s_row_is_found() -> None:
    run = begun().take_over()
    place = run.seq(IncarnationBegan, 1) - 1
    run.entries[place] = (1, run.entries[place][1])
    assert_only(run, "incarnations", "incarnation 2 began with a row of 1")


# -- workers ------------------------------------------------------------------------------------------


def test_work_of_a_new_life_before_its_workers_are_ready_is_found() -> None:
    run = begun().take_over(ready=False).admit(1).ready()
    assert_only(run, "workers", "before the workers of this incarnation were ready")


def test_generation_goes_on_while_the_learner_is_rebuilt() -> None:
    run = begun().admit(4).add(LearnerLost(learner_try=1, because="x")).store().admit()
    run.learner_try = 2
    assert failures(run.ready().update()) == {}


@pytest.mark.parametrize("learner_try", [0, 2])
def test_a_learner_ready_of_another_try_is_found(learner_try: int) -> None:
    run = begun().change(WorkersReady, 0, learner_try=learner_try)
    assert_only(run, "workers", f"learner try {learner_try} was ready, under way was 1")


def test_a_loss_of_an_older_learner_try_is_found() -> None:
    run = begun().lose_learner().lose_learner().change(LearnerLost, 1, learner_try=1)
    assert_only(run, "workers", "learner try 1 was lost, under way was 2")


def test_workers_ready_twice_are_found() -> None:
    assert_only(begun().ready(), "workers", "learner try 1 was ready a second time")


def test_learner_tries_start_again_with_each_incarnation() -> None:
    run = begun().lose_learner().take_over().admit().store().update()
    assert failures(run) == {}


# -- ends ---------------------------------------------------------------------------------------------


def test_an_open_run_is_no_violation_and_is_said() -> None:
    report = report_of(begun().work(3))
    assert report.ok
    assert detail(report, "ended") == "open, not ended: 3 of 6 updates, 6 of 12 optimizer steps"


def test_a_preempted_run_is_no_violation_and_is_said() -> None:
    report = report_of(begun().work(3).checkpoint().preempt())
    assert report.ok
    assert report.totals["ending"] == "preempted"
    assert "preempted" in detail(report, "ended") and "3 of 6 updates" in detail(report, "ended")


def test_a_failed_run_is_no_violation_and_is_said_with_its_cause() -> None:
    report = report_of(begun().work(3).fail())
    assert report.ok
    assert report.totals["ending"] == "failed"
    assert "prompt 9 failed 3 times" in detail(report, "ended")


def stopped_run() -> Scenario:
    """Half of twelve groups are dropped and nothing is left to draw: three of six updates."""
    run = begun(max_staleness=9).admit().store().drop(1, 3, 5, 7, 9, 11)
    return run.update().update().update().stop()


def test_a_run_that_stopped_short_is_right_and_says_by_how_much() -> None:
    run = stopped_run()
    report = report_of(run)
    assert report.ok, failures(run)
    assert detail(report, "ended") == "stopped short, as stated: 3 of 6 updates, 6 of 12 optimizer steps"
    assert report.totals["ending"] == "stopped"


@pytest.mark.parametrize("changes", [{"updates": 5}, {"optimizer_steps": 11}, {"policy_version": 4}], ids=str)
def test_a_completion_with_other_counts_than_the_log_is_found(changes: dict[str, int]) -> None:
    run = whole_run().change(RunCompleted, 0, **changes)
    assert_only(run, "ended", "the run completed saying", "the log has 6, 12 and 3")


def test_a_completion_short_of_the_total_is_found() -> None:
    run = begun().work(4).checkpoint().complete()
    assert_only(run, "ended", "the run completed with 8 optimizer steps, 4 updates", "12, 6 and 3")


def test_an_end_without_a_checkpoint_of_the_last_update_is_found() -> None:
    """Finished, yet nothing on disk."""
    run = whole_run().remove(CheckpointCommitted)
    assert_only(run, "ended", "update 6, the last, is in no kept checkpoint")
    run = begun().work(5).checkpoint().work().complete()
    assert_only(run, "ended", "update 6, the last, is in no kept checkpoint")


def test_an_end_with_other_weights_than_published_is_found() -> None:
    run = whole_run().change(RunCompleted, 0, weights_digest="w5")
    assert_only(run, "ended", "ended with weights w5, last published were w6")


def test_an_end_with_groups_left_over_is_found() -> None:
    run = begun(max_staleness=9).admit().store().drop(1, 3, 5, 7, 9).update().update().update().stop()
    assert failures(run) == {}
    run.change(GroupsDropped, -1, prompt_indices=[])
    assert_only(run, "ended", "0 groups admitted and 1 stored, neither trained nor dropped")


@pytest.mark.parametrize("changes", [{"updates_short": 2}, {"optimizer_steps_short": 0}], ids=str)
def test_a_shortfall_stated_wrong_is_found(changes: dict[str, int]) -> None:
    run = stopped_run().change(RunStopped, 0, **changes)
    assert_only(run, "ended", "by the log it is 3 and 6")


def test_a_stop_that_is_not_short_is_found() -> None:
    run = begun().work().checkpoint()
    run.stop()
    assert_only(run, "ended", "0 updates and 0 optimizer steps short")


def test_a_stop_while_a_batch_could_still_form_is_found() -> None:
    """A crash taken for the end of data."""
    run = begun().admit().store().update().stop()
    assert_only(run, "ended", "dropped as unused", "there were 10, and 2 make a batch")


def test_a_stop_without_dropping_what_is_left_is_found() -> None:
    run = stopped_run().remove(GroupsDropped, -1)
    assert "what was left was not dropped" in failures(run)["ended"]


@pytest.mark.parametrize(
    "changes", [{"updates": 2}, {"optimizer_steps": 5}, {"checkpoint_update": 2}], ids=str
)
def test_a_preemption_that_says_something_else_than_the_log_is_found(changes: dict[str, int]) -> None:
    run = begun().work(3).checkpoint().preempt().change(RunPreempted, 0, **changes)
    assert_only(run, "ended", "preempted")


@pytest.mark.parametrize("changes", [{"updates": 2}, {"optimizer_steps": 5}], ids=str)
def test_a_failure_that_says_something_else_than_the_log_is_found(changes: dict[str, int]) -> None:
    run = begun().work(3).fail().change(RunFailed, 0, **changes)
    assert_only(run, "ended", "the run failed saying")


def test_anything_after_a_completion_is_found() -> None:
    assert_only(whole_run().take_over(ready=False), "ended", "IncarnationBegan follows the end")
    run = stopped_run().add(WorkerReplaced(worker=0, because="x"))
    assert_only(run, "ended", "WorkerReplaced follows the end")


def test_only_a_new_incarnation_follows_a_preemption() -> None:
    assert failures(begun().work(2).checkpoint().preempt().take_over().work(1)) == {}
    run = begun().work(2).checkpoint().preempt().add(WorkerReplaced(worker=0, because="x"))
    assert_only(run, "ended", "WorkerReplaced follows the end of its incarnation: preempted")


def test_a_last_publication_missing_at_a_stop_is_found() -> None:
    run = stopped_run().remove(WeightsPublished, -1)
    assert "the run ended after update 3, published is update 2" in failures(run)["publications"]
