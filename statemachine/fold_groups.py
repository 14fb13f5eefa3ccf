"""The fold of groups: admitted, issued again, lost, stored, dropped. Training is `fold_learning`'s.

Each handler checks first and changes after. They are written for speed: a log of a million events is mostly
these, and is read in full at every start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import events as ev
from .fold_parts import ADMITTED, DROPPED, STORED, FileUse, LiveGroup, refuse
from .log import EventRow

if TYPE_CHECKING:
    from .state import RunState


def on_admitted(state: RunState, event: ev.GroupsAdmitted, row: EventRow) -> None:
    """Prompts are drawn in order, at the current version, and only as there is room."""
    groups, drawn, version = event.groups, state.drawn, state.policy_version
    if state.exhausted:
        refuse(row, "the data is exhausted")
    for index, issue in enumerate(groups, drawn):
        if issue.prompt_index != index:
            refuse(row, f"prompts are drawn in order, and the next is {drawn}")
    for issue in groups:
        if issue.attempt != 1 or issue.admission_version != version:
            refuse(row, "a first attempt is admitted at the current policy version")
    if len(groups) > (room := state.room()):
        refuse(row, f"there is room for {room} groups")
    live, fates = state.live, state.fates
    for index in range(drawn, drawn + len(groups)):
        live[index] = LiveGroup(index, 1, version)
        fates[index] = ADMITTED
    state.drawn = drawn + len(groups)


def on_reissued(state: RunState, event: ev.GroupsReissued, row: EventRow) -> None:
    """A new attempt follows the last one, and keeps its admission version unless it was stale."""
    stale = event.reason is ev.IssueReason.STALE
    for issue in event.groups:
        group = state.live.get(issue.prompt_index)
        if group is None:
            refuse(row, f"group {issue.prompt_index} is not live")
        if issue.attempt != group.attempt + 1:
            refuse(
                row, f"attempt {issue.attempt} of group {issue.prompt_index} does not follow {group.attempt}"
            )
        if state.batch is not None:
            _refuse_if_in_batch(state.batch, issue.prompt_index, row)
        version = state.policy_version if stale else group.admission_version
        if issue.admission_version != version:
            refuse(row, f"its admission version is {version}")
    for issue in event.groups:
        group = state.live[issue.prompt_index]
        if group.stored is not None:
            state.files[group.file].leave(0)
        group.stored, group.file = None, ""
        group.attempt = issue.attempt
        group.admission_version = issue.admission_version
        group.under_way = True
        state.fates[issue.prompt_index] = ADMITTED


def on_failed(state: RunState, event: ev.AttemptFailed, row: EventRow) -> None:
    """The attempt that is out is lost."""
    group = state.live.get(event.prompt_index)
    if group is None or group.attempt != event.attempt or group.stored is not None:
        refuse(row, f"attempt {event.attempt} of group {event.prompt_index} is not under way")
    group.under_way = False
    group.failures += 1
    group.last_error = event.error


def on_stored(state: RunState, event: ev.GroupsStored, row: EventRow) -> None:
    """Attempts that are out come to lie in a fresh file."""
    file, groups, live = event.file, event.groups, state.live
    if file in state.files:
        refuse(row, f"file {file} is there already")
    for stored in groups:
        group = live.get(stored.prompt_index)
        if (
            group is None
            or group.attempt != stored.attempt
            or group.stored is not None
            or not group.under_way
        ):
            refuse(row, f"attempt {stored.attempt} of group {stored.prompt_index} is not under way")
    for order, stored in enumerate(groups, row.seq << 16):
        index = stored.prompt_index
        group = live[index]
        group.stored, group.file = stored, file
        group.stored_order = order
        group.under_way = False
        state.fates[index] = STORED
    state.groups_stored_ever += len(groups)
    state.files[file] = FileUse(len(groups))


def on_dropped(state: RunState, event: ev.GroupsDropped, row: EventRow) -> None:
    """Groups leave untrained; as unused, all that there are at once."""
    live, rest = state.live, event.reason is ev.DropReason.UNUSED
    for prompt_index in event.prompt_indices:
        if prompt_index not in live:
            refuse(row, f"group {prompt_index} is not live")
        if state.batch is not None:
            _refuse_if_in_batch(state.batch, prompt_index, row)
    if rest and sorted(event.prompt_indices) != sorted(live):
        refuse(row, "what is left over is dropped all at once")
    for prompt_index in event.prompt_indices:
        group = live.pop(prompt_index)
        if group.stored is not None:
            state.files[group.file].leave(0)
        state.fates[prompt_index] = DROPPED
    state.groups_dropped += len(event.prompt_indices)
    state.exhausted = state.exhausted or rest


def _refuse_if_in_batch(batch: ev.UpdateBegan, prompt_index: int, row: EventRow) -> None:
    if any(index == prompt_index for index, _ in batch.groups):
        refuse(row, f"group {prompt_index} is in the batch of update {batch.update}, which has begun")


def on_answer_refused(state: RunState, event: ev.AnswerRefused, row: EventRow) -> None:
    """A late answer changes nothing."""


HANDLERS: dict[str, Callable[[RunState, Any, EventRow], None]] = {
    "GroupsAdmitted": on_admitted,
    "GroupsReissued": on_reissued,
    "AttemptFailed": on_failed,
    "GroupsStored": on_stored,
    "GroupsDropped": on_dropped,
    "AnswerRefused": on_answer_refused,
}
