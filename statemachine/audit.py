"""The audit: recomputes every identity of a run from the raw rows of its log, and says which hold.

It reads nothing else, believes no counter, and shares no code with the fold: what the fold would refuse to
apply, the audit names. Given what a fold of the same rows came to, it compares the two. It holds one byte and
one hash per prompt and row, and looks at each row once.
Invariant: a broken log never ends an audit; it is a failed check that names the seq.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from .audit_findings import CHECKS, Facts
from .audit_groups import GroupAudit
from .audit_learning import LearningAudit
from .audit_lives import LivesAudit
from .audit_storage import StorageAudit
from .errors import LogError
from .events import Event, IncarnationBegan, WorkerReplaced, decode
from .folded import Folded
from .log import GENESIS_HASH, EventRow, RunHead, row_hash, row_hasher

HASHES_AT_ONCE = 1024
"""Rows whose hashes are packed together: cheaper than one by one, and soon enough to take no memory."""


class Check(msgspec.Struct, frozen=True):
    """One identity: whether it holds, and the figures or the first violations."""

    id: str
    ok: bool
    detail: str


class AuditReport(msgspec.Struct, frozen=True):
    """Every check in the order of `CHECKS`, and what the log adds up to."""

    ok: bool
    checks: list[Check]
    totals: dict[str, Any]


def audit(
    rows: Iterable[EventRow],
    head: RunHead | None = None,
    folded: Callable[[], Folded] | None = None,
) -> AuditReport:
    """Audit a run from all of its rows, in order; with `head`, also that the log ends where the run says.

    With `folded`, which is asked after the last row, the report has one check more: that the fold takes every
    event, and adds up to the same.

    Never raises for what the log holds; an error of the database that is not about its rows goes through.
    """
    auditor = Auditor()
    try:
        auditor.take(rows)
    except LogError as error:
        auditor.facts.violation("chain", auditor.seq + 1, str(error))
    if head is not None:
        auditor.compare_with_head(head)
    return auditor.report(folded() if folded is not None else None)


class Auditor:
    """An audit that goes on: rows are taken as they come, and it may be asked in between."""

    def __init__(self) -> None:
        facts = self.facts = Facts()
        self.groups = groups = GroupAudit(facts)
        self.learning = learning = LearningAudit(facts, groups)
        self.storage = storage = StorageAudit(facts, groups, learning)
        self.lives = lives = LivesAudit(facts, groups, learning, storage)
        self.run_id: str | None = None
        self.seq = 0
        self.hash = GENESIS_HASH
        self.rows = 0
        self.workers_replaced = 0
        self._handlers: dict[str, Callable[[Any, int], None]] = {
            "RunCreated": lives.on_created,
            "IncarnationBegan": lives.on_incarnation,
            "BudgetResolved": lives.on_budget,
            "WorkersReady": lives.on_ready,
            "UpdatesRedone": storage.on_redone,
            "GroupsAdmitted": groups.on_admitted,
            "GroupsReissued": groups.on_reissued,
            "AttemptFailed": groups.on_failed,
            "GroupsStored": groups.on_stored,
            "GroupsDropped": lives.on_dropped,
            "AnswerRefused": groups.on_refused,
            "UpdateBegan": learning.on_update_began,
            "UpdateApplied": learning.on_update_applied,
            "WeightsPublished": learning.on_published,
            "WeightsRemade": learning.on_remade,
            "CheckpointCommitted": storage.on_checkpoint,
            "CheckpointLost": storage.on_checkpoint_lost,
            "FilesRetired": storage.on_retired,
            "EvaluationDone": learning.on_evaluated,
            "WorkerReplaced": self._on_worker_replaced,
            "LearnerLost": lives.on_learner_lost,
            "RunCompleted": lives.on_completed,
            "RunStopped": lives.on_stopped,
            "RunPreempted": lives.on_preempted,
            "RunFailed": lives.on_failed,
        }

    def take(self, rows: Iterable[EventRow]) -> None:
        """Audit the next rows. Written for speed: what is as it should be takes the shortest way."""
        facts, lives, handlers, storage = self.facts, self.lives, self._handlers, self.storage
        remember_hash, hash_of = storage.new_hashes.append, row_hasher()
        for row in rows:
            seq, kind = row.seq, row.type
            self.rows += 1
            try:
                if seq == self.seq + 1 and row.run_id == self.run_id and row.hash == hash_of(self.hash, row):
                    self.seq, self.hash = seq, row.hash
                    remember_hash(row.hash)
                    if not seq % HASHES_AT_ONCE:
                        storage.pack_hashes()
                else:
                    self._check_link(row)
                event = decode(kind, row.schema, row.payload, seq=seq)
                if (
                    row.incarnation != facts.incarnation
                    or lives.ending != "open"
                    or kind == "IncarnationBegan"
                ):
                    self._check_writer(row, event)
                handlers[kind](event, seq)
            except Exception as error:
                facts.violation("events", seq, f"{kind} cannot be audited: {error}")

    def _check_link(self, row: EventRow) -> None:
        """What is wrong between this row and the one before; the chain is taken up again after it."""
        seq, violation = row.seq, self.facts.violation
        if self.run_id is None:
            self.run_id = row.run_id
        if row.run_id != self.run_id:
            violation("chain", seq, f"the row is of run {row.run_id!r}, the log of {self.run_id!r}")
        expected = self.seq + 1
        if seq < expected:
            violation("chain", seq, f"the row stands after event {self.seq}")
            return
        if seq > expected:
            violation("chain", expected, f"the row is missing, event {seq} is in its place")
        elif row.hash != row_hash(
            self.hash, row.run_id, seq, row.type, row.schema, row.payload, row.time, row.incarnation
        ):
            violation("chain", seq, f"the row ({row.type}) is not as it was written: its hash does not hold")
        self.seq, self.hash = seq, row.hash
        self.storage.remember_hash(seq, row.hash)

    def _check_writer(self, row: EventRow, event: Event) -> None:
        """Whether this incarnation may write this row here."""
        facts, seq = self.facts, row.seq
        if self.lives.ending != "open":
            self.lives.check_place(row.type, seq)
        if isinstance(event, IncarnationBegan):
            if event.incarnation != row.incarnation:
                facts.violation(
                    "incarnations",
                    seq,
                    f"incarnation {event.incarnation} began with a row of {row.incarnation}",
                )
        elif row.incarnation != facts.incarnation and seq != 1:
            facts.violation(
                "incarnations",
                seq,
                f"{row.type} was written by incarnation {row.incarnation}, the run was held by"
                f" {facts.incarnation}",
            )

    def _on_worker_replaced(self, event: WorkerReplaced, seq: int) -> None:
        self.workers_replaced += 1

    def compare_with_head(self, head: RunHead) -> None:
        """The run's own row says where its log ends."""
        facts = self.facts
        if (head.head_seq, head.head_hash) != (self.seq, self.hash):
            facts.violation(
                "chain",
                head.head_seq,
                f"the run's head is here, the rows end with {self.seq} or another hash",
            )
        if head.incarnation != facts.incarnation:
            facts.violation(
                "incarnations",
                self.seq,
                f"incarnation {head.incarnation} holds the run, the last that began is {facts.incarnation}",
            )

    def violations(self) -> list[str]:
        """What does not hold so far, without the figures of a report."""
        facts = self.facts
        return [f"{name}: {facts.details(name)}" for name in CHECKS if facts.failed(name)]

    def report(self, folded: Folded | None = None) -> AuditReport:
        """The verdict on what has been taken."""
        facts, totals = self.facts, self._totals()
        if not self.rows:
            facts.violation("chain", 1, "the log is empty")
        if folded is not None:
            self._compare_with_fold(folded, totals)
        figures = self._figures()
        if folded is not None:
            figures["fold"] = f"{folded.events} events taken, in phase {folded.phase}"
        checks = [
            Check(name, not facts.failed(name), facts.details(name) or figures.get(name) or claim)
            for name, claim in CHECKS.items()
            if name != "fold" or folded is not None
        ]
        return AuditReport(all(check.ok for check in checks), checks, totals)

    def _compare_with_fold(self, folded: Folded, totals: dict[str, Any]) -> None:
        if folded.refused:
            self.facts.violation("fold", folded.events + 1, folded.refused)
            return
        for name, value in folded.totals.items():
            if value != totals[name]:
                what = name.replace("_", " ")
                self.facts.violation(
                    "fold", self.seq, f"{what}: {value} by the fold, {totals[name]} by the audit"
                )

    def _totals(self) -> dict[str, Any]:
        facts, groups, learning, storage = self.facts, self.groups, self.learning, self.storage
        return {
            "run": self.run_id,
            "seq": self.seq,
            "ending": self.lives.ending,
            "incarnations": facts.incarnation,
            "learners_lost": self.lives.learners_lost,
            "workers_replaced": self.workers_replaced,
            "updates": facts.updates,
            "updates_total": facts.budget.updates_total if facts.budget else None,
            "updates_redone": storage.redone_updates,
            "optimizer_steps": learning.optimizer_steps,
            "optimizer_steps_skipped": learning.optimizer_steps_skipped,
            "optimizer_steps_total": facts.budget.optimizer_steps_total if facts.budget else None,
            "policy_version": facts.policy_version,
            "staleness_max": learning.most_stale,
            "prompts_drawn": groups.drawn,
            "groups": groups.by_fate(),
            "groups_reissued": groups.reissued,
            "answers_refused": groups.refused,
            "checkpoints_committed": storage.committed,
            "checkpoints_kept": sorted(storage.kept.values()),
            "evaluations": learning.evaluations,
            "bias": {fate: tally.figures() for fate, tally in groups.tallies.items()},
        }

    def _figures(self) -> dict[str, str]:
        facts, groups, learning, storage = self.facts, self.groups, self.learning, self.storage
        budget, fates, ending = facts.budget, groups.by_fate(), self.lives.ending
        updates = f"{facts.updates} of {budget.updates_total if budget else 0} updates"
        steps = (
            f"{learning.optimizer_steps} of {budget.optimizer_steps_total if budget else 0} optimizer steps"
        )
        how = {
            "open": "open, not ended",
            "stopped": "stopped short, as stated",
            "preempted": "preempted, goes on when run again",
            "failed": f"failed ({self.lives.said}), tried again when run again",
        }.get(ending, ending)
        rewards = self.lives.rewards_changed
        other_code = f"; {rewards} times the reward had other code than before" if rewards else ""
        return {
            "chain": f"{self.rows} rows, whole",
            "config": CHECKS["config"] + other_code,
            "budget": f"{steps.split(' of ')[1]} over a horizon of {budget.horizon}"
            if budget
            else "none yet",
            "incarnations": f"{facts.incarnation} began",
            "admission": f"{groups.drawn} prompts drawn, at most {groups.most_in_window} in the window",
            "fates": ", ".join(f"{number} {fate}" for fate, number in fates.items()),
            "attempts": f"{groups.reissued} issued again, {groups.refused} late answers refused",
            "batches": updates,
            "trained_once": f"{fates['trained']} groups, each once",
            "optimizer_steps": f"{steps}, {learning.optimizer_steps_skipped} skipped",
            "learning_rates": f"{learning.optimizer_steps} equal to the schedule's",
            "publications": f"policy version {facts.policy_version}, of update {facts.published_update}",
            "staleness": f"at most {learning.most_stale} versions, bound {facts.max_staleness}",
            "evaluations": f"{learning.evaluations} done",
            "checkpoints": f"{storage.committed} committed, kept of updates {sorted(storage.kept.values())}",
            "redo": f"{storage.redone_updates} updates redone",
            "ended": f"{how}: {updates}, {steps}",
            "bias": "; ".join(_bias_line(fate, tally.figures()) for fate, tally in groups.tallies.items()),
        }


def _bias_line(fate: str, figures: dict[str, float | int | None]) -> str:
    length, reward = figures["mean_length"], figures["mean_reward"]
    if length is None or reward is None:
        means = "no answers"
    else:
        means = f"mean length {length:.1f}, mean reward {reward:.3f}"
    unanswered = f", {figures['unanswered']} without an answer" if figures["unanswered"] else ""
    return f"{fate}: {figures['groups']} groups, {means}{unanswered}"
