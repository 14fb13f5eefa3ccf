"""A world without torch, Ray or threads in which the production driver lives and dies.

The log and the disk outlive a driver; pool, learner and hands are its own and die with it. Faults are drawn
from one seeded generator at the places where the driver touches the world.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from surefoot.rollout.protocols import GroupStore, Published
from surefoot.statemachine.budget import resolve_budget
from surefoot.statemachine.crashpoints import watched
from surefoot.statemachine.events import BudgetResolved, RunCreated
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import EventLog, EventRow, RunHead
from surefoot.statemachine.memorylog import MemoryLog
from surefoot.statemachine.state import RunState, fold
from surefoot.trainer.config import Config, load_config
from surefoot.trainer.driver import Driver
from surefoot.trainer.ending import Ending
from surefoot.trainer.journal import Journal
from surefoot.trainer.parts import CheckpointFiles, Parts
from surefoot.trainer.plan import budget_inputs

from .hands import HANDS, Crashed, Hands, die, touch
from .standins import (
    Disk,
    Faults,
    StandInCheckpoints,
    StandInLearner,
    StandInPool,
    StandInPrompts,
    StandInStore,
    hashed,
)
from .virtual import run_virtually

__all__ = [
    "Crashed",
    "Faults",
    "World",
    "budget_of",
    "crash_at",
    "die",
    "ledger",
    "small_config",
    "touch",
    "trained",
]


def small_config(**sections: dict[str, Any]) -> Config:
    """A config of a small run; sections are merged over it."""
    tree: dict[str, Any] = {
        "seed": 7,
        "data": {"source": "object:rows", "epochs": 1},
        "model": {"path": "model"},
        "batch": {"prompts": 2, "group_size": 2},
        "rollout": {"workers": 2, "max_concurrent": 4, "max_new_tokens": 4},
        "sync": {"every_updates": 1, "max_staleness": 1},
        "checkpoint": {"every_updates": 3, "keep": 2},
        "optim": {"lr": 0.5},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return load_config(tree)


def budget_of(config: Config, data_len: int) -> BudgetResolved:
    """The budget of a config and a number of rows."""
    return resolve_budget(budget_inputs(config, data_len))


class LogInReach:
    """A run's log as one driver reaches it: with hands that may be dead, and with the world looking on."""

    def __init__(self, log: EventLog, world: World) -> None:
        self._log, self._world = log, world

    def append(self, run_id: str, expected_seq: int, incarnation: int, rows: Sequence[EventRow]) -> None:
        touch()
        self._log.append(run_id, expected_seq, incarnation, rows)
        if self._world.on_commit is not None:
            self._world.on_commit(rows)

    def read(self, run_id: str, after_seq: int = 0, limit: int | None = None) -> Iterable[EventRow]:
        return self._log.read(run_id, after_seq, limit)

    def heartbeat(self, run_id: str, incarnation: int) -> None:
        touch()
        self._log.heartbeat(run_id, incarnation)
        self._world.heartbeats_at.append(asyncio.get_running_loop().time())

    def hurry(self, seconds: float) -> None:
        self._world.hurried_seconds.append(seconds)

    def release(self, run_id: str, incarnation: int) -> None:
        touch()
        self._log.release(run_id, incarnation)


