"""The budget: worked values, refusals, and what no total may depend on."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from surefoot.statemachine.budget import (
    BudgetInputs,
    batch_size_of,
    batch_sizes,
    is_publication,
    minibatch_sizes,
    prompts_needed,
    resolve_budget,
    schedule_of,
)
from surefoot.statemachine.errors import BudgetRefused
from surefoot.statemachine.events import decode, encode
from surefoot.statemachine.schedule import ScheduleSpec

from .budgets import CASES, budget, inputs, inputs_of_case


@pytest.mark.parametrize("case", CASES["budgets"], ids=lambda case: case["name"])
def test_totals_are_the_worked_ones(case: dict[str, Any]) -> None:
    resolved = resolve_budget(inputs_of_case(case))
    assert {total: getattr(resolved, total) for total in case["expect"]} == case["expect"]


@pytest.mark.parametrize("case", CASES["budgets"], ids=lambda case: case["name"])
def test_a_budget_reads_back_from_the_log_as_it_was_resolved(case: dict[str, Any]) -> None:
    resolved = resolve_budget(inputs_of_case(case))
    assert decode("BudgetResolved", 1, encode(resolved)) == resolved


VALUES_NAMED = {
    "fewer prompts than one batch": ("3", "4", "batch.prompts"),
    "no data": ("0 rows", "at least 1", "data.source"),
    "minibatches do not divide the batch": ("8", "3", "batch.minibatches"),
    "warm-up longer than the horizon": ("8", "7", "warmup_steps"),
    "cap of zero": ("0", "at least 1", "data.max_prompts"),
    "a tail of fewer prompts than minibatches": ("1 prompts", "5", "batch.tail"),
}


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["why"])
def test_what_cannot_give_a_run_is_refused_in_one_line_with_both_values(case: dict[str, Any]) -> None:
    with pytest.raises(BudgetRefused) as refused:
        resolve_budget(inputs_of_case(case))
    message = str(refused.value)
    assert "\n" not in message
    for word in VALUES_NAMED[case["why"]]:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 100_000_001}, ("1000000010", "at most 1000000000", "data.epochs", "data.max_prompts")),
        ({"max_prompts": -1}, ("data.max_prompts", "-1")),
        ({"max_optimizer_steps": -1}, ("optim.max_optimizer_steps", "-1")),
        ({"max_optimizer_steps": 0}, ("optim.max_optimizer_steps", "0")),
        ({"data_len": -1}, ("-1 rows",)),
        ({"epochs": 0}, ("data.epochs", "0")),
        ({"batch_prompts": 0}, ("batch.prompts", "0")),
        ({"minibatches": 0}, ("batch.minibatches", "0")),
        ({"passes": 0}, ("batch.passes", "0")),
        ({"every_updates": 0}, ("sync.every_updates", "0")),
        ({"horizon": 0}, ("optim.schedule.horizon", "0")),
        ({"horizon": 6}, ("optim.schedule.horizon", "6", "7")),
        ({"max_optimizer_steps": 3, "minibatches": 2, "passes": 2}, ("optim.max_optimizer_steps", "3", "4")),
        ({"warmup_steps": -1}, ("optim.schedule.warmup_steps", "-1")),
        ({"warmup_ratio": "1.5"}, ("warmup_ratio", "1.5")),
        ({"warmup_ratio": "-0.1"}, ("warmup_ratio", "-0.1")),
        ({"warmup_ratio": "a tenth"}, ("warmup_ratio", "a tenth")),
        ({"warmup_ratio": "0.1", "warmup_steps": 2}, ("warmup_ratio", "0.1", "warmup_steps", "2")),
        ({"tail": "keep"}, ("batch.tail", "keep", "drop, train")),
        ({"schedule_kind": "step"}, ("optim.schedule.kind", "step", "cosine")),
        ({"learning_rate": 0.0}, ("optim.lr", "0.0")),
        ({"learning_rate": -1e-6}, ("optim.lr", "-1e-06")),
        ({"learning_rate": float("nan")}, ("optim.lr", "nan")),
        ({"min_ratio": 1.5}, ("min_ratio", "1.5")),
    ],
    ids=str,
)
def test_a_value_out_of_its_range_is_refused_by_name(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(BudgetRefused) as refused:
        budget(**changes)
    for word in words:
        assert word in str(refused.value)


def test_every_total_has_a_line_with_its_numbers_in_it() -> None:
    resolved = budget(
        max_prompts=100, minibatches=2, passes=3, max_optimizer_steps=40, horizon=60, warmup_ratio=0.1
    )
    assert resolved.derivation == [
        "prompts_available = 10 rows * 3 epochs = 30",
        "prompts_total = min(100, 30) = 30",
        "updates_total = 30 // 4 prompts a batch = 7",
        "updates_total = min(7, 40 // 6) = 6: max_optimizer_steps = 40 lowers it, to whole updates"
        " (36 optimizer steps)",
        "optimizer_steps_total = 6 updates * 2 minibatches * 3 passes = 36",
        "publications_total = ceil(6 updates / 4) = 2",
        "prompts_unused = 30 - 24 that batches hold = 6",
        "horizon = 60 as set, of which the run takes 36 optimizer steps",
        "warmup_steps = ceil(0.1 * 60) = 6",
    ]


def test_a_horizon_may_be_longer_than_the_run_and_both_numbers_are_kept() -> None:
    resolved = budget(horizon=20)
    assert (resolved.optimizer_steps_total, resolved.horizon) == (7, 20)
    assert schedule_of(resolved) == ScheduleSpec("cosine", 20, 0, 0.0)


def test_a_warmup_of_the_whole_horizon_is_allowed() -> None:
    assert budget(warmup_steps=7).warmup_steps == 7
    assert budget(warmup_ratio=Decimal(1)).warmup_steps == 7


def test_a_limit_that_cuts_the_tail_off_makes_a_short_tail_no_reason_to_refuse() -> None:
    """41 prompts in batches of 10 leave a tail of one, which the limit never reaches."""
    resolved = budget(
        data_len=41, epochs=1, batch_prompts=10, minibatches=5, tail="train", max_optimizer_steps=20
    )
    assert (resolved.updates_total, resolved.prompts_unused) == (4, 1)


def test_a_run_of_one_short_batch_trains_it() -> None:
    resolved = budget(data_len=3, epochs=1, batch_prompts=4, minibatches=2, tail="train")
    assert list(batch_sizes(resolved)) == [3]


def test_batches_are_whole_but_for_a_trained_tail() -> None:
    assert list(batch_sizes(budget(tail="drop"))) == [4] * 7
    assert list(batch_sizes(budget(tail="train"))) == [4] * 7 + [2]
    assert list(batch_sizes(budget(tail="train", max_optimizer_steps=3))) == [4] * 3


def test_prompts_that_no_batch_holds_are_not_needed() -> None:
    assert prompts_needed(budget(tail="drop")) == 28
    assert prompts_needed(budget(tail="train")) == 30
    assert prompts_needed(budget(max_optimizer_steps=2)) == 8


@pytest.mark.parametrize("update", [0, -1, 8])
def test_an_update_outside_the_budget_has_no_batch_and_no_publication(update: int) -> None:
    for ask in (batch_size_of, is_publication):
        with pytest.raises(ValueError, match=rf"update {update} is outside"):
            ask(budget(), update)


def test_minibatches_are_as_even_as_possible_and_larger_first() -> None:
    assert minibatch_sizes(8, 2) == [4, 4]
    assert minibatch_sizes(3, 2) == [2, 1]
    assert minibatch_sizes(11, 4) == [3, 3, 3, 2]
    for prompts, minibatches in ((1, 2), (0, 1), (4, 0)):
        with pytest.raises(ValueError):
            minibatch_sizes(prompts, minibatches)


@st.composite
def some_inputs(draw: st.DrawFn) -> BudgetInputs:
    minibatches = draw(st.integers(1, 4))
    return inputs(
        data_len=draw(st.integers(1, 300)),
        epochs=draw(st.integers(1, 4)),
        max_prompts=draw(st.none() | st.integers(1, 1500)),
        batch_prompts=minibatches * draw(st.integers(1, 12)),
        minibatches=minibatches,
        passes=draw(st.integers(1, 3)),
        every_updates=draw(st.integers(1, 9)),
        tail=draw(st.sampled_from(["drop", "train"])),
        max_optimizer_steps=draw(st.none() | st.integers(1, 500)),
    )


def resolved_or_discarded(wanted: BudgetInputs):
    try:
        return resolve_budget(wanted)
    except BudgetRefused:
        assume(False)


@given(some_inputs())
def test_totals_belong_together(wanted: BudgetInputs) -> None:
    resolved = resolved_or_discarded(wanted)
    sizes = list(batch_sizes(resolved))
    assert len(sizes) == resolved.updates_total >= 1
    assert all(size >= resolved.minibatches for size in sizes)
    assert sum(sizes) == prompts_needed(resolved)
    assert prompts_needed(resolved) + resolved.prompts_unused == resolved.prompts_total
    assert resolved.prompts_total <= resolved.prompts_available == wanted.data_len * wanted.epochs
    cut = [minibatch_sizes(size, resolved.minibatches) for size in sizes]
    assert sum(len(parts) * resolved.passes for parts in cut) == resolved.optimizer_steps_total
    assert resolved.horizon == resolved.optimizer_steps_total


@given(some_inputs())
def test_the_weights_of_the_last_update_are_always_published(wanted: BudgetInputs) -> None:
    resolved = resolved_or_discarded(wanted)
    published = [u for u in range(1, resolved.updates_total + 1) if is_publication(resolved, u)]
    assert len(published) == resolved.publications_total
    assert published[-1] == resolved.updates_total
    gaps = [b - a for a, b in zip([0, *published], published, strict=False)]
    assert all(gap == resolved.every_updates for gap in gaps[:-1])
    assert 1 <= gaps[-1] <= resolved.every_updates


@given(some_inputs(), st.integers(1, 500))
def test_a_limit_on_optimizer_steps_only_lowers_the_total_to_whole_updates(
    wanted: BudgetInputs, limit: int
) -> None:
    free = resolved_or_discarded(inputs(**{**fields(wanted), "max_optimizer_steps": None}))
    limited = resolved_or_discarded(inputs(**{**fields(wanted), "max_optimizer_steps": limit}))
    steps_per_update = wanted.minibatches * wanted.passes
    assert limited.optimizer_steps_total <= min(limit, free.optimizer_steps_total)
    assert limited.optimizer_steps_total % steps_per_update == 0
    assert limited.optimizer_steps_total + steps_per_update > min(limit, free.optimizer_steps_total)


@given(st.integers(1, 5000), st.integers(1, 64))
def test_minibatches_hold_the_batch(prompts: int, minibatches: int) -> None:
    assume(minibatches <= prompts)
    sizes = minibatch_sizes(prompts, minibatches)
    assert (sum(sizes), len(sizes)) == (prompts, minibatches)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_world_size_micro_batches_and_group_size_are_no_inputs() -> None:
    words = ("rank", "world", "micro", "accumul", "group_size", "worker", "device", "samples")
    assert not [key for key in fields(inputs()) if any(word in key for word in words)]


def fields(wanted: BudgetInputs) -> dict[str, Any]:
    return {key: getattr(wanted, key) for key in wanted.__struct_fields__}
