"""The learner as the driver uses it: a group of ranks, rebuilt whole when one is lost.

Owns one learner try at a time, and the checkpoint under way. Invariant: a checkpoint's manifest is written
here, after every rank's files are durable, and nothing counts before its event is committed.

Ray must be up. Nothing here is imported by commands that do not train.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..rollout.handing import Session
from ..rollout.protocols import Group, Published
from ..statemachine.crashpoints import crashpoint
from ..statemachine.errors import LearnerGone, RunFailedError
from ..statemachine.events import CheckpointCommitted
from ..statemachine.log import EventRow
from .checkpoints import Checkpoints, Manifest, ManifestFile, ServedVersion, SnapshotBegun
from .config import Config
from .protocols import LearnerReady, SavedCheckpoint, UpdateResult
from .ranks import Ranks, Whereabouts

BACKSTOP_SECONDS = 30.0

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class _UnderWay:
    """The checkpoint whose snapshot is taken and whose files are being written."""

    path: str
    begun: SnapshotBegun
    head_seq: int
    head_hash: str
    served: Published | None


class RayLearner:
    """A `Learner` of `learner.ranks` actors. `storage`: the run's storage, a path or an fsspec URL."""

    def __init__(self, config: Config, storage: str, *, session: Session) -> None:
        self._options, self._cluster = config.learner, config.cluster
        self._session = session
        self._storage = storage
        self._checkpoints = Checkpoints(storage)
        self._up: Ranks | None = None
        self._under_way: _UnderWay | None = None

    @property
    def places(self) -> list[Whereabouts]:
        """Where the ranks run, by rank."""
        return list(self._up.places) if self._up is not None else []

    @property
    def nodes(self) -> frozenset[str]:
        """The machines that the ranks are on, by Ray's ids."""
        return frozenset(place.node for place in self.places)

    @property
    def _ranks(self) -> Ranks:
        if self._up is None:
            raise LearnerGone("the learner has not been started")
        return self._up

    async def start(self, rows: Sequence[EventRow], learner_try: int) -> LearnerReady:
        """Build every rank from the budget event in `rows`; initial weights loaded. See Learner."""
        await self.close()
        options = self._options
        deadline = time.monotonic() + self._cluster.start_seconds
        self._up = ranks = Ranks(self._session, learner_try, self._cluster.reply_seconds)
        # Ranks give up on each other later than the driver does on them: its word on who hangs counts.
        timeout_seconds = self._cluster.reply_seconds + BACKSTOP_SECONDS
        try:
            await ranks.spawn(options.ranks, options.gpus_per_rank, deadline)
            addresses = [place.address for place in ranks.places]
            one_host = len(set(addresses)) == 1
            address = "127.0.0.1" if one_host else addresses[0]
            (port,) = await ranks.ask("open_store", address, timeout_seconds, deadline=deadline, first=1)
            place = {
                "ranks": options.ranks,
                "address": address,
                "port": port,
                "timeout_seconds": timeout_seconds,
                "one_host": one_host,
            }
            packed = await ranks.handed(_encode(list(rows)))
            own = [({**place, "rank": rank}, packed) for rank in range(options.ranks)]
            return (await ranks.ask_each("start", own, deadline=deadline))[0]
        except BaseException:
            await self.close()
            raise

    async def load(self, checkpoint: CheckpointCommitted) -> None:
        """Load a committed checkpoint on every rank. Raises CheckpointUnusable."""
        await self._ranks.ask("load", self._storage, checkpoint)

    async def update(self, update: int, batch: Sequence[Group], rows: Sequence[EventRow]) -> UpdateResult:
        """Execute one update; see Learner."""
        ranks = self._ranks
        groups = await ranks.handed(_encode(list(batch)))
        events = await ranks.handed(_encode(list(rows)))
        results: list[UpdateResult] = await ranks.ask("update", update, groups, events)
        first = results[0]
        for rank, result in enumerate(results):
            if result.steps != first.steps:
                raise RunFailedError(
                    f"update {update}: rank {rank} took steps {result.steps}, rank 0 {first.steps}",
                    update=update,
                    rank=rank,
                )
        return first

    async def gather(self, version: int) -> Published:
        """The current weights, whole, as policy version `version`."""
        return (await self._ranks.ask("gather", version))[0]

    async def save(self, path: str, head_seq: int, head_hash: str, served: Published | None) -> None:
        """Take a snapshot for the new checkpoint `path`; see Learner. Raises FileExistsError, OSError."""
        await asyncio.to_thread(self._checkpoints.make_folder, path)
        begun = await self._ranks.ask("begin_save", self._storage, path)
        self._under_way = _UnderWay(path, begun[0], head_seq, head_hash, served)

    async def saved(self) -> SavedCheckpoint:
        """Wait until the snapshot's files are durable and its manifest written."""
        under_way = self._under_way
        if under_way is None:
            raise RunFailedError("no checkpoint is under way")
        self._under_way = None
        path, begun = under_way.path, under_way.begun
        by_rank: list[list[ManifestFile]] = await self._ranks.ask("finish_save", self._storage, path)
        files = [file for own in by_rank for file in own]
        served: ServedVersion | None = None
        if under_way.served is not None:
            served, file = await asyncio.to_thread(self._checkpoints.add_served, path, under_way.served)
            files.append(file)
        crashpoint("checkpoint.files")
        manifest = Manifest(
            update=begun.update,
            optimizer_steps=begun.optimizer_steps,
            head_seq=under_way.head_seq,
            head_hash=under_way.head_hash,
            weights_digest=begun.weights_digest,
            ranks=len(by_rank),
            served=served,
            files=sorted(files, key=lambda file: file.name),
        )
        digest, size = await asyncio.to_thread(self._checkpoints.add_manifest, path, manifest)
        crashpoint("checkpoint.manifest")
        return SavedCheckpoint(
            update=begun.update,
            path=path,
            manifest_digest=digest,
            weights_digest=begun.weights_digest,
            bytes=size,
        )

    async def served(self, checkpoint: CheckpointCommitted) -> Published | None:
        """The published weights that the checkpoint keeps. Raises CheckpointUnusable."""
        return await asyncio.to_thread(self._checkpoints.served, checkpoint)

    async def close(self) -> None:
        """End every rank; idempotent, bounded."""
        ranks, self._up, self._under_way = self._up, None, None
        if ranks is not None:
            await ranks.end()
