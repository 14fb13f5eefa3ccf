"""The audit of learning: batches, optimizer steps, learning rates, publications, staleness, evaluations.

Owns the batch that is open and where updates and publications stand in the log. Invariant: what an update
says of itself (its groups, versions, rates) is never believed, only compared with what led up to it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice

from .audit_findings import Facts
from .audit_groups import GroupAudit, LiveGroup
from .budget import batch_size_of
from .events import (
    BudgetResolved,
    EvaluationDone,
    OptimizerStep,
    UpdateApplied,
    UpdateBegan,
    WeightsPublished,
    WeightsRemade,
)
from .schedule import multiplier


class LearningAudit:
    """Every update and publication."""

    def __init__(self, facts: Facts, groups: GroupAudit) -> None:
        self._facts = facts
        self._groups = groups
        self._batch: UpdateBegan | None = None
        self.optimizer_steps = 0  # taken: applied or skipped
        self.optimizer_steps_skipped = 0
        self._next_step = 0
        self.update_seqs: list[int] = []  # update u was recorded at update_seqs[u - 1]
        self._publication_seqs: list[int] = []
        self._update_of_version = [0]
        self.published_digest = ""
        self._final = False  # the last publication said that no update follows
        self._evaluated_version = -1
        self.evaluations = 0
        self.most_stale = 0  # versions, over all trained samples

    def abandon_batch(self) -> None:
        """Learner or driver is gone: the open batch, if any, was not trained."""
        self._batch = None

    def policy_version_at(self, update: int, seq: int) -> int:
        """The version that the weights after an update belong to, as the log stood at a seq."""
        versions = bisect_right(self._update_of_version, update) - 1
        return min(versions, bisect_right(self._publication_seqs, seq))

    # -- updates --------------------------------------------------------------------------------------

    def on_update_began(self, event: UpdateBegan, seq: int) -> None:
        facts, update = self._facts, event.update
        if not facts.may_learn:
            facts.learned(seq, f"update {update} began")
        if update != facts.updates + 1:
            facts.violation("batches", seq, f"update {update} began after {facts.updates} updates")
        if self._batch is not None:
            facts.violation("batches", seq, f"update {update} began while {self._batch.update} was under way")
        if facts.exhausted:
            facts.violation("batches", seq, f"update {update} began after what was left had been dropped")
        self._check_published_before(update, seq)
        self._check_batch(event, seq)
        self._batch = event

    def _check_published_before(self, update: int, seq: int) -> None:
        facts, budget = self._facts, self._facts.budget
        if budget is None:
            return
        due = (update - 1) // budget.every_updates * budget.every_updates
        if facts.published_update < due:
            facts.violation("publications", seq, f"update {update} began, update {due} was not published")
        if self._final:
            facts.violation("publications", seq, f"update {update} began after the final publication")

    def _check_batch(self, event: UpdateBegan, seq: int) -> None:
        facts, groups, budget = self._facts, self._groups, self._facts.budget
        chosen = [index for index, _ in event.groups]
        if budget is not None:
            self._check_size(budget, event.update, len(chosen), seq)
        if facts.reissue_stale:
            first = list(islice(groups.ready, len(chosen)))
            if set(chosen) != set(first):
                facts.violation(
                    "batches",
                    seq,
                    f"update {event.update} began with groups {_few(chosen)}, {_few(first)} were ready first",
                )
        else:
            first = groups.survivors_in_draw_order(len(chosen))
            if chosen != first:
                facts.violation(
                    "batches",
                    seq,
                    f"update {event.update} began with groups {_few(chosen)}, next in draw order"
                    f" were {_few(first)}",
                )

    def _check_size(self, budget: BudgetResolved, update: int, size: int, seq: int) -> None:
        if not 1 <= update <= budget.updates_total:
            self._facts.violation(
                "batches", seq, f"update {update} is outside the budget's {budget.updates_total}"
            )
            return
        due = batch_size_of(budget, update)
        if size == due:
            return
        # Where groups were dropped and nothing is left to draw, a trained tail holds what survived.
        groups = self._groups
        survivors = len(groups.live)
        short_tail = budget.tail == "train" and groups.drawn == budget.prompts_total and size == survivors
        if not (short_tail and budget.minibatches <= size < due):
            self._facts.violation(
                "batches", seq, f"update {update} began with {size} groups, its batch has {due}"
            )

    def on_update_applied(self, event: UpdateApplied, seq: int) -> None:
        facts, update = self._facts, event.update
        if not facts.may_learn:
            facts.learned(seq, f"update {update} was applied")
        if event.learner_try != facts.learner_try:
            facts.violation(
                "workers",
                seq,
                f"update {update} is of learner try {event.learner_try}, not {facts.learner_try}",
            )
        batch, self._batch = self._batch, None
        if batch is None:
            facts.violation("batches", seq, f"update {update} was applied and had not begun")
        elif (batch.update, batch.groups) != (update, event.groups):
            facts.violation(
                "batches",
                seq,
                f"update {update} was applied with groups {_few([i for i, _ in event.groups])},"
                f" update {batch.update} had begun with {_few([i for i, _ in batch.groups])}",
            )
        trained: list[LiveGroup] = []
        for index, attempt in event.groups:
            group = self._groups.train(index, attempt, update, seq)
            if group is not None:
                trained.append(group)
        self._check_staleness(event, trained, seq)
        self._check_steps(event.steps, update, seq)
        facts.updates += 1
        self.update_seqs.append(seq)

    def _check_staleness(self, event: UpdateApplied, trained: Sequence[LiveGroup], seq: int) -> None:
        facts, version = self._facts, self._facts.policy_version
        if event.policy_version != version:
            facts.violation(
                "staleness",
                seq,
                f"update {event.update} says it was at version {event.policy_version}, it was at {version}",
            )
        samples = oldest_version_sum = 0
        for group in trained:
            samples += group.samples
            oldest_version_sum += group.oldest_version_sum
        if not samples:
            return
        oldest = min([group.oldest_version for group in trained])
        stalest = version - oldest
        self.most_stale = max(self.most_stale, stalest)
        if facts.max_staleness is not None and stalest > facts.max_staleness:
            facts.violation(
                "staleness",
                seq,
                f"update {event.update} trained a sample of version {oldest} at version {version}:"
                f" {stalest} is over the bound {facts.max_staleness}",
            )
        mean = version - oldest_version_sum / samples
        known = 0 <= oldest < len(self._update_of_version)
        in_updates = event.update - 1 - self._update_of_version[oldest] if known else None
        if (
            event.staleness_max != stalest
            or not math.isclose(event.staleness_mean, mean, rel_tol=1e-9, abs_tol=1e-9)
            or (in_updates is not None and event.staleness_max_updates != in_updates)
        ):
            facts.violation(
                "staleness",
                seq,
                f"update {event.update} states staleness {event.staleness_max} at most,"
                f" {event.staleness_mean:.6g} on average, {event.staleness_max_updates} in updates; it is"
                f" {stalest}, {mean:.6g}, {in_updates}",
            )

    def _check_steps(self, steps: Sequence[OptimizerStep], update: int, seq: int) -> None:
        facts, budget, schedule = self._facts, self._facts.budget, self._facts.schedule
        if budget is not None and len(steps) != budget.minibatches * budget.passes:
            facts.violation(
                "optimizer_steps",
                seq,
                f"update {update} has {len(steps)} optimizer steps, it needs {budget.minibatches} minibatches"
                f" * {budget.passes} passes",
            )
        for step in steps:
            k = step.optimizer_step
            if k != self._next_step:
                facts.violation(
                    "optimizer_steps", seq, f"optimizer step {k} follows, the next is {self._next_step}"
                )
            self._next_step = k + 1
            self.optimizer_steps += 1
            if budget is not None and schedule is not None:
                if not 0 <= k < budget.optimizer_steps_total:
                    facts.violation(
                        "optimizer_steps",
                        seq,
                        f"optimizer step {k} is outside the budget's {budget.optimizer_steps_total}",
                    )
                else:
                    rate = budget.learning_rate * multiplier(schedule, k)
                    if step.learning_rate != rate:
                        facts.violation(
                            "learning_rates",
                            seq,
                            f"optimizer step {k} was taken at {step.learning_rate!r}, the schedule's rate is"
                            f" {rate!r}",
                        )
            self._check_skip(step, seq)

    def _check_skip(self, step: OptimizerStep, seq: int) -> None:
        finite, has_tokens = not isinstance(step.grad_norm, str), step.tokens > 0
        if step.applied:
            right = finite and has_tokens and step.skipped_because is None
        else:
            self.optimizer_steps_skipped += 1
            right = (step.skipped_because == "not_finite" and not finite) or (
                step.skipped_because == "no_tokens" and not has_tokens
            )
        if not right:
            self._facts.violation(
                "skipped_steps",
                seq,
                f"optimizer step {step.optimizer_step} was {'applied' if step.applied else 'skipped'} with"
                f" gradient norm {step.grad_norm}, {step.tokens} tokens, reason {step.skipped_because}",
            )

    # -- publications ---------------------------------------------------------------------------------

    def on_published(self, event: WeightsPublished, seq: int) -> None:
        facts, budget, update = self._facts, self._facts.budget, event.update
        if not facts.may_learn:
            facts.learned(seq, f"version {event.version} was published")
        self._check_evaluated(seq)
        if event.version != facts.policy_version + 1:
            facts.violation(
                "publications", seq, f"version {event.version} was published after {facts.policy_version}"
            )
        if update != facts.updates:
            facts.violation(
                "publications", seq, f"update {update} was published when {facts.updates} updates were done"
            )
        if update <= facts.published_update:
            facts.violation("publications", seq, f"update {update} was published a second time")
        if budget is not None:
            no_update_follows = update >= budget.updates_total or facts.exhausted
            if event.final != no_update_follows:
                facts.violation(
                    "publications",
                    seq,
                    f"the publication of update {update} says final={event.final}, updates"
                    f" {'cannot' if no_update_follows else 'can'} follow",
                )
            if update % budget.every_updates and not no_update_follows:
                facts.violation(
                    "publications",
                    seq,
                    f"update {update} was published, due are the last and every {budget.every_updates}th",
                )
        facts.policy_version = event.version
        facts.published_update = update
        self._update_of_version.append(update)
        self._publication_seqs.append(seq)
        self.published_digest = event.digest
        self._final = event.final

    def on_remade(self, event: WeightsRemade, seq: int) -> None:
        facts = self._facts
        stands = (facts.policy_version, facts.published_update, self.published_digest)
        if (event.version, event.update, event.recorded_digest) != stands:
            facts.violation(
                "publications",
                seq,
                f"version {event.version} of update {event.update} was made again for digest"
                f" {event.recorded_digest}; served is {stands[0]} of update {stands[1]}, {stands[2]}",
            )
        self.published_digest = event.digest

    # -- evaluations ----------------------------------------------------------------------------------

    def on_evaluated(self, event: EvaluationDone, seq: int) -> None:
        facts = self._facts
        facts.worked(seq, f"version {event.policy_version} was evaluated")
        served = (facts.policy_version, facts.published_update)
        if (event.policy_version, event.update) != served:
            facts.violation(
                "evaluations",
                seq,
                f"version {event.policy_version} of update {event.update} was evaluated, served is"
                f" {served[0]} of update {served[1]}",
            )
        if event.policy_version <= self._evaluated_version:
            facts.violation("evaluations", seq, f"version {event.policy_version} was evaluated a second time")
        self._evaluated_version = event.policy_version
        self.evaluations += 1

    def _check_evaluated(self, seq: int, *, at_the_end: bool = False) -> None:
        """The served version gives way, or is the last: was it evaluated, if that was due?"""
        facts, every = self._facts, self._facts.eval_every_updates
        version = facts.policy_version
        if not every or self._evaluated_version == version:
            return
        before = self._update_of_version[max(0, len(self._update_of_version) - 2)]
        if version == 0 or at_the_end or facts.published_update // every > before // every:
            facts.violation("evaluations", seq, f"version {version} was due for evaluation and had none")

    def check_end(self, seq: int) -> None:
        """The run is over for good."""
        if self._facts.published_update != self._facts.updates:
            self._facts.violation(
                "publications",
                seq,
                f"the run ended after update {self._facts.updates}, published is update"
                f" {self._facts.published_update}",
            )
        self._check_evaluated(seq, at_the_end=True)


def _few(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:8])
    return f"[{shown}{', ...' if len(indices) > 8 else ''}]"
