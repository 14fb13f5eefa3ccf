"""Admission: which groups are generated next, and which make the next batch. Pure questions to the fold.

Under `on_stale = "wait"` a batch is the next surviving groups in draw order, so a group admitted at version
a is trained at version a + max_staleness at the latest, whatever the timing. Under `"reissue"` a batch is
the first groups that are ready, and a group that the next publication would push over the bound is issued
again at the current version.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import islice

import msgspec

from .budget import batch_size_of
from .events import Issue, IssueReason
from .state import LiveGroup, RunState


class Batch(msgspec.Struct, frozen=True):
    """The next update's groups, all stored; in training order."""

    update: int
    groups: list[LiveGroup]


class Waiting(msgspec.Struct, frozen=True):
    """The next batch is not whole yet."""

    prompt_indices: list[int]  # what it waits for, as far as that is known


class Blocked(msgspec.Struct, frozen=True):
    """The next batch needs a group that has used up its attempts."""

    prompt_index: int
    failures: int
    error: str


class Exhausted(msgspec.Struct, frozen=True):
    """No further batch can form."""

    because: str


def next_batch(state: RunState, max_attempts: int) -> Batch | Waiting | Blocked | Exhausted:
    """What the learner can do next."""
    total = state.total
    if state.updates >= total.updates_total:
        return Exhausted("every update of the budget is done")
    size = batch_size_of(total, state.updates + 1)
    more_to_come = state.drawn < total.prompts_total and not state.exhausted
    if state.config["sync"]["on_stale"] == "reissue":
        candidates = sorted(
            (group for group in state.live.values() if group.stored is not None),
            key=lambda group: group.stored_order,
        )
        unready = [group for group in state.live.values() if group.stored is None]
        unready.sort(key=lambda group: is_spent(group, max_attempts))  # blocked only by nothing else
        chosen = candidates[:size]
        if len(chosen) < size:
            chosen += unready[: size - len(chosen)]
    else:
        chosen = [group for group, _ in zip(state.live.values(), range(size), strict=False)]
    if len(chosen) < size:
        if more_to_come:
            return Waiting([g.prompt_index for g in chosen if g.stored is None])
        if total.tail != "train" or len(chosen) < total.minibatches:
            return Exhausted(
                f"{len(chosen)} groups are left of {state.drawn} drawn, a batch needs {size}, "
                f"and no prompt is left to draw"
            )
    for group in chosen:
        if group.stored is None and is_spent(group, max_attempts):
            return Blocked(group.prompt_index, group.failures, group.last_error)
    missing = [group.prompt_index for group in chosen if group.stored is None]
    return Waiting(missing) if missing else Batch(state.updates + 1, chosen)


def completes_batch(state: RunState, arrived: Set[int]) -> bool:
    """Whether these prompts' answers are the last that the batch after the one begun, if any, waits for."""
    size = batch_size_of(
        state.total, min(state.updates + 1 + (state.batch is not None), state.total.updates_total)
    )
    begun = {index for index, _ in state.batch.groups} if state.batch is not None else set[int]()
    free = (group for group in state.live.values() if group.prompt_index not in begun)
    if state.config["sync"]["on_stale"] == "reissue":
        stored = sum(group.stored is not None for group in free)
        return stored < size <= stored + len(arrived)
    missing = {group.prompt_index for group in islice(free, size) if group.stored is None}
    return bool(missing) and missing <= arrived


def is_spent(group: LiveGroup, max_attempts: int) -> bool:
    """Whether the group has used up its attempts in this incarnation."""
    return not group.under_way and group.failures >= max_attempts


def reissues(state: RunState, slots: int, max_attempts: int) -> dict[IssueReason, list[Issue]]:
    """Groups without an attempt under way, in draw order, at most `slots`; by the reason of it."""
    issues: dict[IssueReason, list[Issue]] = {}
    for group in state.live.values():
        if slots <= 0:
            break
        if group.stored is not None or group.under_way or is_spent(group, max_attempts):
            continue
        reason = IssueReason.FAILED if group.failures else IssueReason.INCARNATION
        issues.setdefault(reason, []).append(
            Issue(group.prompt_index, group.attempt + 1, group.admission_version)
        )
        slots -= 1
    return issues


def admissions(state: RunState, slots: int, policy_version: int | None = None) -> list[Issue]:
    """Prompts to draw for the first time, at most `slots`; at the current version, or the one about to be."""
    version = state.policy_version if policy_version is None else policy_version
    count = max(0, min(slots, state.room(version)))
    return [Issue(index, 1, version) for index in range(state.drawn, state.drawn + count)]


def stale_after_publication(state: RunState) -> list[Issue]:
    """Under `"reissue"`: groups that would be over the bound at the next version, as new attempts.

    Asked right after a publication: a group whose oldest token is `max_staleness` versions old now would be
    refused after one more. In-flight groups count by the version they were admitted at.
    """
    if state.config["sync"]["on_stale"] != "reissue":
        return []
    bound = int(state.config["sync"]["max_staleness"])
    return [
        Issue(group.prompt_index, group.attempt + 1, state.policy_version)
        for group in state.live.values()
        if state.policy_version - group.oldest_version > bound
    ]
