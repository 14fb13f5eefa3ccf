"""What the audit checks, and what it has found so far.

`CHECKS` is the registry: an identity that is not in it cannot be reported. `Facts` is what the parts of the
audit tell each other while the rows go by: counts of what the log says has happened, taken from the raw
events and never from the fold. Invariant: a violation is recorded with its seq and the audit goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .budget import prompts_needed, schedule_of
from .events import BudgetResolved
from .schedule import ScheduleSpec

if TYPE_CHECKING:
    from .audit_groups import LiveGroup

CHECKS: dict[str, str] = {
    "chain": "the hash chain is whole and seq is dense from 1",
    "events": "every row can be read and stands where its kind may stand",
    "fold": "the fold that drives the run takes every event, and adds up to the same",
    "config": "nothing that fixes the accounting was changed when the run went on",
    "budget": "the budget is committed once, before any worker, and follows from the config and the data",
    "incarnations": "incarnations count up from 1, and none writes after a newer one began",
    "workers": "work begins only once the workers of its life are ready, and only their newest try counts",
    "admission": "prompts are drawn in order, at the current version, and never more than the window holds",
    "fates": "each group is in exactly one of admitted, stored, trained, dropped",
    "attempts": "what is stored, trained or refused is judged by the group's current attempt",
    "samples": "each stored group has its samples, made by versions from its admission to its storing",
    "batches": "each update trains exactly its batch: the right groups, as many as the budget says",
    "trained_once": "no group is trained twice",
    "optimizer_steps": "optimizer steps are contiguous from 0, the same number in every update",
    "learning_rates": "each learning rate is exactly the schedule's",
    "skipped_steps": "a step is skipped if and only if it cannot be applied, and says why",
    "publications": "the policy version goes up by one a publication, and none is early, late or missing",
    "staleness": "every trained sample is within the bound, and its staleness is stated right",
    "evaluations": "each evaluation is of the served version, and none that was due is missing",
    "checkpoints": "each checkpoint agrees with the log that it names",
    "redo": "what is redone was recorded, and ends at the last recorded update",
    "files": "files have fresh names, and only what every kept checkpoint covers is retired",
    "ended": "the run ended exactly at its total, or says how short, or has not ended",
    "bias": "dropped and reissued groups against trained ones (figures, no verdict)",
}

SHOWN_PER_CHECK = 3


@dataclass(slots=True)
class Tally:
    """Mean length and reward over the groups of one fate that were stored."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0
    reward_sum: float = 0.0
    unanswered: int = 0  # groups of that fate that never had an answer

    def add(self, group: LiveGroup) -> None:
        """Count a group that was stored."""
        self.groups += 1
        self.samples += group.samples
        self.tokens += group.tokens
        self.reward_sum += group.reward_sum

    def figures(self) -> dict[str, float | int | None]:
        """What the report says of it."""
        return {
            "groups": self.groups,
            "unanswered": self.unanswered,
            "mean_length": self.tokens / self.samples if self.samples else None,
            "mean_reward": self.reward_sum / self.samples if self.samples else None,
        }


class Facts:
    """Where the run stands at the row that is being audited."""

    def __init__(self) -> None:
        self._shown: dict[str, list[str]] = {name: [] for name in CHECKS}
        self._counts: dict[str, int] = dict.fromkeys(CHECKS, 0)
        # what was decided at the start
        self.config: dict[str, Any] | None = None
        self.data_len = 0
        self.max_staleness: int | None = None
        self.reissue_stale = False
        self.group_size: int | None = None
        self.eval_every_updates: int | None = None
        self.groups_kept = False
        self.budget: BudgetResolved | None = None
        self.schedule: ScheduleSpec | None = None
        self.prompts_needed = 0
        # where it stands
        self.incarnation = 0
        self.divergence_accepted = False  # by who began this incarnation
        self.workers_ready = False  # those of this incarnation
        self.learner_ready = False  # that of this try
        self.learner_try = 0
        self.updates = 0
        self.policy_version = 0
        self.published_update = 0
        self.exhausted = False  # what was left over has been dropped as unused

    def violation(self, check: str, seq: int, detail: str) -> None:
        """Record that a check does not hold at a seq."""
        self._counts[check] += 1
        if len(self._shown[check]) < SHOWN_PER_CHECK:
            self._shown[check].append(f"event {seq}: {detail}")

    def failed(self, check: str) -> bool:
        """Whether the check has a violation."""
        return self._counts[check] > 0

    def details(self, check: str) -> str:
        """The first violations of a check, and how many more there are."""
        more = self._counts[check] - len(self._shown[check])
        return "; ".join([*self._shown[check], *([f"and {more} more"] if more > 0 else [])])

    def commit_budget(self, budget: BudgetResolved) -> None:
        """Audit against this budget from here on. Raises ValueError if its schedule is none."""
        self.budget = budget
        self.prompts_needed = prompts_needed(budget)
        self.schedule = schedule_of(budget)

    @property
    def may_learn(self) -> bool:
        """Whether there are a budget, workers and a learner: `learned` would have nothing to say."""
        return self.learner_ready and self.workers_ready and self.budget is not None

    def worked(self, seq: int, what: str) -> None:
        """Something happened that needs workers."""
        if self.budget is None:
            self.violation("budget", seq, f"{what} before a budget was committed")
        if not self.workers_ready:
            self.violation("workers", seq, f"{what} before the workers of this incarnation were ready")

    def learned(self, seq: int, what: str) -> None:
        """Something happened that needs the learner."""
        self.worked(seq, what)
        if self.workers_ready and not self.learner_ready:
            self.violation("workers", seq, f"{what} before learner try {self.learner_try} was ready")
