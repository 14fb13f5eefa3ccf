"""The fold: a run's state is what its events add up to, and nothing else.

`RunState.apply` takes one row at a time, in order, and is the only thing that changes a state. Each handler
checks first and changes after, so an event that is not legal leaves the state as it was. Driver, learner
ranks, readers and tests all fold the same rows with this one class.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgspec

from . import events as ev
from .budget import batch_size_of, minibatch_sizes, prompts_needed, schedule_of
from .errors import IllegalEvent, LogBroken
from .log import EventRow
from .phases import CLOSED, ENDED, Phase, destination
from .schedule import ScheduleSpec, multiplier

ADMITTED, STORED, TRAINED, DROPPED = 1, 2, 3, 4
FATES = {ADMITTED: "admitted", STORED: "stored", TRAINED: "trained", DROPPED: "dropped"}


class LiveGroup(msgspec.Struct):
    """A group that is admitted or stored, not yet trained or dropped."""

    prompt_index: int
    attempt: int
    admission_version: int
    under_way: bool = True  # an attempt is out; else one must be issued
    failures: int = 0  # attempts lost to raised work or dead workers, in this incarnation
    last_error: str = ""
    stored: ev.StoredGroup | None = None
    file: str = ""
    stored_order: int = 0

    @property
    def oldest_version(self) -> int:
        """Version of its oldest token, or what it will be at least."""
        return min(self.stored.oldest_versions) if self.stored else self.admission_version


class UpdateRecord(msgspec.Struct, frozen=True):
    """One recorded update: its event, where its groups lie, and the execution that made it."""

    seq: int
    event: ev.UpdateApplied
    places: tuple[tuple[str, ev.StoredGroup], ...]  # file, group; in training order
    fingerprint: dict[str, str]


class FileUse(msgspec.Struct):
    """A group file: how many of its groups may still be trained, and the last update that used it."""

    waiting: int
    last_update: int = 0


class RunState:
    """The state of a run at `seq`."""

    def __init__(self) -> None:
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
        self.records: dict[int, UpdateRecord] = {}  # updates after the oldest kept checkpoint
        self.checkpoints: dict[int, ev.CheckpointCommitted] = {}  # kept ones, by update
        self.files: dict[str, FileUse] = {}
        self._handlers: dict[str, Callable[[Any, EventRow], None]] = {
            name: getattr(self, f"_on_{name}") for name in ev.EVENT_TYPES
        }

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

    def apply(self, row: EventRow, event: ev.Event | None = None) -> ev.Event:
        """Fold one row. Raises LogBroken (not the next row) and IllegalEvent (not legal here)."""
        if row.seq != self.seq + 1:
            raise LogBroken(
                f"event {self.seq + 1} is missing: event {row.seq} follows {self.seq}", seq=self.seq + 1
            )
        if event is None:
            event = row.event()
        if row.incarnation != self.incarnation and row.type not in ("IncarnationBegan", "RunCreated"):
            self._refuse(
                row,
                f"it carries incarnation {row.incarnation}, and incarnation {self.incarnation} holds the run",
            )
        if self.closed:
            self._refuse(row, f"the run is {self.phase}")
        phase = destination(self, event) if self.created else self.phase
        self._handlers[row.type](event, row)
        self.phase = phase
        self.seq, self.hash, self.time = row.seq, row.hash, row.time
        return event

    def _refuse(self, row: EventRow, why: str) -> NoReturn:
        raise IllegalEvent(f"event {row.seq}: {row.type} is not legal: {why}", seq=row.seq, event=row.type)

    def _need(self, holds: bool, row: EventRow, why: str) -> None:
        if not holds:
            self._refuse(row, why)

    def _on_RunCreated(self, event: ev.RunCreated, row: EventRow) -> None:
        self._need(row.seq == 1, row, "it is not the first event")
        self.created = event

    def _on_IncarnationBegan(self, event: ev.IncarnationBegan, row: EventRow) -> None:
        self._need(
            event.incarnation == row.incarnation == self.incarnation + 1,
            row,
            f"incarnation {event.incarnation} does not follow {self.incarnation}",
        )
        assert self.created is not None
        if event.config_changes:
            self.created = _with_changes(self.created, event.config_changes)
        self.incarnation = event.incarnation
        self.accept_divergence = event.accept_divergence
        self.end = None
        self.batch = None
        self.learner_try = 1
        for group in self.live.values():
            group.failures = 0
            if group.stored is None:
                group.under_way = False

    def _on_BudgetResolved(self, event: ev.BudgetResolved, row: EventRow) -> None:
        self.budget = event
        self.schedule = schedule_of(event)
        self.fates = bytearray(event.prompts_total)

    def _on_WorkersReady(self, event: ev.WorkersReady, row: EventRow) -> None:
        self._need(event.learner_try == self.learner_try, row, "it is of another learner try")
        self.fingerprint = event.fingerprint

    def _on_UpdatesRedone(self, event: ev.UpdatesRedone, row: EventRow) -> None:
        self._need(
            self.phase is Phase.INIT_WORKERS and event.last_update == self.updates,
            row,
            "a redo ends at the last recorded update, before the workers are ready",
        )

    def _on_GroupsAdmitted(self, event: ev.GroupsAdmitted, row: EventRow) -> None:
        self._need(not self.exhausted, row, "the data is exhausted")
        self._need(
            [issue.prompt_index for issue in event.groups]
            == list(range(self.drawn, self.drawn + len(event.groups))),
            row,
            f"prompts are drawn in order, and the next is {self.drawn}",
        )
        self._need(
            all(i.attempt == 1 and i.admission_version == self.policy_version for i in event.groups),
            row,
            "a first attempt is admitted at the current policy version",
        )
        self._need(len(event.groups) <= self.room(), row, f"there is room for {self.room()} groups")
        for issue in event.groups:
            self.live[issue.prompt_index] = LiveGroup(
                issue.prompt_index, issue.attempt, issue.admission_version
            )
            self.fates[issue.prompt_index] = ADMITTED
        self.drawn += len(event.groups)

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
        return max(
            0,
            min(
                min(window, prompts_needed(total)) - self.survivors,
                total.prompts_total - self.drawn,
            ),
        )

    def _on_GroupsReissued(self, event: ev.GroupsReissued, row: EventRow) -> None:
        for issue in event.groups:
            group = self.live.get(issue.prompt_index)
            self._need(group is not None, row, f"group {issue.prompt_index} is not live")
            assert group is not None
            self._need(
                issue.attempt == group.attempt + 1,
                row,
                f"attempt {issue.attempt} of group {issue.prompt_index} does not follow {group.attempt}",
            )
            version = self.policy_version if event.reason is ev.IssueReason.STALE else group.admission_version
            self._need(issue.admission_version == version, row, f"its admission version is {version}")
        for issue in event.groups:
            group = self.live[issue.prompt_index]
            if group.stored is not None:
                self._leave_file(group.file, 0)
            group.stored, group.file = None, ""
            group.attempt = issue.attempt
            group.admission_version = issue.admission_version
            group.under_way = True
            self.fates[issue.prompt_index] = ADMITTED

    def _on_AttemptFailed(self, event: ev.AttemptFailed, row: EventRow) -> None:
        group = self.live.get(event.prompt_index)
        self._need(
            group is not None and group.attempt == event.attempt and group.stored is None,
            row,
            f"attempt {event.attempt} of group {event.prompt_index} is not under way",
        )
        assert group is not None
        group.under_way = False
        group.failures += 1
        group.last_error = event.error

    def _on_GroupsStored(self, event: ev.GroupsStored, row: EventRow) -> None:
        self._need(event.file not in self.files, row, f"file {event.file} is there already")
        for stored in event.groups:
            group = self.live.get(stored.prompt_index)
            self._need(
                group is not None
                and group.attempt == stored.attempt
                and group.stored is None
                and group.under_way,
                row,
                f"attempt {stored.attempt} of group {stored.prompt_index} is not under way",
            )
        for place, stored in enumerate(event.groups):
            group = self.live[stored.prompt_index]
            group.stored, group.file = stored, event.file
            group.stored_order = (row.seq << 16) + place
            group.under_way = False
            self.fates[stored.prompt_index] = STORED
        self.groups_stored_ever += len(event.groups)
        self.files[event.file] = FileUse(waiting=len(event.groups))

    def _on_GroupsDropped(self, event: ev.GroupsDropped, row: EventRow) -> None:
        for prompt_index in event.prompt_indices:
            self._need(prompt_index in self.live, row, f"group {prompt_index} is not live")
        rest = event.reason is ev.DropReason.UNUSED
        self._need(
            not rest or sorted(event.prompt_indices) == sorted(self.live),
            row,
            "what is left over is dropped all at once",
        )
        for prompt_index in event.prompt_indices:
            group = self.live.pop(prompt_index)
            if group.stored is not None:
                self._leave_file(group.file, 0)
            self.fates[prompt_index] = DROPPED
        self.groups_dropped += len(event.prompt_indices)
        self.exhausted = self.exhausted or rest

    def _on_AnswerRefused(self, event: ev.AnswerRefused, row: EventRow) -> None:
        pass

    def _on_UpdateBegan(self, event: ev.UpdateBegan, row: EventRow) -> None:
        self.batch = event

    def _on_UpdateApplied(self, event: ev.UpdateApplied, row: EventRow) -> None:
        total, schedule = self.total, self.schedule
        assert schedule is not None
        self._need(event.update == self.updates + 1, row, f"the next update is {self.updates + 1}")
        self._need(event.learner_try == self.learner_try, row, "it is of another learner try")
        self._need(
            self.batch is not None and event.groups == self.batch.groups,
            row,
            "its groups are not the batch that began",
        )
        self._need(event.policy_version == self.policy_version, row, "it is of another policy version")
        self._need(
            [step.optimizer_step for step in event.steps]
            == list(range(self.optimizer_steps, self.optimizer_steps + total.minibatches * total.passes)),
            row,
            f"it needs {total.minibatches * total.passes} optimizer steps from {self.optimizer_steps}",
        )
        for step in event.steps:
            rate = total.learning_rate * multiplier(schedule, step.optimizer_step)
            self._need(
                step.learning_rate == rate,
                row,
                f"the learning rate of optimizer step {step.optimizer_step} is {step.learning_rate}, "
                f"the schedule's is {rate}",
            )
        bound = int(self.config["sync"]["max_staleness"])
        for prompt_index, _ in event.groups:
            staleness = self.policy_version - self.live[prompt_index].oldest_version
            self._need(
                staleness <= bound,
                row,
                f"group {prompt_index} is {staleness} versions old, the bound is {bound}",
            )
        places: list[tuple[str, ev.StoredGroup]] = []
        for prompt_index, _ in event.groups:
            group = self.live.pop(prompt_index)
            assert group.stored is not None
            places.append((group.file, group.stored))
            self._leave_file(group.file, event.update)
            self.fates[prompt_index] = TRAINED
        self.records[event.update] = UpdateRecord(row.seq, event, tuple(places), self.fingerprint)
        self.groups_trained += len(event.groups)
        self.updates = event.update
        self.optimizer_steps += len(event.steps)
        self.optimizer_steps_applied += sum(step.applied for step in event.steps)
        self.batch = None

    def _leave_file(self, file: str, update: int) -> None:
        use = self.files[file]
        use.waiting -= 1
        use.last_update = max(use.last_update, update)

    def _on_WeightsPublished(self, event: ev.WeightsPublished, row: EventRow) -> None:
        self.policy_version = event.version
        self.published_update = event.update
        self.published_digest = event.digest
        self.update_of_version.append(event.update)

    def _on_WeightsRemade(self, event: ev.WeightsRemade, row: EventRow) -> None:
        self._need(event.version == self.policy_version, row, "only the served version can be made again")
        self.published_digest = event.digest

    def _on_CheckpointCommitted(self, event: ev.CheckpointCommitted, row: EventRow) -> None:
        total = self.total
        self._need(
            0 < event.update <= self.updates
            and event.optimizer_steps == event.update * total.minibatches * total.passes,
            row,
            f"update {event.update} with {event.optimizer_steps} optimizer steps is not in the log",
        )
        self.checkpoints[event.update] = event
        self.checkpoints = dict(sorted(self.checkpoints.items()))

    def _on_CheckpointLost(self, event: ev.CheckpointLost, row: EventRow) -> None:
        self._need(event.update in self.checkpoints, row, f"there is no checkpoint of update {event.update}")
        del self.checkpoints[event.update]

    def covered_update(self) -> int:
        """Every update up to this one is in each kept checkpoint. 0 with none."""
        return min(self.checkpoints) if self.checkpoints else 0

    def retirable(self, keep: int) -> tuple[list[ev.CheckpointCommitted], list[str]]:
        """Checkpoints beyond the newest `keep`, and group files that all kept ones cover."""
        updates = list(self.checkpoints)
        old = [self.checkpoints[update] for update in updates[: max(0, len(updates) - keep)]]
        kept = updates[len(old) :]
        covered = kept[0] if kept else 0
        if self.config["groups"]["keep"] == "all":
            return old, []
        files = [name for name, use in self.files.items() if use.waiting == 0 and use.last_update <= covered]
        return old, files

    def _on_FilesRetired(self, event: ev.FilesRetired, row: EventRow) -> None:
        paths = {checkpoint.path: update for update, checkpoint in self.checkpoints.items()}
        for path in event.checkpoints:
            self._need(path in paths, row, f"checkpoint {path} is not a kept one")
        kept = [update for path, update in paths.items() if path not in event.checkpoints]
        self._need(bool(kept) or not event.checkpoints, row, "the last checkpoint is never retired")
        covered = min(kept) if kept else 0
        for name in event.group_files:
            use = self.files.get(name)
            self._need(
                use is not None and use.waiting == 0 and use.last_update <= covered,
                row,
                f"file {name} may still be needed",
            )
        for path in event.checkpoints:
            del self.checkpoints[paths[path]]
        for name in event.group_files:
            del self.files[name]
        for update in [update for update in self.records if update <= covered]:
            del self.records[update]

    def _on_EvaluationDone(self, event: ev.EvaluationDone, row: EventRow) -> None:
        self._need(event.policy_version == self.policy_version, row, "that version is not served")
        self.evaluations[event.policy_version] = event

    def _on_WorkerReplaced(self, event: ev.WorkerReplaced, row: EventRow) -> None:
        pass

    def _on_LearnerLost(self, event: ev.LearnerLost, row: EventRow) -> None:
        self._need(event.learner_try == self.learner_try, row, "it is of another learner try")
        self.learner_try += 1
        self.batch = None

    def _on_RunCompleted(self, event: ev.RunCompleted, row: EventRow) -> None:
        self._need(not self.live, row, f"groups {sorted(self.live)[:5]} are neither trained nor dropped")
        self.end = event

    def _on_RunStopped(self, event: ev.RunStopped, row: EventRow) -> None:
        self.end = event

    def _on_RunPreempted(self, event: ev.RunPreempted, row: EventRow) -> None:
        self.batch = None
        self.end = event

    def _on_RunFailed(self, event: ev.RunFailed, row: EventRow) -> None:
        self.batch = None
        self.end = event


def _with_changes(created: ev.RunCreated, changes: dict[str, list[Any]]) -> ev.RunCreated:
    """The first event with the config as this incarnation changed it; dotted keys."""
    config = msgspec.json.decode(msgspec.json.encode(created.config))
    for key, (_, new) in changes.items():
        node = config
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node[parent]
        node[leaf] = new
    return msgspec.structs.replace(created, config=config)


def fold(rows: Iterable[EventRow], state: RunState | None = None) -> RunState:
    """Fold rows into a state, a new one unless given."""
    state = RunState() if state is None else state
    for row in rows:
        state.apply(row)
    return state


def update_shape(budget: ev.BudgetResolved, update: int) -> list[int]:
    """Prompts of each minibatch of an update, in order."""
    return minibatch_sizes(batch_size_of(budget, update), budget.minibatches)
