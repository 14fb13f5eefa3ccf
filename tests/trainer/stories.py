"""Logs made by hand: each story is a legal run, folded as it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from surefoot.rollout.packing import pack_f32, pack_i32
from surefoot.rollout.protocols import Group, GroupStore, Sample
from surefoot.statemachine import events as ev
from surefoot.statemachine.budget import BudgetInputs, batch_size_of, resolve_budget
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import EventRow, build_rows, utc_now
from surefoot.statemachine.schedule import multiplier
from surefoot.statemachine.sqllog import open_log
from surefoot.statemachine.state import RunState
from surefoot.trainer.config import load_config
from surefoot.trainer.places import Place

BASE: dict[str, Any] = {
    "data": {"source": "reasoning_gym:chain_sum", "size": 16},
    "model": {"path": "model"},
    "batch": {"prompts": 4, "group_size": 2},
    "optim": {"lr": 1e-3},
}
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
LEARNER_METRICS: dict[str, ev.Number] = {
    "policy/entropy": 0.5,
    "policy/ratio_clip_frac": 0.0,
    "policy/kl_rollout_learner": 0.0,
}


def a_group(issue: ev.Issue, rewards: Sequence[float]) -> Group:
    """A group whose every response is five tokens: ids 5 to 9, two of them by the version before."""
    version = issue.admission_version
    sample = {
        "ids": pack_i32(range(5, 10)),
        "logprobs": pack_f32([-0.5] * 5),
        "versions": pack_i32([max(0, version - 1)] * 2 + [version] * 3),
        "truncated": False,
        "text": "",
        "parts": {},
    }
    return Group(
        prompt_index=issue.prompt_index,
        attempt=issue.attempt,
        row_index=issue.prompt_index,
        prompt_ids=pack_i32([2, 3, 4]),
        temperature=1.0,
        samples=[Sample(**sample, reward=reward) for reward in rewards],
    )


class Story:
    """A run whose every event is one second after the one before."""

    def __init__(self, run: str = "a", sets: Sequence[str] = ()) -> None:
        self.run = run
        self.rows: list[EventRow] = []
        self.state = RunState()
        self.config = load_config(BASE, sets)
        config = self.config
        assert config.data.size is not None
        self.budget = resolve_budget(
            BudgetInputs(
                data_len=config.data.size,
                epochs=config.data.epochs,
                batch_prompts=config.batch.prompts,
                minibatches=config.batch.minibatches,
                passes=config.batch.passes,
                every_updates=config.sync.every_updates,
                learning_rate=config.optim.lr,
                schedule_kind=config.optim.schedule.kind,
            )
        )
        self.add(
            ev.RunCreated(
                config=config.resolved(),
                digests={"data": "d", "tokenizer": "t", "weights": "w"},
                data_len=config.data.size,
                rows_filtered=0,
                objects={},
                software={"surefoot": "0.1.0"},
            ),
            incarnation=1,
        )

    def add(self, *events: ev.Event, incarnation: int | None = None) -> list[EventRow]:
        """Append and fold."""
        made: list[EventRow] = []
        for event in events:
            time = (BEGAN + timedelta(seconds=len(self.rows))).isoformat()
            number = self.state.incarnation if incarnation is None else incarnation
            previous = self.state.hash or "0" * 64
            made += build_rows(self.run, self.state.seq, previous, number, [event], time)
            self.state.apply(made[-1])
            self.rows.append(made[-1])
        return made

    def began(self) -> Story:
        """An incarnation begins and its workers come up; the budget is committed if it is not."""
        number = self.state.incarnation + 1
        reason = ev.TakeReason.NEW if number == 1 else ev.TakeReason.DEAD
        self.add(ev.IncarnationBegan(incarnation=number, reason=reason, host="h", pid=1), incarnation=number)
        if self.state.budget is None:
            self.add(self.budget)
        ready = ev.WorkersReady(
            learner_try=self.state.learner_try,
            workers=1,
            ranks=1,
            fingerprint={},
            state_digest="s",
            update=self.state.updates,
        )
        self.add(ready)
        return self

    def save(self, place: Place) -> None:
        """Write the story into a real log, as a driver would. Events are the same, times are not."""
        place.folder.mkdir(parents=True)
        log = open_log(place.log_url, migrate=True)
        try:
            head = log.create(self.run, self.rows[0].event(), DriverIdentity.here())
            for row in self.rows[2:]:
                event = row.event()
                if isinstance(event, ev.IncarnationBegan):
                    log.release(self.run, head.incarnation)
                    head = log.take_over(self.run, DriverIdentity.here())
                else:
                    if isinstance(event, ev.CheckpointCommitted):
                        event = msgspec.structs.replace(
                            event, head_seq=head.head_seq, head_hash=head.head_hash
                        )
                    made = build_rows(
                        self.run, head.head_seq, head.head_hash, head.incarnation, [event], utc_now()
                    )
                    log.append(self.run, head.head_seq, head.incarnation, made)
                    head = log.head(self.run)
            log.release(self.run, head.incarnation)
        finally:
            log.close()

    def stored(self, rewards: Sequence[float] = (0.0, 1.0), store: GroupStore | None = None) -> str:
        """The next batch's groups are admitted and stored, in a real store if one is given."""
        state = self.state
        first, size = state.drawn, batch_size_of(self.budget, state.updates + 1)
        issues = [ev.Issue(first + i, 1, state.policy_version) for i in range(size)]
        file = f"g{state.seq:06d}"
        places = [("d", 100 * place, 100) for place in range(size)]
        if store is not None:
            made = [a_group(issue, rewards) for issue in issues]
            places = [(one.digest, one.offset, one.size) for one in store.write(file, made)]
        groups = [
            ev.StoredGroup(
                prompt_index=issue.prompt_index,
                attempt=1,
                offset=offset,
                size=size,
                digest=digest,
                rewards=list(rewards),
                lengths=[5] * len(rewards),
                truncated=[False] * len(rewards),
                oldest_versions=[state.policy_version] * len(rewards),
                newest_versions=[state.policy_version] * len(rewards),
            )
            for issue, (digest, offset, size) in zip(issues, places, strict=True)
        ]
        self.add(ev.GroupsAdmitted(groups=issues), ev.GroupsStored(file=file, groups=groups))
        return file

    def updated(
        self,
        reward: float = 0.5,
        metrics: Mapping[str, ev.Number] = LEARNER_METRICS,
        store: GroupStore | None = None,
    ) -> Story:
        """The next update: generated, trained, published if that is due."""
        self.stored(store=store)
        state, budget = self.state, self.budget
        order = [
            (group.prompt_index, group.attempt) for group in state.live.values() if group.stored is not None
        ]
        assert state.schedule is not None
        steps = [
            ev.OptimizerStep(
                optimizer_step=k,
                learning_rate=budget.learning_rate * multiplier(state.schedule, k),
                loss=0.25,
                grad_norm=1.5,
                tokens=40,
                applied=True,
            )
            for k in range(state.optimizer_steps, state.optimizer_steps + budget.minibatches * budget.passes)
        ]
        self.add(ev.UpdateBegan(update=state.updates + 1, groups=order))
        self.add(
            ev.UpdateApplied(
                update=state.updates + 1,
                learner_try=state.learner_try,
                policy_version=state.policy_version,
                groups=order,
                steps=steps,
                staleness_max=0,
                staleness_mean=0.0,
                staleness_max_updates=0,
                metrics={
                    "reward/mean": reward,
                    "reward/std_within_group": 0.7,
                    "response/length": 5.0,
                    "response/truncated_frac": 0.0,
                    **metrics,
                },
                seconds={"update": 0.25},
            )
        )
        if state.publication_due_after(state.updates):
            self.add(
                ev.WeightsPublished(
                    version=state.policy_version + 1,
                    update=state.updates,
                    digest="w",
                    bytes=10,
                    final=state.updates >= budget.updates_total,
                )
            )
        return self

    def evaluated(self, reward: float) -> Story:
        """The served policy version is evaluated."""
        self.add(
            ev.EvaluationDone(
                policy_version=self.state.policy_version,
                update=self.state.published_update,
                size=8,
                reward_mean=reward,
                length_mean=5.0,
                truncated_frac=0.0,
                seconds=0.5,
            )
        )
        return self

    def completed(self) -> Story:
        """Every update that is left, a checkpoint of the last, and the end."""
        while self.state.updates < self.budget.updates_total:
            self.updated()
        state = self.state
        self.add(
            ev.CheckpointCommitted(
                update=state.updates,
                optimizer_steps=state.optimizer_steps,
                policy_version=state.policy_version,
                path="c",
                manifest_digest="m",
                weights_digest="w",
                bytes=10,
                head_seq=state.seq,
                head_hash=state.hash,
            )
        )
        self.add(
            ev.RunCompleted(
                updates=state.updates,
                optimizer_steps=state.optimizer_steps,
                policy_version=state.policy_version,
                weights_digest="w",
            )
        )
        return self
