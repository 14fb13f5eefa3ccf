"""What a simulated driver works with: a disk, a store, workers and a learner, without torch, Ray or threads.

A learner's weights are a hash of all it was trained on, in order, so one group lost, repeated or swapped
changes every later digest and loss. Faults are drawn from the world's one seeded generator.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from surefoot.rollout.packing import pack_f32, pack_i32
from surefoot.rollout.protocols import (
    Answer,
    Group,
    GroupDone,
    GroupFailed,
    GroupRequest,
    Published,
    Row,
    Sample,
    StoredFile,
    WorkerLost,
)
from surefoot.statemachine.errors import CheckpointUnusable, GroupUnusable, LearnerGone
from surefoot.statemachine.events import CheckpointCommitted, Issue, IssueReason, OptimizerStep
from surefoot.statemachine.log import EventRow
from surefoot.statemachine.schedule import multiplier
from surefoot.statemachine.state import RunState, fold
from surefoot.trainer.protocols import LearnerReady, SavedCheckpoint, UpdateResult

from .hands import touch

if TYPE_CHECKING:
    from .world import World


STARTS_LIKELIER = 5
"""How much likelier ranks die while they are built than at another time: memory is short there."""


def hashed(*parts: object) -> str:
    """A short digest of anything that prints exactly."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


@dataclass
class Disk:
    """Group files and checkpoints; they outlive drivers."""

    groups: dict[str, list[bytes]] = field(default_factory=dict)
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    full: bool = False
    spoilt: set[str] = field(default_factory=set)  # what was damaged or deleted on purpose


@dataclass
class Faults:
    """Probabilities, all 0 by default; drawn with the world's generator."""

    worker_dies: float = 0.0
    work_raises: float = 0.0
    answer_repeats: float = 0.0
    learner_dies: float = 0.0
    slow_group: float = 0.0
    call_seconds: float = 0.0  # that a call of the log or of a file may take
    once: list[str] = field(default_factory=list)  # for the next answers: "lost", "raises" or "repeated"
    raises_on: frozenset[int] = frozenset()  # prompt indices whose work always raises
    no_spread: frozenset[int] = frozenset()  # prompt indices whose rewards are all equal


class StandInStore:
    """A GroupStore on a Disk."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def write(self, name: str, groups: Sequence[Group]) -> list[StoredFile]:
        if name in self.disk.groups:
            raise FileExistsError(name)
        if self.disk.full:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        packed = [msgspec.msgpack.encode(group) for group in groups]
        self.disk.groups[name] = packed
        return [
            StoredFile(file=name, offset=place, size=len(blob), digest=hashed(blob))
            for place, blob in enumerate(packed)
        ]

    def read(self, place: StoredFile) -> Group:
        blobs = self.disk.groups.get(place.file)
        if blobs is None or hashed(blobs[place.offset]) != place.digest:
            raise GroupUnusable(f"group file {place.file} is missing or damaged", file=place.file)
        return msgspec.msgpack.decode(blobs[place.offset], type=Group)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.disk.groups.pop(name, None)

    def names(self) -> list[str]:
        return list(self.disk.groups)


class StandInCheckpoints:
    """CheckpointFiles on a Disk."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def names(self) -> list[str]:
        return list(self.disk.checkpoints)

    def delete(self, path: str) -> None:
        self.disk.checkpoints.pop(path, None)


