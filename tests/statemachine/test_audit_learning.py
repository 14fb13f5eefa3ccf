"""For every identity of learning, a log that breaks just it: batches, steps, rates, staleness."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from surefoot.statemachine.budget import schedule_of
from surefoot.statemachine.events import (
    DropReason,
    OptimizerStep,
    UpdateApplied,
    UpdateBegan,
    WeightsPublished,
    WorkersReady,
)
from surefoot.statemachine.schedule import multiplier

from .audits import assert_only, detail, failures, report_of
from .scenario import Scenario, whole_run


def begun(**options: Any) -> Scenario:
    return Scenario(**options).begin()


# -- batches ------------------------------------------------------------------------------------------


def test_a_batch_out_of_draw_order_is_found() -> None:
    run = begun().admit().store().update([(1, 1), (0, 1)])
    assert_only(run, "batches", "update 1 began with groups [1, 0]", "[0, 1]")


def test_a_batch_that_passes_over_a_slow_group_is_found() -> None:
    run = begun().admit().store(1, 2).update([(1, 1), (2, 1)])
    assert_only(run, "batches", "update 1 began with groups [1, 2]", "[0, 1]")


def test_a_batch_skips_groups_that_were_dropped() -> None:
    assert failures(begun().admit().drop(0, 2).store().update([(1, 1), (3, 1)])) == {}


def test_a_batch_of_what_is_ready_first_is_right_where_stale_groups_are_reissued() -> None:
    run = begun(on_stale="reissue").admit().store(3, 1, 0)
    assert failures(run.update([(3, 1), (1, 1)])) == {}


def test_a_batch_of_what_was_ready_later_is_found() -> None:
    run = begun(on_stale="reissue").admit().store(3, 1, 0).update([(0, 1), (1, 1)])
    assert_only(run, "batches", "update 1 began with groups [0, 1]", "[3, 1] were ready first")


@pytest.mark.parametrize("batch", [[(0, 1)], [(0, 1), (1, 1), (2, 1)]], ids=len)
def test_a_batch_of_another_size_is_found(batch: list[tuple[int, int]]) -> None:
    run = begun(minibatches=1).admit().store().update(batch)
    assert_only(run, "batches", f"update 1 began with {len(batch)} groups, its batch has 2")


def test_a_trained_tail_is_as_large_as_the_budget_says() -> None:
    tail = {"data_len": 7, "batch_prompts": 4, "tail": "train"}
    assert failures(whole_run(**tail)) == {}
    run = begun(**tail).work(1).admit().store()
    run.update([(4, 1), (5, 1)])
    assert_only(run, "batches", "update 2 began with 2 groups, its batch has 3")


def test_a_trained_tail_may_be_what_survived_when_nothing_is_left_to_draw() -> None:
    run = begun(data_len=7, batch_prompts=4, tail="train").work(1).admit().store().drop(5)
    run.update([(4, 1), (6, 1)]).checkpoint().complete()
    assert failures(run) == {}


def test_an_update_beyond_the_budget_is_found() -> None:
    run = begun(data_len=4).work()
    extra = UpdateBegan(update=3, groups=[])
    failed = failures(run.add(extra))
    assert "update 3 is outside the budget's 2" in failed["batches"]


def test_an_update_with_other_groups_than_began_is_found() -> None:
    run = begun().admit().store()
    run.began([(0, 1), (1, 1)]).applied([(0, 1), (2, 1)])
    assert_only(run, "batches", "update 1 was applied with groups [0, 2]", "[0, 1]")


def test_an_update_with_its_groups_in_another_order_is_found() -> None:
    run = begun().admit().store()
    run.began([(0, 1), (1, 1)]).applied([(1, 1), (0, 1)])
    assert_only(run, "batches", "update 1 was applied with groups [1, 0]", "[0, 1]")


def test_an_update_with_another_number_than_began_is_found() -> None:
    run = begun().admit().store().update().change(UpdateApplied, 0, update=2, staleness_max_updates=1)
    assert_only(run, "batches", "update 2 was applied with groups [0, 1], update 1 had begun")


def test_an_update_after_the_rest_was_dropped_is_found() -> None:
    run = begun(data_len=3).admit(2).drop(0, 1, reason=DropReason.UNUSED)
    failed = failures(run.add(UpdateBegan(update=1, groups=[])))
    assert "update 1 began after what was left had been dropped" in failed["batches"]


def test_an_update_that_had_not_begun_is_found() -> None:
    run = begun().admit().store().applied()
    assert_only(run, "batches", f"event {len(run.entries)}", "update 1 was applied and had not begun")


def test_an_update_that_began_in_another_life_must_begin_again() -> None:
    run = begun().admit().store().began().take_over()
    assert failures(run.began().applied()) == {}
    run = begun().admit().store().began().take_over().applied()
    assert_only(run, "batches", "had not begun")


def test_an_update_that_a_lost_learner_had_begun_must_begin_again() -> None:
    run = begun().admit().store().began().lose_learner()
    assert failures(run.began().applied()) == {}
    run = begun().admit().store().began().lose_learner().applied()
    assert_only(run, "batches", "had not begun")


def test_a_batch_that_begins_twice_in_one_life_is_found() -> None:
    run = begun().admit().store().began().began().applied()
    assert_only(run, "batches", "update 1 began while 1 was under way")


def test_an_update_out_of_sequence_is_found() -> None:
    run = begun().admit().store()
    run.updates = 1
    run.update()
    failed = failures(run)
    assert "update 2 began after 0 updates" in failed["batches"]


# -- optimizer steps ----------------------------------------------------------------------------------


def with_steps(change: Callable[[list[OptimizerStep]], list[OptimizerStep]], **options: Any) -> Scenario:
    """A run whose second update has other steps."""
    return begun(**options).admit().store().update().update().change(UpdateApplied, 1, steps=change)


def test_a_gap_in_the_optimizer_steps_is_found() -> None:
    run = begun().admit().store().update()
    run.optimizer_steps += 1
    run.update()
    assert_only(run, "optimizer_steps", "optimizer step 3 follows, the next is 2")


def test_a_repeated_optimizer_step_is_found() -> None:
    """Off by one at a resume: the step before is counted again."""
    run = begun().admit().store().update()
    run.optimizer_steps -= 1
    run.update()
    assert_only(run, "optimizer_steps", "optimizer step 1 follows, the next is 2")


def test_optimizer_steps_that_do_not_begin_at_0_are_found() -> None:
    run = begun().admit().store()
    run.optimizer_steps = 1
    assert_only(run.update(), "optimizer_steps", "optimizer step 1 follows, the next is 0")


@pytest.mark.parametrize(("options", "due"), [({}, 2), ({"passes": 3}, 6)])
def test_an_update_with_too_few_optimizer_steps_is_found(options: dict[str, int], due: int) -> None:
    run = with_steps(lambda steps: steps[:-1], **options)
    assert_only(run, "optimizer_steps", f"update 2 has {due - 1} optimizer steps", "2 minibatches")


def test_optimizer_steps_beyond_the_budget_are_found() -> None:
    """Ids 3 and 4 where 2 and 3 are due, in a budget of 4."""
    run = begun(data_len=4).admit().store().update().update()
    run.change(
        UpdateApplied,
        1,
        steps=lambda steps: [
            msgspec.structs.replace(steps[1], optimizer_step=3),
            msgspec.structs.replace(steps[1], optimizer_step=4),
        ],
    )
    failed = failures(run)
    assert "optimizer step 4 is outside the budget's 4" in failed["optimizer_steps"]


# -- learning rates -----------------------------------------------------------------------------------


def with_rate(change: Callable[[float], float]) -> Scenario:
    return with_steps(
        lambda steps: [
            steps[0],
            msgspec.structs.replace(steps[1], learning_rate=change(steps[1].learning_rate)),
        ]
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda rate: 0.0,
        lambda rate: math.nextafter(rate, 1.0),
        lambda rate: math.nextafter(rate, 0.0),
        lambda rate: -rate,
    ],
    ids=["0", "a bit above", "a bit below", "negative"],
)
def test_a_learning_rate_that_is_not_exactly_the_schedule_s_is_found(
    change: Callable[[float], float],
) -> None:
    assert_only(with_rate(change), "learning_rates", "optimizer step 3", "the schedule's rate is")


def test_a_learning_rate_of_the_step_after_is_found() -> None:
    run = begun().admit().store().update().update()
    later = run.budget.learning_rate * multiplier(schedule_of(run.budget), 4)
    run = with_rate(lambda rate: later)
    assert_only(run, "learning_rates", "optimizer step 3")


def test_a_schedule_that_started_again_at_a_resume_is_found() -> None:
    """The position was restored from nowhere: step ids go on, rates start at the beginning."""
    run = begun(warmup_steps=2).admit().store().update()
    first = [step.learning_rate for step in run.event(UpdateApplied).steps]
    run.take_over().update()
    run.change(
        UpdateApplied,
        1,
        steps=lambda steps: [
            msgspec.structs.replace(step, learning_rate=rate) for step, rate in zip(steps, first, strict=True)
        ],
    )
    assert_only(run, "learning_rates", "optimizer step 2")


# -- skipped steps ------------------------------------------------------------------------------------


def with_step(**changes: Any) -> Scenario:
    return with_steps(lambda steps: [msgspec.structs.replace(steps[0], **changes), *steps[1:]])


@pytest.mark.parametrize(
    "changes",
    [
        {"applied": False, "skipped_because": "not_finite", "grad_norm": "nan", "loss": "nan"},
        {"applied": False, "skipped_because": "not_finite", "grad_norm": "inf"},
        {"applied": False, "skipped_because": "no_tokens", "tokens": 0, "grad_norm": 0.0},
    ],
    ids=str,
)
def test_a_skipped_step_uses_up_its_place_and_is_counted(changes: dict[str, Any]) -> None:
    run = with_step(**changes)
    report = report_of(run)
    assert report.ok
    assert (report.totals["optimizer_steps"], report.totals["optimizer_steps_skipped"]) == (4, 1)
    assert "1 skipped" in detail(report, "optimizer_steps")


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_norm": "nan"},
        {"grad_norm": "-inf"},
        {"tokens": 0},
        {"skipped_because": "not_finite"},
        {"applied": False},
        {"applied": False, "skipped_because": "not_finite"},
        {"applied": False, "skipped_because": "no_tokens"},
        {"applied": False, "skipped_because": "bored", "grad_norm": "nan", "tokens": 0},
    ],
    ids=str,
)
def test_a_step_applied_or_skipped_against_its_figures_is_found(changes: dict[str, Any]) -> None:
    assert_only(with_step(**changes), "skipped_steps", "optimizer step 2")


# -- staleness ----------------------------------------------------------------------------------------


def test_a_sample_over_the_bound_is_found() -> None:
    """Bound 0: what was admitted at version 0 may not be trained at version 1."""
    assert failures(begun(max_staleness=1).admit(8).store().work(3)) == {}
    spoilt = begun(max_staleness=0)
    spoilt.max_staleness = 1  # the driver thinks so, the log's config says 0
    spoilt.admit(8).store().update().update().update()
    failed = failures(spoilt)
    assert "update 3 trained a sample of version 0 at version 1: 1 is over the bound 0" in failed["staleness"]
    assert set(failed) == {"staleness", "admission"}


def test_a_stale_sample_is_found_though_its_admission_was_right() -> None:
    """Under reissue a group may wait for long; then it must be issued again before it is trained."""
    run = begun(on_stale="reissue", data_len=40, max_staleness=1).admit(8).store(0, 1, 2, 3)
    run.update([(0, 1), (1, 1)]).update([(2, 1), (3, 1)])
    run.admit(4).store(8, 9, 10, 11).update([(8, 1), (9, 1)]).update([(10, 1), (11, 1)])
    assert failures(run) == {}
    run.store(4, 5).update([(4, 1), (5, 1)])
    assert_only(
        run, "staleness", "update 5 trained a sample of version 0 at version 2: 2 is over the bound 1"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("staleness_max", 0),
        ("staleness_mean", 0.9),
        ("staleness_max_updates", 1),
        ("policy_version", 0),
    ],
)
def test_staleness_stated_wrong_is_found(name: str, value: float) -> None:
    """Update 3 trains at version 1, after 2 updates, what version 0 made: 1 version, 2 updates."""
    run = begun().admit(8).store().work(3)
    applied = run.event(UpdateApplied, 2)
    assert (applied.staleness_max, applied.staleness_mean, applied.staleness_max_updates) == (1, 1.0, 2)
    run.change(UpdateApplied, 2, **{name: value})
    assert_only(run, "staleness", f"event {run.seq(UpdateApplied, 2)}")


# -- work needs the learner ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [UpdateBegan, WeightsPublished])
def test_learning_before_the_rebuilt_learner_is_ready_is_found(kind: type) -> None:
    run = begun().admit().store().update()
    if kind is WeightsPublished:
        run.began().applied()
    run.lose_learner()
    ready = run.event(WorkersReady, -1)
    run.remove(WorkersReady, -1)
    if kind is WeightsPublished:
        run.publish().add(ready)
    else:
        run.began().add(ready)
    assert_only(run, "workers", "before learner try 2 was ready")


def test_a_reply_of_an_older_learner_try_is_found() -> None:
    run = begun().admit().store().lose_learner().update()
    assert failures(run) == {}
    run.change(UpdateApplied, 0, learner_try=1)
    assert_only(run, "workers", "update 1 is of learner try 1, not 2")
