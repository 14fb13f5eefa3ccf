"""The budget: every total of a run, from its config and the data that was really loaded.

Pure, on integers and exact decimals, without torch or Ray, so that it is known, committed and shown before a
single worker exists. It owns no state. Invariant: world size, micro-batches and group size are no inputs, so
no total can depend on them; and a `BudgetResolved` that is returned has at least one optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import NoReturn

import msgspec

from .errors import BudgetRefused
from .events import BudgetResolved
from .schedule import SCHEDULE_KINDS, ScheduleSpec, exact_ratio, warmup_steps_from_ratio

TAILS = ("drop", "train")

PROMPTS_AT_MOST = 1_000_000_000
"""Of one run: the fold holds a byte for each."""


class BudgetInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a budget is made of: the config's keys, and the length of the data after filtering."""

    data_len: int
    epochs: int = 1
    max_prompts: int | None = None
    batch_prompts: int
    minibatches: int = 1
    passes: int = 1
    every_updates: int = 1
    tail: str = "drop"
    max_optimizer_steps: int | None = None
    learning_rate: float
    schedule_kind: str = "cosine"
    warmup_steps: int | None = None
    warmup_ratio: Decimal | str | float | None = None
    min_ratio: float = 0.0
    horizon: int | None = None


def resolve_budget(inputs: BudgetInputs) -> BudgetResolved:
    """Every total, and how it came about. Raises BudgetRefused: both values, the rule, the way out."""
    _refuse_bad_values(inputs)
    lines: list[str] = []

    prompts_available = inputs.data_len * inputs.epochs
    lines.append(f"prompts_available = {inputs.data_len} rows * {inputs.epochs} epochs = {prompts_available}")

    if inputs.max_prompts is None:
        prompts_total = prompts_available
        lines.append(f"prompts_total = prompts_available = {prompts_total} (data.max_prompts is not set)")
    else:
        prompts_total = min(inputs.max_prompts, prompts_available)
        lines.append(f"prompts_total = min({inputs.max_prompts}, {prompts_available}) = {prompts_total}")

    if prompts_total > PROMPTS_AT_MOST:
        _refuse(
            f"prompts_total is {prompts_total}",
            f"a run draws at most {PROMPTS_AT_MOST}",
            "lower data.epochs, or set data.max_prompts",
            prompts_total=prompts_total,
        )

    updates_total = _updates_total(inputs, prompts_total, lines)
    steps_per_update = inputs.minibatches * inputs.passes
    optimizer_steps_total = updates_total * steps_per_update
    lines.append(
        f"optimizer_steps_total = {updates_total} updates * {inputs.minibatches} minibatches"
        f" * {inputs.passes} passes = {optimizer_steps_total}"
    )

    publications_total = -(-updates_total // inputs.every_updates)
    lines.append(
        f"publications_total = ceil({updates_total} updates / {inputs.every_updates}) = {publications_total}"
    )

    prompts_held = min(updates_total * inputs.batch_prompts, prompts_total)
    prompts_unused = prompts_total - prompts_held
    lines.append(f"prompts_unused = {prompts_total} - {prompts_held} that batches hold = {prompts_unused}")
    last_batch_prompts = prompts_held - (updates_total - 1) * inputs.batch_prompts
    if last_batch_prompts < inputs.minibatches:
        _refuse(
            f"the last batch has {last_batch_prompts} prompts and batch.minibatches is {inputs.minibatches}",
            "a minibatch holds at least one prompt",
            "set batch.tail to 'drop', or lower batch.minibatches",
            last_batch_prompts=last_batch_prompts,
            minibatches=inputs.minibatches,
        )

    horizon = _horizon(inputs, optimizer_steps_total, lines)
    warmup_steps = _warmup_steps(inputs, horizon, lines)
    return BudgetResolved(
        data_len=inputs.data_len,
        epochs=inputs.epochs,
        max_prompts=inputs.max_prompts,
        batch_prompts=inputs.batch_prompts,
        minibatches=inputs.minibatches,
        passes=inputs.passes,
        every_updates=inputs.every_updates,
        tail=inputs.tail,
        max_optimizer_steps=inputs.max_optimizer_steps,
        prompts_available=prompts_available,
        prompts_total=prompts_total,
        prompts_unused=prompts_unused,
        updates_total=updates_total,
        optimizer_steps_total=optimizer_steps_total,
        publications_total=publications_total,
        learning_rate=inputs.learning_rate,
        schedule_kind=inputs.schedule_kind,
        horizon=horizon,
        warmup_steps=warmup_steps,
        min_ratio=inputs.min_ratio,
        derivation=lines,
    )


def schedule_of(budget: BudgetResolved) -> ScheduleSpec:
    """The schedule that the budget committed to."""
    return ScheduleSpec(budget.schedule_kind, budget.horizon, budget.warmup_steps, budget.min_ratio)


def prompts_needed(budget: BudgetResolved) -> int:
    """Prompts that batches will hold; no more are generated, unless to replace groups that were dropped."""
    return budget.prompts_total - budget.prompts_unused


def batch_size_of(budget: BudgetResolved, update: int) -> int:
    """Prompts in the batch of an update, from 1. Only a trained tail makes the last one smaller."""
    if not 1 <= update <= budget.updates_total:
        raise ValueError(f"update {update} is outside the budget's 1..{budget.updates_total}")
    return min(budget.batch_prompts, prompts_needed(budget) - (update - 1) * budget.batch_prompts)


def batch_sizes(budget: BudgetResolved) -> Iterator[int]:
    """Prompts in each update's batch, in order."""
    return (batch_size_of(budget, update) for update in range(1, budget.updates_total + 1))


def minibatch_sizes(prompts: int, minibatches: int) -> list[int]:
    """A batch cut into contiguous minibatches as even as possible, larger ones first, in prompts."""
    if not 1 <= minibatches <= prompts:
        raise ValueError(f"{prompts} prompts cannot be cut into {minibatches} minibatches of at least one")
    size, larger = divmod(prompts, minibatches)
    return [size + 1] * larger + [size] * (minibatches - larger)


def is_publication(budget: BudgetResolved, update: int) -> bool:
    """Whether weights are published after an update, from 1: every `every_updates`, and after the last.

    A run that stops short publishes after its own last update as well, which no budget can know.
    """
    if not 1 <= update <= budget.updates_total:
        raise ValueError(f"update {update} is outside the budget's 1..{budget.updates_total}")
    return update % budget.every_updates == 0 or update == budget.updates_total


def _updates_total(inputs: BudgetInputs, prompts_total: int, lines: list[str]) -> int:
    batch_prompts, steps_per_update = inputs.batch_prompts, inputs.minibatches * inputs.passes
    if inputs.tail == "drop":
        updates_total = prompts_total // batch_prompts
        lines.append(f"updates_total = {prompts_total} // {batch_prompts} prompts a batch = {updates_total}")
        if updates_total < 1:
            _refuse(
                f"prompts_total is {prompts_total} and batch.prompts is {batch_prompts}",
                "a run needs prompts for one whole batch",
                "add data or epochs, raise data.max_prompts, lower batch.prompts, or batch.tail = 'train'",
                prompts_total=prompts_total,
                batch_prompts=batch_prompts,
            )
    else:
        updates_total = -(-prompts_total // batch_prompts)
        lines.append(
            f"updates_total = ceil({prompts_total} / {batch_prompts} prompts a batch) = {updates_total}"
        )
    limit = inputs.max_optimizer_steps
    if limit is None:
        return updates_total
    steps_of_data = updates_total * steps_per_update
    if limit >= steps_of_data:
        lines.append(
            f"max_optimizer_steps = {limit} lowers nothing: the data gives {steps_of_data} optimizer steps"
        )
        return updates_total
    allowed = limit // steps_per_update
    if allowed < 1:
        _refuse(
            f"optim.max_optimizer_steps is {limit} and an update takes {inputs.minibatches} minibatches"
            f" * {inputs.passes} passes = {steps_per_update} optimizer steps",
            "a run has at least one whole update",
            f"raise it to {steps_per_update} or more, or lower batch.minibatches or batch.passes",
            max_optimizer_steps=limit,
            steps_per_update=steps_per_update,
        )
    lines.append(
        f"updates_total = min({updates_total}, {limit} // {steps_per_update}) = {allowed}:"
        f" max_optimizer_steps = {limit} lowers it, to whole updates"
        f" ({allowed * steps_per_update} optimizer steps)"
    )
    return allowed


def _horizon(inputs: BudgetInputs, optimizer_steps_total: int, lines: list[str]) -> int:
    if inputs.horizon is None:
        lines.append(f"horizon = optimizer_steps_total = {optimizer_steps_total}")
        return optimizer_steps_total
    if inputs.horizon < optimizer_steps_total:
        _refuse(
            f"optim.schedule.horizon is {inputs.horizon} and the run takes {optimizer_steps_total} steps",
            "a schedule is never shorter than its run",
            f"raise it to {optimizer_steps_total} or more, or leave it unset",
            horizon=inputs.horizon,
            optimizer_steps_total=optimizer_steps_total,
        )
    lines.append(
        f"horizon = {inputs.horizon} as set, of which the run takes {optimizer_steps_total} optimizer steps"
    )
    return inputs.horizon


def _warmup_steps(inputs: BudgetInputs, horizon: int, lines: list[str]) -> int:
    if inputs.warmup_ratio is not None:
        warmup_steps = warmup_steps_from_ratio(inputs.warmup_ratio, horizon)
        lines.append(f"warmup_steps = ceil({exact_ratio(inputs.warmup_ratio)} * {horizon}) = {warmup_steps}")
        return warmup_steps
    warmup_steps = inputs.warmup_steps or 0
    if warmup_steps > horizon:
        _refuse(
            f"optim.schedule.warmup_steps is {warmup_steps} and the horizon is {horizon} optimizer steps",
            "a warm-up ends within the horizon",
            f"lower it to {horizon} or less, or train for longer",
            warmup_steps=warmup_steps,
            horizon=horizon,
        )
    lines.append(f"warmup_steps = {warmup_steps}")
    return warmup_steps


def _refuse_bad_values(inputs: BudgetInputs) -> None:
    """Values that no total can be made of: sentinels, zeros, unknown words, contradictions."""
    if inputs.data_len < 1:
        _refuse(
            f"the data has {inputs.data_len} rows after filtering",
            "a run needs at least 1",
            "check data.source, data.size and data.max_prompt_tokens",
            data_len=inputs.data_len,
        )
    for key, value, least in (
        ("data.epochs", inputs.epochs, 1),
        ("data.max_prompts", inputs.max_prompts, 1),
        ("batch.prompts", inputs.batch_prompts, 1),
        ("batch.minibatches", inputs.minibatches, 1),
        ("batch.passes", inputs.passes, 1),
        ("sync.every_updates", inputs.every_updates, 1),
        ("optim.max_optimizer_steps", inputs.max_optimizer_steps, 1),
        ("optim.schedule.horizon", inputs.horizon, 1),
        ("optim.schedule.warmup_steps", inputs.warmup_steps, 0),
    ):
        if value is not None and value < least:
            _refuse(
                f"{key} is {value}",
                f"it is at least {least}",
                "raise it, or leave it unset",
                key=key,
                value=value,
            )
    for key, word, words in (
        ("batch.tail", inputs.tail, TAILS),
        ("optim.schedule.kind", inputs.schedule_kind, SCHEDULE_KINDS),
    ):
        if word not in words:
            _refuse(
                f"{key} is {word!r}", f"it is one of {', '.join(words)}", "choose one", key=key, value=word
            )
    if inputs.batch_prompts % inputs.minibatches:
        _refuse(
            f"batch.prompts is {inputs.batch_prompts} and batch.minibatches is {inputs.minibatches}",
            "minibatches divide the batch",
            "change one of the two",
            batch_prompts=inputs.batch_prompts,
            minibatches=inputs.minibatches,
        )
    if not (math.isfinite(inputs.learning_rate) and inputs.learning_rate > 0):
        _refuse(
            f"optim.lr is {inputs.learning_rate}",
            "it is finite and above 0",
            "set one such as 1e-6",
            learning_rate=inputs.learning_rate,
        )
    if not 0.0 <= inputs.min_ratio <= 1.0:
        _refuse(
            f"optim.schedule.min_ratio is {inputs.min_ratio}",
            "it is within 0 to 1",
            "0 decays to nothing, 1 does not decay",
            min_ratio=inputs.min_ratio,
        )
    _refuse_bad_warmup_ratio(inputs)


def _refuse_bad_warmup_ratio(inputs: BudgetInputs) -> None:
    if inputs.warmup_ratio is None:
        return
    if inputs.warmup_steps is not None:
        _refuse(
            f"optim.schedule.warmup_steps is {inputs.warmup_steps} and warmup_ratio is {inputs.warmup_ratio}",
            "only one of the two may be set",
            "unset the other",
            warmup_steps=inputs.warmup_steps,
            warmup_ratio=str(inputs.warmup_ratio),
        )
    try:
        exact_ratio(inputs.warmup_ratio)
    except ValueError:
        _refuse(
            f"optim.schedule.warmup_ratio is {inputs.warmup_ratio}",
            "it is a decimal within 0 to 1, a share of the horizon",
            "set it so, or set optim.schedule.warmup_steps",
            warmup_ratio=str(inputs.warmup_ratio),
        )


def _refuse(values: str, rule: str, way_out: str, **facts: object) -> NoReturn:
    raise BudgetRefused(f"{values}: {rule}; {way_out}", **facts)