class StandInPool:
    """A RolloutPool of workers that answer after a while, out of order, and sometimes die."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weights: Published | None = None
        self.loaded: list[tuple[int, str]] = []
        self.is_up = False
        self.submitted: list[GroupRequest] = []
        self.drained: frozenset[str] = frozenset()
        self._queue: asyncio.Queue[Answer | None] = asyncio.Queue()
        self.slots_lost = 0  # of workers that are being replaced
        self._replacing: set[asyncio.Task[None]] = set()
        self._under_way: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._loaded = asyncio.Event()

    async def start(self) -> None:
        assert not self.is_up, "the workers were built a second time"
        self.world.require_budget()
        await asyncio.sleep(0.1)  # cancelled here, it has built none
        self.is_up = True

    def free_slots(self) -> int:
        config = self.world.config
        slots = config.rollout.workers * max(1, config.rollout.max_concurrent // config.batch.group_size)
        free = slots - len(self._under_way) - self.slots_lost
        return 0 if self.weights is None else max(0, free)

    async def _replace(self, slots: int) -> None:
        """A worker's slots are gone until another has taken its place."""
        self.slots_lost += slots
        await asyncio.sleep(self.world.random.uniform(0.1, 10.0))
        self.slots_lost -= slots
        self._queue.put_nowait(None)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        touch()
        for request in requests:
            key = (request.prompt_index, request.attempt)
            assert key not in self._under_way, f"attempt {key} was handed out twice"
            committed = self.world.issued()
            assert key in committed, f"attempt {key} was handed out before it was in the log"
            self.submitted.append(request)
            self._under_way[key] = asyncio.ensure_future(self._work(request))

    async def _work(self, request: GroupRequest) -> None:
        world, key = self.world, (request.prompt_index, request.attempt)
        faults, draw = world.faults, world.random
        while self.weights is None or self.weights.version < request.admission_version:
            await self._loaded.wait()
        weights = self.weights
        assert weights.version >= request.admission_version, f"{key} began on older weights"
        await asyncio.sleep(draw.uniform(0.5, 2.0) * (20 if draw.random() < faults.slow_group else 1))
        del self._under_way[key]
        once = faults.once.pop(0) if faults.once else ""
        if once == "lost" or draw.random() < faults.worker_dies:
            self._queue.put_nowait(WorkerLost(worker=0, because="killed"))
            config = world.config
            slots = max(1, config.rollout.max_concurrent // config.batch.group_size)
            self._replacing.add(asyncio.ensure_future(self._replace(slots)))
            self._fail(request, IssueReason.WORKER_LOST, "its worker died")
        elif (
            once == "raises" or request.prompt_index in faults.raises_on or draw.random() < faults.work_raises
        ):
            self._fail(request, IssueReason.FAILED, f"the reward raised on prompt {request.prompt_index}")
        else:
            self.answer(request, weights)
            if once == "repeated" or draw.random() < faults.answer_repeats:
                self.answer(request, weights)

    def answer(self, request: GroupRequest, weights: Published | None = None) -> None:
        """A worker answers, whether or not anybody waits for it; with the served weights unless others are
        given."""
        weights = weights or self.weights
        assert weights is not None
        done = GroupDone(worker=0, group=make_group(self.world, request, weights), seconds=1.0)
        self._queue.put_nowait(done)

    def _fail(self, request: GroupRequest, reason: IssueReason, error: str) -> None:
        self._queue.put_nowait(
            GroupFailed(
                worker=0,
                prompt_index=request.prompt_index,
                attempt=request.attempt,
                reason=reason,
                error=error,
            )
        )

    async def answers(self) -> list[Answer]:
        answers = [await self._queue.get()]
        while not self._queue.empty():
            answers.append(self._queue.get_nowait())
        return [answer for answer in answers if answer is not None]

    async def publish(self, weights: Published) -> None:
        await asyncio.sleep(0.05)
        assert self.weights is None or self.weights.version <= weights.version, "older weights were served"
        self.weights = weights
        self.loaded.append((weights.version, weights.digest))
        self._loaded.set()
        self._loaded = asyncio.Event()

    def drain(self, nodes: frozenset[str]) -> None:
        self.drained = nodes

    async def evaluate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        await asyncio.sleep(0.3)
        assert self.weights is not None
        return [make_group(self.world, request, self.weights) for request in requests]

    async def close(self) -> None:
        for task in [*self._under_way.values(), *self._replacing]:
            task.cancel()


def make_group(world: World, request: GroupRequest, weights: Published) -> Group:
    """What a worker with these weights answers: from the seeds and the weights alone."""
    samples: list[Sample] = []
    for seed in request.seeds:
        token = int(hashed(seed, weights.digest), 16) % 1000
        length = 1 + token % 4
        reward = 1.0 if request.prompt_index in world.faults.no_spread else float(seed % 2)
        samples.append(
            Sample(
                ids=pack_i32([token] * length),
                logprobs=pack_f32([-1.0] * length),
                versions=pack_i32([weights.version] * length),
                truncated=length == 4,
                text=str(token),
                reward=reward,
                parts={},
            )
        )
    return Group(
        prompt_index=request.prompt_index,
        attempt=request.attempt,
        row_index=request.row.row_index,
        prompt_ids=pack_i32([1]),
        temperature=1.0,
        samples=samples,
    )


class StandInLearner:
    """A Learner whose weights are a hash of everything it was trained on, in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state: RunState | None = None
        self.weights = ""
        self.update_held = 0
        self.executed: list[int] = []  # updates, redone ones too
        self.starts = 0
        self._alive = False
        self._snapshot: dict[str, Any] | None = None
        self._snapshot_path = ""

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset({"of ranks"} if self._alive else ())

    async def start(self, rows: Sequence[EventRow], learner_try: int) -> LearnerReady:
        self.starts += 1
        self.state = fold(rows)
        assert self.state.budget is not None, "a rank was built before the budget was committed"
        self.weights, self.update_held, self._alive = hashed("initial"), 0, True
        for _ in range(2):  # workers, which are built meanwhile, are ready between the two
            await asyncio.sleep(0.08)
            self._check_alive(STARTS_LIKELIER)
        return LearnerReady(
            ranks=self.world.config.learner.ranks,
            fingerprint=dict(self.world.fingerprint),
            state_digest=self.state.digest(),
        )

    def _check_alive(self, likelier: int = 1) -> None:
        if not self._alive or self.world.random.random() < likelier * self.world.faults.learner_dies:
            self._alive = False
            raise LearnerGone("rank 0 died", learner_try=0, rank=0)

    async def load(self, checkpoint: CheckpointCommitted) -> None:
        self._check_alive()
        saved = self.world.disk.checkpoints.get(checkpoint.path)
        if saved is None or hashed(sorted(saved.items())) != checkpoint.manifest_digest:
            raise CheckpointUnusable(f"checkpoint {checkpoint.path} is damaged", path=checkpoint.path)
        self.weights, self.update_held = saved["weights"], saved["update"]

    async def update(self, update: int, batch: Sequence[Group], rows: Sequence[EventRow]) -> UpdateResult:
        self._check_alive()
        assert self.state is not None and self.state.schedule is not None
        fold(rows, self.state)
        assert update == self.update_held + 1, f"update {update} follows {self.update_held}"
        await asyncio.sleep(self.world.learner_seconds)
        self._check_alive()
        total = self.state.total
        per_update = total.minibatches * total.passes
        content = [(g.prompt_index, [(s.ids, s.reward) for s in g.samples]) for g in batch]
        self.weights = hashed(self.weights, update, content)
        self.update_held = update
        self.executed.append(update)
        steps = [
            OptimizerStep(
                optimizer_step=step,
                learning_rate=total.learning_rate * multiplier(self.state.schedule, step),
                loss=int(hashed(self.weights, step), 16) / 2**96 + self.world.noise,
                grad_norm=1.0 + step,
                tokens=len(batch),
                applied=step not in self.world.not_finite,
                skipped_because="not_finite" if step in self.world.not_finite else None,
            )
            for step in range((update - 1) * per_update, update * per_update)
        ]
        return UpdateResult(update=update, steps=steps, metrics={}, seconds={})

    async def gather(self, version: int) -> Published:
        self._check_alive()
        return Published(
            version=version,
            update=self.update_held,
            digest=hashed("weights", self.weights),
            payload=self.weights.encode(),
        )

    async def save(self, path: str, head_seq: int, head_hash: str, served: Published | None) -> None:
        self._check_alive()
        self._snapshot = {
            "weights": self.weights,
            "update": self.update_held,
            "served": None if served is None else msgspec.msgpack.encode(served),
        }
        self._snapshot_path = path

    async def saved(self) -> SavedCheckpoint:
        await asyncio.sleep(0.5)
        self._check_alive()
        touch()
        assert self._snapshot is not None
        if self.world.disk.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        assert self._snapshot_path not in self.world.disk.checkpoints, "a checkpoint was overwritten"
        self.world.disk.checkpoints[self._snapshot_path] = self._snapshot
        return SavedCheckpoint(
            update=self._snapshot["update"],
            path=self._snapshot_path,
            manifest_digest=hashed(sorted(self._snapshot.items())),
            weights_digest=hashed("weights", self._snapshot["weights"]),
            bytes=1,
        )

    async def served(self, checkpoint: CheckpointCommitted) -> Published | None:
        blob = self.world.disk.checkpoints[checkpoint.path]["served"]
        return None if blob is None else msgspec.msgpack.decode(blob, type=Published)

    async def close(self) -> None:
        self._alive = False


class StandInPrompts:
    """Rows are numbers; the row of a prompt index is itself modulo the data's length."""

    def __init__(self, world: World) -> None:
        self.world = world

    def request(self, issue: Issue) -> GroupRequest:
        config = self.world.config
        index = issue.prompt_index % self.world.data_len
        return GroupRequest(
            prompt_index=issue.prompt_index,
            attempt=issue.attempt,
            admission_version=issue.admission_version,
            row=Row(row_index=index, prompt=str(index), prompt_ids=[1], fields={}),
            seeds=[1000 * issue.prompt_index + sample for sample in range(config.batch.group_size)],
            temperature=1.0,
            max_new_tokens=4,
        )

    def evaluation(self) -> list[GroupRequest]:
        asked = [self.request(Issue(10_000 + index, 1, 0)) for index in range(len(self.world.held_out_seeds))]
        return [
            msgspec.structs.replace(request, seeds=[seed])
            for request, seed in zip(asked, self.world.held_out_seeds, strict=True)
        ]
