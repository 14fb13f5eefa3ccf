"""The fold of what lies on disk: checkpoints, redo from them, files that may be deleted.

Each handler checks first and changes after. Invariant: `checkpoints` and `records` are in the order of their
updates, so what a checkpoint covers stands at the front.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from . import events as ev
from .fold_parts import refuse
from .log import EventRow
from .phases import Phase

if TYPE_CHECKING:
    from .state import RunState


def on_redone(state: RunState, event: ev.UpdatesRedone, row: EventRow) -> None:
    """Recorded updates were executed again, before the workers are ready."""
    if state.phase is not Phase.INIT_WORKERS or event.last_update != state.updates:
        refuse(row, "a redo ends at the last recorded update, before the workers are ready")
    if not event.same_execution:
        state.redone_elsewhere.append(row.seq)


def on_checkpoint(state: RunState, event: ev.CheckpointCommitted, row: EventRow) -> None:
    """From here on there is a checkpoint of a recorded update."""
    total = state.total
    if (
        not 0 < event.update <= state.updates
        or event.optimizer_steps != event.update * total.minibatches * total.passes
    ):
        refuse(row, f"update {event.update} with {event.optimizer_steps} optimizer steps is not in the log")
    newest = next(reversed(state.checkpoints), 0)
    state.checkpoints[event.update] = event
    if event.update < newest:  # made again during a redo
        state.checkpoints = dict(sorted(state.checkpoints.items()))


def on_checkpoint_lost(state: RunState, event: ev.CheckpointLost, row: EventRow) -> None:
    """A checkpoint cannot be used."""
    if event.update not in state.checkpoints:
        refuse(row, f"there is no checkpoint of update {event.update}")
    del state.checkpoints[event.update]


def on_retired(state: RunState, event: ev.FilesRetired, row: EventRow) -> None:
    """Old checkpoints, and group files that every checkpoint still kept covers, may be deleted."""
    paths = {checkpoint.path: update for update, checkpoint in state.checkpoints.items()}
    for path in event.checkpoints:
        if path not in paths:
            refuse(row, f"checkpoint {path} is not a kept one")
    kept = [update for path, update in paths.items() if path not in event.checkpoints]
    if event.checkpoints and not kept:
        refuse(row, "the last checkpoint is never retired")
    covered, files = min(kept, default=0), state.files
    for name in event.group_files:
        use = files.get(name)
        if use is None or use.waiting != 0 or use.last_update > covered:
            refuse(row, f"file {name} may still be needed")
    for path in event.checkpoints:
        del state.checkpoints[paths[path]]
    for name in event.group_files:
        del files[name]
    if not state.every_record:
        for update in list(takewhile(covered.__ge__, state.records)):
            del state.records[update]


HANDLERS: dict[str, Callable[[RunState, Any, EventRow], None]] = {
    "UpdatesRedone": on_redone,
    "CheckpointCommitted": on_checkpoint,
    "CheckpointLost": on_checkpoint_lost,
    "FilesRetired": on_retired,
}
