"""The fold of learning: batches, updates with their optimizer steps, publications, evaluations.

Each handler checks first and changes after. `on_update_applied` is the exactly-once point: what it does not
refuse has been trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import events as ev
from .fold_parts import TRAINED, UpdateRecord, refuse
from .log import EventRow
from .schedule import multiplier

if TYPE_CHECKING:
    from .state import RunState


def on_update_began(state: RunState, event: ev.UpdateBegan, row: EventRow) -> None:
    """The phases' table has seen to it that the batch is stored."""
    state.batch = event


def on_update_applied(state: RunState, event: ev.UpdateApplied, row: EventRow) -> None:
    """The batch that began is trained, at the schedule's rates and within the bound."""
    _check_update(state, event, row)
    update, live, files, fates = event.update, state.live, state.files, state.fates
    places: list[tuple[str, ev.StoredGroup]] = []
    for prompt_index, _ in event.groups:
        group = live.pop(prompt_index)
        file, stored = group.file, group.stored
        assert stored is not None
        places.append((file, stored))
        files[file].leave(update)
        fates[prompt_index] = TRAINED
    state.records[update] = UpdateRecord(row.seq, event, tuple(places), state.fingerprint)
    state.groups_trained += len(event.groups)
    state.updates = update
    state.optimizer_steps += len(event.steps)
    for step in event.steps:
        state.optimizer_steps_applied += step.applied
    state.batch = None


def _check_update(state: RunState, event: ev.UpdateApplied, row: EventRow) -> None:
    total, schedule = state.total, state.schedule
    assert schedule is not None
    if event.update != state.updates + 1:
        refuse(row, f"the next update is {state.updates + 1}")
    if event.learner_try != state.learner_try:
        refuse(row, "it is of another learner try")
    if state.batch is None or event.groups != state.batch.groups:
        refuse(row, "its groups are not the batch that began")
    if event.policy_version != state.policy_version:
        refuse(row, "it is of another policy version")
    first, needed = state.optimizer_steps, total.minibatches * total.passes
    if [step.optimizer_step for step in event.steps] != list(range(first, first + needed)):
        refuse(row, f"it needs {needed} optimizer steps from {first}")
    for step in event.steps:
        rate = total.learning_rate * multiplier(schedule, step.optimizer_step)
        if step.learning_rate != rate:
            refuse(
                row,
                f"the learning rate of optimizer step {step.optimizer_step} is {step.learning_rate}, "
                f"the schedule's is {rate}",
            )
    bound, version, live = int(state.config["sync"]["max_staleness"]), state.policy_version, state.live
    looked_at: list[int] | None = None
    for prompt_index, _ in event.groups:
        group = live[prompt_index]
        if group.stored is not None and group.stored.oldest_versions == looked_at:
            continue  # most groups of a batch are of the same versions, and to compare is cheaper than min()
        if (staleness := version - group.oldest_version) > bound:
            refuse(row, f"group {prompt_index} is {staleness} versions old, the bound is {bound}")
        looked_at = group.stored and group.stored.oldest_versions


def on_published(state: RunState, event: ev.WeightsPublished, row: EventRow) -> None:
    """The phases' table has seen to it that this is the last update, as the next version."""
    state.policy_version = event.version
    state.published_update = event.update
    state.published_digest = event.digest
    state.update_of_version.append(event.update)


def on_remade(state: RunState, event: ev.WeightsRemade, row: EventRow) -> None:
    """The served version has another digest on another execution."""
    if event.version != state.policy_version:
        refuse(row, "only the served version can be made again")
    state.published_digest = event.digest


def on_evaluated(state: RunState, event: ev.EvaluationDone, row: EventRow) -> None:
    """The served version has been evaluated."""
    if event.policy_version != state.policy_version:
        refuse(row, "that version is not served")
    state.evaluations[event.policy_version] = event


HANDLERS: dict[str, Callable[[RunState, Any, EventRow], None]] = {
    "UpdateBegan": on_update_began,
    "UpdateApplied": on_update_applied,
    "WeightsPublished": on_published,
    "WeightsRemade": on_remade,
    "EvaluationDone": on_evaluated,
}
