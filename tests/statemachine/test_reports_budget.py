"""Faults that users of such trainers report, where the right value is a pure number. Numbered as reported."""

from __future__ import annotations

import pytest

from surefoot.statemachine.budget import is_publication, schedule_of
from surefoot.statemachine.errors import BudgetRefused
from surefoot.statemachine.events import BudgetResolved
from surefoot.statemachine.schedule import ScheduleSpec, learning_rates, multiplier

from .budgets import budget, inputs


def curve(resolved: BudgetResolved, *optimizer_steps: int) -> list[float]:
    spec = schedule_of(resolved)
    wanted = optimizer_steps or range(resolved.optimizer_steps_total)
    return [round(multiplier(spec, k), 4) for k in wanted]


def test_report_1_the_learning_rate_is_never_0_for_want_of_a_total() -> None:
    resolved = budget(data_len=10, epochs=3, batch_prompts=4, every_updates=4)
    assert resolved.optimizer_steps_total == 7
    assert curve(resolved) == [1, 0.9505, 0.8117, 0.6113, 0.3887, 0.1883, 0.0495]


@pytest.mark.parametrize("total", [-1, 0])
def test_report_1_a_sentinel_total_is_refused(total: int) -> None:
    for changes in (
        {"data_len": total},
        {"max_prompts": total},
        {"max_optimizer_steps": total},
        {"horizon": total},
    ):
        with pytest.raises(BudgetRefused):
            budget(**changes)


def test_report_2_the_cap_is_never_used_raw() -> None:
    capped = budget(data_len=10, epochs=3, batch_prompts=4, max_prompts=100)
    assert capped.optimizer_steps_total == 7
    assert curve(capped, 6) == [0.0495]
    assert budget(data_len=10, epochs=3, batch_prompts=4, max_prompts=None).optimizer_steps_total == 7
    assert budget(data_len=10, epochs=3, batch_prompts=4, max_prompts=20).optimizer_steps_total == 5


def test_report_3_publications_are_not_updates() -> None:
    resolved = budget(data_len=64, epochs=2, batch_prompts=8, every_updates=3)
    assert (resolved.optimizer_steps_total, resolved.publications_total) == (16, 6)
    assert [u for u in range(1, 17) if is_publication(resolved, u)] == [3, 6, 9, 12, 15, 16]


def test_report_4_no_factor_is_missing() -> None:
    resolved = budget(data_len=32, epochs=3, batch_prompts=4, passes=2)
    assert resolved.updates_total == 8 * 3
    assert resolved.optimizer_steps_total == 48


def test_report_5_the_total_is_not_in_micro_batches() -> None:
    """80 micro-batches of a quarter batch each are 20 batches; nothing in the inputs can say otherwise."""
    resolved = budget(data_len=80, epochs=1, batch_prompts=4, warmup_ratio="0.1")
    assert (resolved.optimizer_steps_total, resolved.warmup_steps) == (20, 2)
    assert not [key for key in inputs().__struct_fields__ if "micro" in key or "accum" in key]


def test_report_6_the_warmup_is_taken_off_once() -> None:
    spec = ScheduleSpec("cosine", 220, 22, 0.0)
    assert round(multiplier(spec, 198), 4) == 0.0302
    assert multiplier(spec, 219) > 0.0
    assert multiplier(spec, 220) == 0.0


def test_report_7_the_horizon_is_no_placeholder() -> None:
    resolved = budget(data_len=80, epochs=1, batch_prompts=4)
    assert (resolved.optimizer_steps_total, resolved.horizon) == (20, 20)
    assert multiplier(schedule_of(resolved), 20) == 0.0
    assert round(multiplier(ScheduleSpec("cosine", 1000, 0, 0.0), 20), 4) == 0.9990


def test_report_8_epochs_count_and_are_not_floored_one_by_one() -> None:
    assert budget(data_len=10, epochs=3, batch_prompts=4).optimizer_steps_total == 7


@pytest.mark.parametrize(("limit", "total"), [(5, 5), (1_000_000, 7)])
def test_report_8_a_limit_on_optimizer_steps_only_lowers(limit: int, total: int) -> None:
    assert (
        budget(data_len=10, epochs=3, batch_prompts=4, max_optimizer_steps=limit).optimizer_steps_total
        == total
    )


def test_report_8_a_limit_is_taken_down_to_whole_updates_and_says_so() -> None:
    resolved = budget(data_len=10, epochs=3, batch_prompts=4, minibatches=4, max_optimizer_steps=5)
    assert resolved.optimizer_steps_total == 4
    assert any(
        "max_optimizer_steps = 5" in line and "4 optimizer steps" in line for line in resolved.derivation
    )


@pytest.mark.parametrize(
    ("ratio", "total", "warmup_steps"), [(0.1, 500, 50), (0.29, 100, 29), (0.07, 100, 7), (0.1, 7, 1)]
)
def test_report_9_a_warmup_ratio_is_of_this_run_and_exact(
    ratio: float, total: int, warmup_steps: int
) -> None:
    resolved = budget(data_len=total, epochs=1, batch_prompts=1, warmup_ratio=ratio)
    assert (resolved.optimizer_steps_total, resolved.warmup_steps) == (total, warmup_steps)


def test_report_10_completions_are_not_prompts() -> None:
    assert budget(data_len=8_000, epochs=2, batch_prompts=4).optimizer_steps_total == 4_000
    assert "group_size" not in inputs().__struct_fields__


def test_report_13_the_first_step_is_not_at_learning_rate_0() -> None:
    resolved = budget(data_len=28, epochs=1, batch_prompts=4, warmup_steps=2)
    assert resolved.optimizer_steps_total == 7
    assert curve(resolved)[:3] == [0.5, 1.0, 1.0]


def test_report_14_the_world_size_is_not_in_the_schedule() -> None:
    resolved = budget(data_len=160, epochs=1, batch_prompts=4)
    assert resolved.optimizer_steps_total == 40
    assert curve(resolved, 10) == [0.8536]
    assert not [key for key in inputs().__struct_fields__ if "rank" in key or "world" in key]


@pytest.mark.parametrize("killed_after", range(8))
def test_report_16_two_lives_have_the_learning_rates_of_one(killed_after: int) -> None:
    spec = schedule_of(budget(warmup_steps=2))
    whole = learning_rates(1e-4, spec, range(7))
    first, second = range(killed_after), range(killed_after, 7)
    assert learning_rates(1e-4, spec, first) + learning_rates(1e-4, spec, second) == whole
