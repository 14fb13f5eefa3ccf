"""The audit of a run's lives: creation, config, budget, incarnations, learner tries, and how it ended.

Owns the ending. Invariant: nothing follows an end that is for good, and only a new incarnation one that is
not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from .audit_findings import Facts
from .audit_groups import GroupAudit
from .audit_learning import LearningAudit
from .audit_storage import StorageAudit
from .budget import BudgetInputs, resolve_budget
from .errors import BudgetRefused
from .events import (
    BudgetResolved,
    DropReason,
    GroupsDropped,
    IncarnationBegan,
    LearnerLost,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunPreempted,
    RunStopped,
    WorkersReady,
)

FIXED_KEYS = (
    "seed",
    "data.",
    "reward.function",
    "model.",
    "batch.",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.deterministic",
    "learner.compute_dtype",
    "algorithm.",
    "optim.",
    "sync.",
    "eval.",
)
"""Beginnings of config keys that fix what is trained, in which order, at which rate and on which samples."""

_CONFIG_OF_BUDGET = {
    "epochs": "data.epochs",
    "max_prompts": "data.max_prompts",
    "batch_prompts": "batch.prompts",
    "minibatches": "batch.minibatches",
    "passes": "batch.passes",
    "tail": "batch.tail",
    "every_updates": "sync.every_updates",
    "max_optimizer_steps": "optim.max_optimizer_steps",
    "learning_rate": "optim.lr",
    "schedule_kind": "optim.schedule.kind",
    "min_ratio": "optim.schedule.min_ratio",
}
_TOTALS = (
    "prompts_available",
    "prompts_total",
    "prompts_unused",
    "updates_total",
    "optimizer_steps_total",
    "publications_total",
    "horizon",
    "warmup_steps",
)


class LivesAudit:
    """Creation, incarnations, tries and ends."""

    def __init__(
        self, facts: Facts, groups: GroupAudit, learning: LearningAudit, storage: StorageAudit
    ) -> None:
        self._facts = facts
        self._groups = groups
        self._learning = learning
        self._storage = storage
        self.ending = "open"  # open | completed | stopped | preempted | failed
        self.said = ""  # what the end says, in figures
        self.learners_lost = 0
        self.rewards_changed = 0  # lives that began with other code of the reward

    def check_place(self, kind: str, seq: int) -> None:
        """Whether anything may stand here. Called for every row while an end stands."""
        if self.ending in ("completed", "stopped"):
            self._facts.violation("ended", seq, f"{kind} follows the end: the run is {self.ending}")
        elif kind != "IncarnationBegan":
            self._facts.violation("ended", seq, f"{kind} follows the end of its incarnation: {self.ending}")

    def on_created(self, event: RunCreated, seq: int) -> None:
        facts = self._facts
        if seq != 1 or facts.config is not None:
            facts.violation("events", seq, "the run was created, which only its first event may say")
        facts.config = event.config
        facts.data_len = event.data_len
        bound = lookup(event.config, "sync.max_staleness")
        if not isinstance(bound, int) or bound < 0:
            facts.violation("config", seq, f"sync.max_staleness is {bound!r}, which is no bound")
        else:
            facts.max_staleness = bound
        facts.reissue_stale = lookup(event.config, "sync.on_stale") == "reissue"
        facts.groups_kept = lookup(event.config, "groups.keep") == "all"
        group_size = lookup(event.config, "batch.group_size")
        facts.group_size = group_size if isinstance(group_size, int) else None
        every = lookup(event.config, "eval.every_updates")
        facts.eval_every_updates = every if isinstance(every, int) and every > 0 else None

    def on_incarnation(self, event: IncarnationBegan, seq: int) -> None:
        facts = self._facts
        if facts.config is None:
            facts.violation("events", seq, "an incarnation began before the run was created")
        if event.incarnation != facts.incarnation + 1:
            facts.violation(
                "incarnations", seq, f"incarnation {event.incarnation} began after {facts.incarnation}"
            )
        for name, (old, new) in event.digest_changes.items():
            if name == "reward":  # a fault in it may be put right
                self.rewards_changed += 1
            else:
                facts.violation("config", seq, f"the digest of the {name} was changed from {old} to {new}")
        for key in event.config_changes:
            if key.startswith(FIXED_KEYS):
                facts.violation("config", seq, f"{key} was changed to {event.config_changes[key][-1:]}")
        facts.incarnation = event.incarnation
        facts.divergence_accepted = event.accept_divergence
        facts.workers_ready = facts.learner_ready = False
        facts.learner_try = 1
        self.ending = "open"
        self._groups.lose_attempts()
        self._learning.abandon_batch()
        self._storage.learner_gone()

    def on_budget(self, event: BudgetResolved, seq: int) -> None:
        facts = self._facts
        if facts.budget is not None:
            facts.violation("budget", seq, "a budget was committed a second time")
            return
        self._compare_with_config(event, seq)
        try:
            facts.commit_budget(event)
        except ValueError as error:
            facts.violation("budget", seq, str(error))

    def _compare_with_config(self, event: BudgetResolved, seq: int) -> None:
        facts, config = self._facts, self._facts.config or {}
        if event.data_len != facts.data_len:
            facts.violation(
                "budget", seq, f"the budget is for {event.data_len} rows, the run has {facts.data_len}"
            )
        for name, key in _CONFIG_OF_BUDGET.items():
            wanted, stated = lookup(config, key, getattr(event, name)), getattr(event, name)
            if wanted != stated:
                facts.violation("budget", seq, f"{name} is {stated!r}, {key} in the config is {wanted!r}")
        schedule = lookup(config, "optim.schedule", {})
        known = isinstance(schedule, dict) and "horizon" in schedule
        inputs = BudgetInputs(
            **{name: getattr(event, name) for name in ("data_len", *_CONFIG_OF_BUDGET)},
            warmup_steps=lookup(config, "optim.schedule.warmup_steps") if known else event.warmup_steps,
            warmup_ratio=lookup(config, "optim.schedule.warmup_ratio") if known else None,
            horizon=lookup(config, "optim.schedule.horizon") if known else event.horizon,
        )
        try:
            due = resolve_budget(inputs)
        except BudgetRefused as error:
            facts.violation("budget", seq, f"no budget follows from its inputs: {error}")
            return
        for name in _TOTALS:
            if getattr(event, name) != getattr(due, name):
                facts.violation(
                    "budget", seq, f"{name} is {getattr(event, name)}, its inputs give {getattr(due, name)}"
                )

    def on_ready(self, event: WorkersReady, seq: int) -> None:
        facts = self._facts
        if facts.budget is None:
            facts.violation("budget", seq, "workers were ready before a budget was committed")
        if event.learner_try != facts.learner_try:
            facts.violation(
                "workers",
                seq,
                f"learner try {event.learner_try} was ready, under way was {facts.learner_try}",
            )
        if facts.learner_ready:
            facts.violation("workers", seq, f"learner try {facts.learner_try} was ready a second time")
        self._storage.check_ready(event.update, seq)
        facts.workers_ready = facts.learner_ready = True

    def on_learner_lost(self, event: LearnerLost, seq: int) -> None:
        facts = self._facts
        if event.learner_try != facts.learner_try:
            facts.violation(
                "workers", seq, f"learner try {event.learner_try} was lost, under way was {facts.learner_try}"
            )
        self.learners_lost += 1
        facts.learner_try += 1
        facts.learner_ready = False
        self._learning.abandon_batch()
        self._storage.learner_gone()

    def on_dropped(self, event: GroupsDropped, seq: int) -> None:
        """What is left over is dropped as unused: could a further batch have formed?"""
        facts, budget, groups = self._facts, self._facts.budget, self._groups
        if event.reason is DropReason.UNUSED and budget is not None and facts.updates < budget.updates_total:
            at_hand = len(groups.live) + budget.prompts_total - groups.drawn
            needed = budget.batch_prompts if budget.tail == "drop" else budget.minibatches
            if at_hand >= needed:
                facts.violation(
                    "ended",
                    seq,
                    f"{len(groups.live)} groups were dropped as unused, with the prompts not drawn there were"
                    f" {at_hand}, and {needed} make a batch",
                )
        groups.on_dropped(event, seq)

    # -- ends -----------------------------------------------------------------------------------------

    def on_completed(self, event: RunCompleted, seq: int) -> None:
        self._end("completed", seq, event.updates, event.optimizer_steps, event.policy_version)
        budget, taken = self._facts.budget, self._learning.optimizer_steps
        if budget is not None and (taken, self._facts.updates, self._facts.policy_version) != (
            budget.optimizer_steps_total,
            budget.updates_total,
            budget.publications_total,
        ):
            self._facts.violation(
                "ended",
                seq,
                f"the run completed with {taken} optimizer steps, {self._facts.updates} updates and"
                f" {self._facts.policy_version} publications; its budget has {budget.optimizer_steps_total},"
                f" {budget.updates_total} and {budget.publications_total}",
            )
        self._end_for_good(event.weights_digest, seq)

    def on_stopped(self, event: RunStopped, seq: int) -> None:
        self._end("stopped", seq, event.updates, event.optimizer_steps, event.policy_version)
        budget, taken = self._facts.budget, self._learning.optimizer_steps
        if budget is not None:
            short = (budget.updates_total - self._facts.updates, budget.optimizer_steps_total - taken)
            if (event.updates_short, event.optimizer_steps_short) != short or short[0] < 1:
                self._facts.violation(
                    "ended",
                    seq,
                    f"the run stopped {event.updates_short} updates and {event.optimizer_steps_short}"
                    f" optimizer steps short, by the log it is {short[0]} and {short[1]}",
                )
        if not self._facts.exhausted:
            self._facts.violation("ended", seq, "the run stopped short, but what was left was not dropped")
        self._end_for_good(event.weights_digest, seq)

    def on_preempted(self, event: RunPreempted, seq: int) -> None:
        self._end("preempted", seq, event.updates, event.optimizer_steps, self._facts.policy_version)
        if event.checkpoint_update != self._storage.newest():
            self._facts.violation(
                "ended",
                seq,
                f"the run was preempted with a checkpoint of update {event.checkpoint_update}, the newest"
                f" kept is of {self._storage.newest()}",
            )

    def on_failed(self, event: RunFailed, seq: int) -> None:
        self._end("failed", seq, event.updates, event.optimizer_steps, self._facts.policy_version)
        self.said = f"{event.code}: {event.error}"

    def _end(self, ending: str, seq: int, updates: int, optimizer_steps: int, policy_version: int) -> None:
        facts, taken = self._facts, self._learning.optimizer_steps
        if (updates, optimizer_steps, policy_version) != (facts.updates, taken, facts.policy_version):
            facts.violation(
                "ended",
                seq,
                f"the run {ending} saying {updates} updates, {optimizer_steps} optimizer steps, version"
                f" {policy_version}; the log has {facts.updates}, {taken} and {facts.policy_version}",
            )
        self.ending, self.said = ending, ""
        self._learning.abandon_batch()

    def _end_for_good(self, weights_digest: str, seq: int) -> None:
        facts = self._facts
        self._learning.check_end(seq)
        if facts.updates and facts.updates not in self._storage.kept.values():
            facts.violation("ended", seq, f"update {facts.updates}, the last, is in no kept checkpoint")
        if facts.policy_version and weights_digest != self._learning.published_digest:
            facts.violation(
                "ended",
                seq,
                f"the run ended with weights {weights_digest}, last published were"
                f" {self._learning.published_digest}",
            )
        left = self._groups.by_fate()
        if left["admitted"] or left["stored"]:
            facts.violation(
                "ended",
                seq,
                f"the run ended with {left['admitted']} groups admitted and {left['stored']} stored, neither"
                " trained nor dropped",
            )


def lookup(config: Mapping[str, Any], key: str, missing: Any = None) -> Any:
    """The value of a dotted key, or `missing`."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return missing
        node = cast("dict[str, Any]", node)[part]
    return node
