"""The fold: a run's state is what its events add up to, and nothing else.

`RunState.apply` takes one row at a time, in order, and is the only thing that changes a state; what each
event does to it stands in `fold_lives`, `fold_groups`, `fold_learning` and `fold_storage`. Each handler
checks first and changes after, so an event that is not legal leaves the state as it was. Driver, learner
ranks, readers and tests all fold the same rows with this one class.
"""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, cast

from . import events as ev
from . import fold_groups, fold_learning, fold_lives, fold_storage
from .budget import batch_size_of, minibatch_sizes, prompts_needed
from .errors import IllegalEvent, LogBroken
from .events import decode
from .fold_parts import FATES, FileUse, LiveGroup, UpdateRecord, refuse
from .log import EventRow
from .phases import CLOSED, ENDED, MOVES_BY_EVENT, Phase, destination
from .schedule import ScheduleSpec


class RunState:
    """The state of a run at `seq`."""

    def __init__(self, *, every_record: bool = False) -> None:
        self.every_record = every_record  # keep the records that kept checkpoints cover, too
        self.seq: int = 0
        self.hash: str = ""
        self.time: str = ""
        self.incarnation = 0
        self.phase = Phase.CREATED
        self.created: ev.RunCreated | None = None
        self.budget: ev.BudgetResolved | None = None
        self.schedule: ScheduleSpec | None = None
        self.end: ev.Event | None = None
        self.learner_try = 0
        self.fingerprint: dict[str, str] = {}
        self.accept_divergence = False
        # groups
        self.drawn = 0  # prompts drawn; the next prompt_index
        self.fates = bytearray()  # by prompt_index
        self.live: dict[int, LiveGroup] = {}  # in draw order
        self.groups_trained = 0
        self.groups_dropped = 0
        self.groups_stored_ever = 0
        self.exhausted = False  # the rest was dropped as unused: no further batch can form
        # learning
        self.batch: ev.UpdateBegan | None = None
        self.updates = 0
        self.optimizer_steps = 0
        self.optimizer_steps_applied = 0
        self.policy_version = 0
        self.published_update = 0
        self.published_digest = ""
        self.update_of_version: list[int] = [0]
        self.evaluations: dict[int, ev.EvaluationDone] = {}
        # files
        self.records: dict[int, UpdateRecord] = {}  # by update; those after the oldest kept checkpoint
        self.checkpoints: dict[int, ev.CheckpointCommitted] = {}  # kept ones, by update
        self.files: dict[str, FileUse] = {}
        self.redone_elsewhere: list[int] = []  # seqs of redos on another execution than was recorded

    # -- questions ------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config. Raises LogBroken before the first event."""
        if self.created is None:
            raise LogBroken("the log is empty: it has no RunCreated", seq=0)
        return self.created.config

    @property
    def total(self) -> ev.BudgetResolved:
        """The committed budget. Raises IllegalEvent where there is none yet."""
        if self.budget is None:
            raise IllegalEvent("there is no committed budget yet", seq=self.seq, event="")
        return self.budget

    @property
    def ended(self) -> bool:
        """The last incarnation has ended, one way or another."""
        return self.phase in ENDED

    @property
    def closed(self) -> bool:
        """The run is over for good: completed, or stopped short."""
        return self.phase in CLOSED

    @property
    def updates_unpublished(self) -> int:
        """Updates since the last publication."""
        return self.updates - self.published_update

    @property
    def survivors(self) -> int:
        """Groups admitted and not dropped."""
        return self.drawn - self.groups_dropped

    def publication_due_after(self, updates: int) -> bool:
        """Whether the weights after `updates` updates must be published before the next one."""
        since = updates - self.published_update
        total = self.total
        return since > 0 and (
            since >= total.every_updates or updates >= total.updates_total or self.exhausted
        )

    def version_at(self, update: int) -> int:
        """The policy version once `update` was published, or the last one before it."""
        return bisect_right(self.update_of_version, update) - 1

    def is_stored(self, prompt_index: int, attempt: int) -> bool:
        """Whether this attempt of the group is in the store, untrained."""
        group = self.live.get(prompt_index)
        return group is not None and group.stored is not None and group.attempt == attempt

    def latest_checkpoint(self) -> ev.CheckpointCommitted | None:
        """The last committed checkpoint, or none: the initial weights."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    def evaluation_due(self) -> bool:
        """Whether the served policy version must be evaluated and is not yet."""
        every = self.config["eval"]["every_updates"]
        if not every or self.policy_version in self.evaluations:
            return False
        if self.policy_version == 0 or self._no_update_follows(self.published_update):
            return True
        before = self.update_of_version[self.policy_version - 1]
        return self.published_update // every > before // every

    def _no_update_follows(self, update: int) -> bool:
        return update >= self.total.updates_total or (self.exhausted and update == self.updates)

    def room(self, policy_version: int | None = None) -> int:
        """Groups that may be admitted: the staleness window and the budget's need, less those there are.

        At the current policy version, or at one that is about to be published.

        With b = max_staleness, v = policy version, S = every_updates, R = batch prompts:
        at most (b + v + 1) * S * R groups, never more than the budget needs, admitted and not dropped.
        """
        total = self.total
        bound = int(self.config["sync"]["max_staleness"])
        version = self.policy_version if policy_version is None else policy_version
        window = (bound + version + 1) * total.every_updates * total.batch_prompts
        at_most = min(window, prompts_needed(total)) - self.survivors
        return max(0, min(at_most, total.prompts_total - self.drawn))

    def covered_update(self) -> int:
        """Every update up to this one is in each kept checkpoint. 0 with none."""
        return min(self.checkpoints) if self.checkpoints else 0

    def redone_elsewhere_between(self, seq: int, record_seq: int) -> bool:
        """Whether the weights that a recorded update began with may differ, in their last bits, from what
        the records since `seq` give: a redo in between ran on another execution."""
        return any(seq < redone < record_seq for redone in self.redone_elsewhere)

    def retirable(self, keep: int) -> tuple[list[ev.CheckpointCommitted], list[str]]:
        """Checkpoints beyond the newest `keep`, and group files that all kept ones cover.

        While there are fewer than `keep`, the starting weights stand in for one: a damaged checkpoint costs
        time then as well, not the run.
        """
        updates = list(self.checkpoints)
        old = [self.checkpoints[update] for update in updates[: max(0, len(updates) - keep)]]
        kept = updates[len(old) :]
        covered = kept[0] if len(kept) >= keep else 0
        if self.config["groups"]["keep"] == "all":
            return old, []
        files = [name for name, use in self.files.items() if use.waiting == 0 and use.last_update <= covered]
        return old, files

    def groups_by_fate(self) -> dict[str, int]:
        """How many groups are in each fate now."""
        fates = self.fates
        return {name: fates.count(fate) for fate, name in FATES.items()}

    def digest(self) -> str:
        """One value that two folds of the same rows share."""
        counters = (
            self.seq,
            self.hash,
            self.incarnation,
            self.updates,
            self.optimizer_steps,
            self.policy_version,
            self.drawn,
            self.groups_trained,
        )
        return hashlib.sha256(repr(counters).encode()).hexdigest()

    # -- the fold -------------------------------------------------------------------------------------

    def copy(self) -> RunState:
        """The same state, which folds on by itself: nothing that the fold changes is shared."""
        other = RunState()
        for name, value in vars(self).items():
            setattr(other, name, _apart(value))
        return other

    def apply(self, row: EventRow, event: ev.Event | None = None) -> ev.Event:
        """Fold one row. Raises LogBroken (not the next row) and IllegalEvent (not legal here)."""
        seq, kind = row.seq, row.type
        if seq != self.seq + 1:
            due = self.seq + 1
            raise LogBroken(f"event {due} is missing: event {seq} follows {self.seq}", seq=due)
        if event is None:
            event = decode(kind, row.schema, row.payload, seq=seq)
        if row.incarnation != self.incarnation and kind not in ("IncarnationBegan", "RunCreated"):
            refuse(
                row,
                f"it carries incarnation {row.incarnation}, and incarnation {self.incarnation} holds the run",
            )
        phase = self.phase
        if phase in ENDED and (phase in CLOSED or kind != "IncarnationBegan"):
            refuse(row, f"the run is {phase}")
        if kind in MOVES_BY_EVENT and self.created is not None:
            phase = destination(self, event)
        _HANDLERS[kind](self, event, row)
        self.phase = phase
        self.seq, self.hash, self.time = seq, row.hash, row.time
        return event


_HANDLERS: dict[str, Callable[[RunState, Any, EventRow], None]] = {
    **fold_lives.HANDLERS,
    **fold_groups.HANDLERS,
    **fold_learning.HANDLERS,
    **fold_storage.HANDLERS,
}
"""By the type that a row names. Each checks first and changes after."""


def _apart(value: Any) -> Any:
    """A copy of what the fold changes in place; all else stands for itself."""
    if isinstance(value, dict):
        held = cast(dict[Any, Any], value)
        return {k: copy.copy(one) if isinstance(one, LiveGroup | FileUse) else one for k, one in held.items()}
    return copy.copy(cast(Any, value)) if isinstance(value, list | bytearray) else value


def fold(rows: Iterable[EventRow], state: RunState | None = None) -> RunState:
    """Fold rows into a state, a new one unless given."""
    state = RunState() if state is None else state
    for row in rows:
        state.apply(row)
    return state


def update_shape(budget: ev.BudgetResolved, update: int) -> list[int]:
    """Prompts of each minibatch of an update, in order."""
    return minibatch_sizes(batch_size_of(budget, update), budget.minibatches)
