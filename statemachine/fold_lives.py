"""The fold of a run's lives: creation, incarnations, the budget, learner tries, and how it ended.

Each handler checks first and changes after; which of them may come when is the phases' table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from . import events as ev
from .budget import schedule_of
from .fold_parts import refuse
from .log import EventRow

if TYPE_CHECKING:
    from .state import RunState


def on_created(state: RunState, event: ev.RunCreated, row: EventRow) -> None:
    """The first event, and no other."""
    if row.seq != 1:
        refuse(row, "it is not the first event")
    state.created = event


def on_incarnation(state: RunState, event: ev.IncarnationBegan, row: EventRow) -> None:
    """The next driver holds the run: what was being generated must be issued again."""
    if not event.incarnation == row.incarnation == state.incarnation + 1:
        refuse(row, f"incarnation {event.incarnation} does not follow {state.incarnation}")
    assert state.created is not None
    if event.config_changes or event.digest_changes:
        state.created = with_changes(state.created, event)
    state.incarnation = event.incarnation
    state.accept_divergence = event.accept_divergence
    state.end = None
    state.batch = None
    state.learner_try = 1
    for group in state.live.values():
        group.failures = 0
        if group.stored is None:
            group.under_way = False


def with_changes(created: ev.RunCreated, began: ev.IncarnationBegan) -> ev.RunCreated:
    """The first event with the config and the digests as an incarnation changed them."""
    config = msgspec.json.decode(msgspec.json.encode(created.config))
    for key, (_, new) in began.config_changes.items():
        node = config
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})  # a table that has come to be since the run began
        node[leaf] = new
    digests = created.digests | {name: new for name, (_, new) in began.digest_changes.items()}
    return msgspec.structs.replace(created, config=config, digests=digests)


def on_budget(state: RunState, event: ev.BudgetResolved, row: EventRow) -> None:
    """Every total is known from here on."""
    state.budget = event
    state.schedule = schedule_of(event)
    state.fates = bytearray(event.prompts_total)


def on_ready(state: RunState, event: ev.WorkersReady, row: EventRow) -> None:
    """The workers of this learner try are up."""
    if event.learner_try != state.learner_try:
        refuse(row, "it is of another learner try")
    state.fingerprint = event.fingerprint


def on_worker_replaced(state: RunState, event: ev.WorkerReplaced, row: EventRow) -> None:
    """A rollout worker changes nothing of the run."""


def on_learner_lost(state: RunState, event: ev.LearnerLost, row: EventRow) -> None:
    """The learner is built again, as the next try; the open batch was not trained."""
    if event.learner_try != state.learner_try:
        refuse(row, "it is of another learner try")
    state.learner_try += 1
    state.batch = None


def on_completed(state: RunState, event: ev.RunCompleted, row: EventRow) -> None:
    """Every group has met its fate."""
    if state.live:
        refuse(row, f"groups {sorted(state.live)[:5]} are neither trained nor dropped")
    state.end = event


def on_stopped(state: RunState, event: ev.RunStopped, row: EventRow) -> None:
    """The run is over, short of its budget."""
    state.end = event


def on_broken_off(state: RunState, event: ev.RunPreempted | ev.RunFailed, row: EventRow) -> None:
    """This incarnation is over; the open batch was not trained."""
    state.batch = None
    state.end = event


HANDLERS: dict[str, Callable[[RunState, Any, EventRow], None]] = {
    "RunCreated": on_created,
    "IncarnationBegan": on_incarnation,
    "BudgetResolved": on_budget,
    "WorkersReady": on_ready,
    "WorkerReplaced": on_worker_replaced,
    "LearnerLost": on_learner_lost,
    "RunCompleted": on_completed,
    "RunStopped": on_stopped,
    "RunPreempted": on_broken_off,
    "RunFailed": on_broken_off,
}
