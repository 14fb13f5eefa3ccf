"""Small valid runs, event by event, for tests to look at and to spoil.

A `Scenario` writes what a right driver would have written and keeps just enough of its own account to do so;
it shares no code with the fold or the audit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from surefoot.statemachine.budget import batch_size_of, is_publication, minibatch_sizes, schedule_of
from surefoot.statemachine.events import (
    BudgetResolved,
    CheckpointCommitted,
    DropReason,
    EvaluationDone,
    FilesRetired,
    GroupsAdmitted,
    GroupsDropped,
    GroupsReissued,
    GroupsStored,
    IncarnationBegan,
    Issue,
    IssueReason,
    LearnerLost,
    OptimizerStep,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunPreempted,
    RunStopped,
    StoredGroup,
    TakeReason,
    UpdateApplied,
    UpdateBegan,
    UpdatesRedone,
    WeightsPublished,
    WorkersReady,
)
from surefoot.statemachine.schedule import learning_rates

from .budgets import budget
from .spoilable import SpoilableLog


class ScenarioGroup(msgspec.Struct):
    """A group that is neither trained nor dropped."""

    prompt_index: int
    attempt: int
    admission_version: int
    stored: StoredGroup | None = None
    file: str = ""


class Scenario(SpoilableLog):
    """Twelve prompts in batches of two; two minibatches; published every two updates: six updates, three
    publications, twelve optimizer steps. Changed as asked; budget inputs by their names."""

    def __init__(
        self,
        *,
        max_staleness: int = 1,
        on_stale: str = "wait",
        group_size: int = 2,
        eval_every_updates: int | None = None,
        groups_keep: str = "covered",
        **budget_inputs: Any,
    ) -> None:
        super().__init__()
        sizes = {"data_len": 12, "epochs": 1, "batch_prompts": 2, "every_updates": 2, "minibatches": 2}
        self.budget: BudgetResolved = budget(**(sizes | budget_inputs))
        self.max_staleness = max_staleness
        self.on_stale = on_stale
        self.group_size = group_size
        self.eval_every_updates = eval_every_updates
        self.groups_keep = groups_keep
        self.learner_try = 0
        self.live: dict[int, ScenarioGroup] = {}
        self.drawn = 0
        self.dropped = 0
        self.updates = 0
        self.optimizer_steps = 0
        self.policy_version = 0
        self.update_of_version = [0]
        self.checkpoints: dict[str, int] = {}
        self.files_trained: dict[str, int] = {}  # file -> update that trained its only group
        self._fresh = 0

    # -- lives ----------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        total = self.budget
        return {
            "seed": 0,
            "data": {"epochs": total.epochs, "max_prompts": total.max_prompts},
            "batch": {
                "prompts": total.batch_prompts,
                "group_size": self.group_size,
                "minibatches": total.minibatches,
                "passes": total.passes,
                "tail": total.tail,
            },
            "optim": {"lr": total.learning_rate, "max_optimizer_steps": total.max_optimizer_steps},
            "sync": {
                "every_updates": total.every_updates,
                "max_staleness": self.max_staleness,
                "on_stale": self.on_stale,
            },
            "eval": {"every_updates": self.eval_every_updates},
            "groups": {"keep": self.groups_keep},
        }

    def create(self) -> Scenario:
        """Creation and the first incarnation: a log without a budget."""
        self.add(
            RunCreated(
                config=self.config(),
                digests={"data": "d0", "tokenizer": "t0", "weights": "w0"},
                data_len=self.budget.data_len,
                rows_filtered=0,
                objects={},
                software={"surefoot": "0.1.0"},
            )
        )
        return self.take_over(TakeReason.NEW, ready=False)

    def begin(self) -> Scenario:
        """Up to the first WorkersReady."""
        self.create().add(self.budget)
        return self.ready()

    def take_over(
        self, reason: TakeReason = TakeReason.DEAD, *, ready: bool = True, **changes: Any
    ) -> Scenario:
        """A new incarnation; with `ready`, redo and workers, too."""
        self.incarnation += 1
        self.learner_try = 1
        self.add(
            IncarnationBegan(incarnation=self.incarnation, reason=reason, host="host", pid=100, **changes)
        )
        return self.redo().ready() if ready else self

    def redo(self) -> Scenario:
        """Execute again what no checkpoint holds."""
        checkpoint = self.newest_checkpoint()
        if checkpoint < self.updates:
            self.add(
                UpdatesRedone(
                    learner_try=self.learner_try,
                    checkpoint_update=checkpoint,
                    first_update=checkpoint + 1,
                    last_update=self.updates,
                    same_execution=True,
                    loss_deviation=0.0,
                    grad_norm_deviation=0.0,
                )
            )
        return self

    def ready(self) -> Scenario:
        if self.learner_try == 0:
            self.learner_try = 1
        return self.add(
            WorkersReady(
                learner_try=self.learner_try,
                workers=1,
                ranks=1,
                fingerprint={"device": "cpu"},
                state_digest="s",
                update=self.updates,
            )
        )

    def lose_learner(self) -> Scenario:
        """The learner group dies and is rebuilt."""
        self.add(LearnerLost(learner_try=self.learner_try, because="rank 0 died"))
        self.learner_try += 1
        return self.redo().ready()

    # -- groups ---------------------------------------------------------------------------------------

    def room(self) -> int:
        total = self.budget
        window = (self.max_staleness + self.policy_version + 1) * total.every_updates * total.batch_prompts
        needed = total.prompts_total - total.prompts_unused
        return min(min(window, needed) - (self.drawn - self.dropped), total.prompts_total - self.drawn)

    def admit(self, groups: int | None = None) -> Scenario:
        """Draw as many prompts as there is room for, or as asked."""
        groups = self.room() if groups is None else groups
        issues = [Issue(self.drawn + i, 1, self.policy_version) for i in range(groups)]
        for issue in issues:
            self.live[issue.prompt_index] = ScenarioGroup(
                issue.prompt_index, issue.attempt, issue.admission_version
            )
        self.drawn += groups
        return self.add(GroupsAdmitted(groups=issues)) if issues else self

    def reissue(self, reason: IssueReason, *indices: int) -> Scenario:
        """Issue groups again as a new attempt."""
        issues: list[Issue] = []
        for index in indices:
            group = self.live[index]
            stale = reason is IssueReason.STALE
            version = self.policy_version if stale else group.admission_version
            self.live[index] = ScenarioGroup(index, group.attempt + 1, version)
            issues.append(Issue(index, group.attempt + 1, version))
        return self.add(GroupsReissued(groups=issues, reason=reason))

    def store(
        self,
        *indices: int,
        rewards: Sequence[float] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Scenario:
        """Store groups, each in a file of its own; those named, or all that are not stored."""
        for index in indices or [i for i, group in self.live.items() if group.stored is None]:
            group, size = self.live[index], self.group_size
            self._fresh += 1
            group.file = f"g{self._fresh:04d}"
            group.stored = StoredGroup(
                prompt_index=index,
                attempt=group.attempt,
                offset=0,
                size=10,
                digest="x",
                rewards=list(rewards or [float(sample % 2) for sample in range(size)]),
                lengths=list(lengths or [5] * size),
                truncated=[False] * size,
                oldest_versions=[group.admission_version] * size,
                newest_versions=[self.policy_version] * size,
            )
            self.add(GroupsStored(file=group.file, groups=[group.stored]))
        return self

    def drop(self, *indices: int, reason: DropReason = DropReason.NO_SPREAD) -> Scenario:
        for index in indices:
            del self.live[index]
        self.dropped += len(indices)
        return self.add(GroupsDropped(prompt_indices=list(indices), reason=reason))

    # -- learning -------------------------------------------------------------------------------------

    def batch(self) -> list[tuple[int, int]]:
        """The next batch in draw order."""
        size = min(batch_size_of(self.budget, self.updates + 1), len(self.live))
        return [(group.prompt_index, group.attempt) for group in list(self.live.values())[:size]]

    def began(self, batch: Sequence[tuple[int, int]] | None = None) -> Scenario:
        return self.add(UpdateBegan(update=self.updates + 1, groups=list(batch or self.batch())))

    def applied(self, batch: Sequence[tuple[int, int]] | None = None) -> Scenario:
        """The update whose batch began."""
        groups = list(batch or self.batch())
        stored = [self.live[index].stored for index, _ in groups]
        versions = [v for group in stored if group is not None for v in group.oldest_versions]
        update, total = self.updates + 1, self.budget
        minibatches = minibatch_sizes(len(groups), total.minibatches) * total.passes
        ids = range(self.optimizer_steps, self.optimizer_steps + len(minibatches))
        rates = learning_rates(total.learning_rate, schedule_of(total), ids)
        oldest = min(versions)
        self.add(
            UpdateApplied(
                update=update,
                learner_try=self.learner_try,
                policy_version=self.policy_version,
                groups=groups,
                steps=[
                    OptimizerStep(
                        optimizer_step=k,
                        learning_rate=rate,
                        loss=0.5,
                        grad_norm=1.0,
                        tokens=5 * self.group_size * prompts,
                        applied=True,
                    )
                    for k, rate, prompts in zip(ids, rates, minibatches, strict=True)
                ],
                staleness_max=self.policy_version - oldest,
                staleness_mean=self.policy_version - sum(versions) / len(versions),
                staleness_max_updates=self.updates - self.update_of_version[oldest],
                metrics={},
                seconds={},
            )
        )
        for index, _ in groups:
            self.files_trained[self.live.pop(index).file] = update
        self.updates = update
        self.optimizer_steps += len(minibatches)
        return self

    def update(self, batch: Sequence[tuple[int, int]] | None = None) -> Scenario:
        """One update, and its publication where it is due."""
        self.began(batch).applied(batch)
        return self.publish() if is_publication(self.budget, self.updates) else self

    def publish(self, *, final: bool | None = None) -> Scenario:
        self.policy_version += 1
        self.update_of_version.append(self.updates)
        return self.add(
            WeightsPublished(
                version=self.policy_version,
                update=self.updates,
                digest=f"w{self.updates}",
                bytes=100,
                final=self.updates == self.budget.updates_total if final is None else final,
            )
        )

    def evaluate(self) -> Scenario:
        return self.add(
            EvaluationDone(
                policy_version=self.policy_version,
                update=self.update_of_version[-1],
                size=4,
                reward_mean=0.5,
                length_mean=5.0,
                truncated_frac=0.0,
                seconds=0.1,
            )
        )

    # -- files ----------------------------------------------------------------------------------------

    def newest_checkpoint(self) -> int:
        return max(self.checkpoints.values(), default=0)

    def checkpoint(self) -> Scenario:
        self._fresh += 1
        path = f"u{self.updates}-{self._fresh}"
        self.checkpoints[path] = self.updates
        return self.add(
            CheckpointCommitted(
                update=self.updates,
                optimizer_steps=self.optimizer_steps,
                policy_version=self.policy_version,
                path=path,
                manifest_digest="m",
                weights_digest=f"w{self.updates}",
                bytes=100,
                head_seq=0,
                head_hash="",
            )
        )

    def retire(self, keep: int = 1) -> Scenario:
        """Retire all but the newest checkpoints, and the group files that those cover."""
        paths = sorted(self.checkpoints, key=lambda path: self.checkpoints[path])
        old = paths[: max(0, len(paths) - keep)]
        for path in old:
            del self.checkpoints[path]
        covered = min(self.checkpoints.values(), default=0)
        files = [file for file, update in self.files_trained.items() if update <= covered]
        for file in files:
            del self.files_trained[file]
        return self.add(FilesRetired(checkpoints=old, group_files=files))

    # -- ends -----------------------------------------------------------------------------------------

    def work(self, updates: int | None = None) -> Scenario:
        """Admit, store and update, as many updates as asked or as are left."""
        for _ in range(self.budget.updates_total - self.updates if updates is None else updates):
            self.admit().store().update()
        return self

    def complete(self) -> Scenario:
        return self.add(
            RunCompleted(
                updates=self.updates,
                optimizer_steps=self.optimizer_steps,
                policy_version=self.policy_version,
                weights_digest=f"w{self.update_of_version[-1]}",
            )
        )

    def stop(self) -> Scenario:
        """Drop what is left, publish and save the last update, and stop short."""
        self.drop(*list(self.live), reason=DropReason.UNUSED)
        if self.update_of_version[-1] < self.updates:
            self.publish(final=True)
        if self.newest_checkpoint() < self.updates:
            self.checkpoint()
        return self.add(
            RunStopped(
                updates=self.updates,
                optimizer_steps=self.optimizer_steps,
                policy_version=self.policy_version,
                weights_digest=f"w{self.update_of_version[-1]}",
                updates_short=self.budget.updates_total - self.updates,
                optimizer_steps_short=self.budget.optimizer_steps_total - self.optimizer_steps,
                because="no prompt is left to draw",
            )
        )

    def preempt(self) -> Scenario:
        return self.add(
            RunPreempted(
                updates=self.updates,
                optimizer_steps=self.optimizer_steps,
                checkpoint_update=self.newest_checkpoint(),
                because="SIGTERM",
            )
        )

    def fail(self) -> Scenario:
        return self.add(
            RunFailed(
                code="run_failed",
                error="prompt 9 failed 3 times",
                updates=self.updates,
                optimizer_steps=self.optimizer_steps,
            )
        )


def whole_run(**options: Any) -> Scenario:
    """A run from its creation to its completion, in one life."""
    return Scenario(**options).begin().work().checkpoint().complete()