class World:
    """Everything that outlives a driver, and the parts of the one that came last."""

    def __init__(
        self,
        config: Config | None = None,
        data_len: int = 8,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.config = config or small_config()
        self.data_len = data_len
        self.budget = budget_of(self.config, data_len)
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.disk = Disk()
        self.log: EventLog = MemoryLog(
            seconds=lambda: 0.0, now=lambda: "2026-01-01T00:00:00+00:00", lives=lambda d: False
        )
        self.fingerprint = {"ranks": "1"}
        self.noise = 0.0
        self.learner_seconds = 1.0  # that an update takes
        self.not_finite: frozenset[int] = frozenset()
        self.held_out_seeds: Sequence[int] = (10_000, 10_001, 10_002)  # one held-out row each
        self.run_id = "sim"
        self.draining: frozenset[str] = frozenset()  # machines that the cluster will take away
        self.on_commit: Callable[[Sequence[EventRow]], None] | None = None
        self.pool: StandInPool
        self.learner: StandInLearner
        self.hands: Hands
        self.driver: Driver
        self.lives = 0
        self.waited_for: list[str] = []  # in words, of every life
        self.heartbeats_at: list[float] = []  # by the loop's clock, which begins anew with every life
        self.hurried_seconds: list[
            float
        ] = []  # how long the log may still wait for its database, as it is told

    # -- what stand-ins ask ---------------------------------------------------------------------------

    def rows(self) -> list[EventRow]:
        """The whole log."""
        return list(self.log.read(self.run_id))

    def state(self) -> RunState:
        """The fold of the whole log."""
        return fold(self.rows())

    def events(self, kind: str | None = None) -> list[Any]:
        """Decoded events, of one type if it is named."""
        return [row.event() for row in self.rows() if kind is None or row.type == kind]

    def issued(self) -> set[tuple[int, int]]:
        """Every attempt that the log has issued."""
        return {
            (issue.prompt_index, issue.attempt)
            for row in self.rows()
            if row.type in ("GroupsAdmitted", "GroupsReissued")
            for issue in row.event().groups  # type: ignore[attr-defined]
        }

    def require_budget(self) -> None:
        assert any(row.type == "BudgetResolved" for row in self.rows()), "a worker before the budget"

    # -- what a kind of world may have of its own -----------------------------------------------------

    def store(self) -> GroupStore:
        """The group store as a new driver opens it."""
        return StandInStore(self.disk)

    def checkpoints(self) -> CheckpointFiles:
        """The checkpoint folders as a new driver opens them."""
        return StandInCheckpoints(self.disk)

    def new_learner(self) -> StandInLearner:
        """The learner of a new driver."""
        return StandInLearner(self)

    def initial_weights(self) -> Published:
        """Policy version 0."""
        return Published(version=0, update=0, digest=hashed("weights", hashed("initial")), payload=b"initial")

    # -- lives ----------------------------------------------------------------------------------------

    def claim(self, **options: Any) -> RunHead:
        """Create the run, or take it over."""
        self.lives += 1
        identity = DriverIdentity(host="sim", pid=self.lives, process_start="0")
        if self.lives == 1:
            first = RunCreated(
                config=self.config.resolved(),
                digests={},
                data_len=self.data_len,
                rows_filtered=0,
                objects={},
                software={},
            )
            return self.log.create(self.run_id, first, identity)
        return self.log.take_over(self.run_id, identity, **options)

    def new_driver(self, head: RunHead | None = None, **options: Any) -> Driver:
        """Begin an incarnation, or go on with the one that `head` claimed: fresh parts on the old log and
        disk. The tasks that are started from here on belong to the new driver."""
        head = head or self.claim(**options)
        self.hands = Hands()
        if self.faults.call_seconds:
            self.hands.takes = lambda: self.random.uniform(0.0, self.faults.call_seconds)
        HANDS.set(self.hands)
        self.pool, self.learner = StandInPool(self), self.new_learner()
        journal = Journal(
            LogInReach(self.log, self),  # type: ignore[arg-type]
            head,
            fold(self.rows()),
            blocking=self.hands.blocking,
            now=lambda: "2026-01-01T00:00:00+00:00",
        )
        parts = Parts(
            config=self.config,
            journal=journal,
            pool=self.pool,
            learner=self.learner,
            store=self.store(),
            checkpoints=self.checkpoints(),
            prompts=StandInPrompts(self),
            initial_weights=self.initial_weights,
            blocking=self.hands.blocking,
            draining=self._draining,
            node="of the driver",
            ending=Ending(self.config.preempt.grace_seconds),
            waiting=self.waited_for.append,
        )
        self.driver = Driver(parts, self.budget)
        return self.driver

    async def _draining(self) -> frozenset[str]:
        return self.draining

    def run(self, **options: Any) -> Any:
        """One life, to whatever end; returns the outcome. Raises Crashed and what the driver raises."""

        async def life() -> Any:
            return await self.new_driver(**options).run()

        return run_virtually(life())


def crash_at(world: World, name: str, nth: int = 1) -> None:
    """One life that dies at the n-th time it reaches the place."""
    reached = 0

    def watcher(place: str) -> None:
        nonlocal reached
        touch()
        if place == name:
            reached += 1
            if reached == nth:
                die()

    with watched(watcher):
        try:
            world.run()
        except Crashed:
            return
    raise AssertionError(f"{name} was reached {reached} times, not {nth}")


def trained(world: World) -> list[int]:
    """Prompt indices in the order they were trained."""
    return [index for event in world.events("UpdateApplied") for index, _ in event.groups]


def ledger(world: World) -> list[object]:
    """What a run whose config is deterministic must share with the one that nobody touched: which groups in
    which update; learning rate, loss and gradient norm of every optimizer step; the weights published."""
    updates: list[object] = [
        (
            event.update,
            [index for index, _ in event.groups],
            [(step.learning_rate, step.loss, step.grad_norm) for step in event.steps],
        )
        for event in world.events("UpdateApplied")
    ]
    return updates + [(e.version, e.update, e.digest) for e in world.events("WeightsPublished")]
