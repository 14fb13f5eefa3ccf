"""The learner as the driver uses it: a group of Ray actors, one a rank, rebuilt whole when one is lost.

Owns the actors of one learner try. Invariants: every wait has a bound; once a rank has died, hung or failed,
all of them are killed before `LearnerGone` is raised, so that no rank of an older try can answer; a
checkpoint's manifest is written here, after every rank's files are durable.

Ray must be up. Nothing here is imported by commands that do not train.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ..rollout.protocols import Group, Published
from ..statemachine.crashpoints import crashpoint
from ..statemachine.errors import LearnerGone, RunFailedError, SurefootError
from ..statemachine.events import CheckpointCommitted
from ..statemachine.log import EventRow
from .checkpoints import Checkpoints, Manifest, ManifestFile, ServedVersion
from .config import Config
from .protocols import LearnerReady, SavedCheckpoint, UpdateResult

LAST_WORDS_SECONDS = 5.0
"""How long the other ranks are listened to once one has failed: the first to fail is rarely the cause."""
END_SECONDS = 10.0

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class _UnderWay:
    """The checkpoint whose snapshot is taken and whose files are being written."""

    path: str
    begun: Any  # SnapshotBegun
    head_seq: int
    head_hash: str
    served: Published | None


class RayLearner:
    """A `Learner` of `learner.ranks` actors. `storage`: the run's storage, a path or an fsspec URL."""

    def __init__(self, config: Config, storage: str) -> None:
        self._options, self._cluster = config.learner, config.cluster
        self._storage = storage
        self._checkpoints = Checkpoints(storage)
        self._actors: list[Any] = []
        self._try = 0
        self._under_way: _UnderWay | None = None

    @property
    def checkpoints(self) -> Checkpoints:
        """The folders that it writes."""
        return self._checkpoints

    async def start(self, rows: Sequence[EventRow], learner_try: int) -> LearnerReady:
        """Build every rank from the budget event in `rows`; initial weights loaded. See Learner."""
        import ray

        from .rankactor import FILES, RankActor

        await self.close()
        self._try = learner_try
        deadline = time.monotonic() + self._cluster.start_seconds
        options = self._options
        # Without a name: a dead driver's actors stand in nobody's way.
        actor_class = ray.remote(
            num_cpus=1,
            num_gpus=options.gpus_per_rank,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={FILES: 1},
        )(RankActor)
        try:
            self._actors = [actor_class.remote() for _ in range(options.ranks)]
            places = await self._ask("where", deadline=deadline)
            one_host = len({address for address, _ in places}) == 1
            address = "127.0.0.1" if one_host else places[0][0]
            timeout = self._cluster.reply_seconds
            (port,) = await self._ask("open_store", address, timeout, deadline=deadline, ranks=1)
            place = {
                "ranks": options.ranks,
                "address": address,
                "port": port,
                "timeout_seconds": timeout,
                "one_host": one_host,
            }
            packed = ray.put(_encode(list(rows)))
            own = [({**place, "rank": rank}, packed) for rank in range(options.ranks)]
            ready = await self._ask_each("start", own, deadline=deadline)
        except BaseException:
            await self.close()
            raise
        return ready[0]

    async def load(self, checkpoint: CheckpointCommitted) -> None:
        """Load a committed checkpoint on every rank. Raises CheckpointUnusable."""
        await self._ask("load", self._storage, checkpoint)

    async def update(self, update: int, batch: Sequence[Group], rows: Sequence[EventRow]) -> UpdateResult:
        """Execute one update; see Learner."""
        import ray

        results: list[UpdateResult] = await self._ask(
            "update", update, ray.put(_encode(list(batch))), _encode(list(rows))
        )
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
        return (await self._ask("gather", version))[0]

    async def save(self, path: str, head_seq: int, head_hash: str, served: Published | None) -> None:
        """Take a snapshot for the new checkpoint `path`; see Learner. Raises FileExistsError, OSError."""
        await asyncio.to_thread(self._checkpoints.make_folder, path)
        begun = await self._ask("begin_save", self._storage, path)
        self._under_way = _UnderWay(path, begun[0], head_seq, head_hash, served)

    async def saved(self) -> SavedCheckpoint:
        """Wait until the snapshot's files are durable and its manifest written."""
        under_way = self._under_way
        if under_way is None:
            raise RunFailedError("no checkpoint is under way")
        self._under_way = None
        path, begun = under_way.path, under_way.begun
        by_rank: list[list[ManifestFile]] = await self._ask("finish_save", self._storage, path)
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
        """Kill every rank and wait, within a bound, until Ray says that they are dead."""
        import ray

        actors, self._actors, self._under_way = self._actors, [], None
        if not actors or not ray.is_initialized():
            return
        for actor in actors:
            ray.kill(actor)
        await asyncio.wait([_reply(actor.where.remote()) for actor in actors], timeout=END_SECONDS)

    # -- calls ----------------------------------------------------------------------------------------

    async def _ask(
        self, method: str, *arguments: Any, deadline: float | None = None, ranks: int | None = None
    ) -> list[Any]:
        """Call a method of every rank, or of the first few, with the same arguments."""
        asked = len(self._actors[:ranks])
        return await self._ask_each(method, [arguments] * asked, deadline=deadline)

    async def _ask_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline: float | None = None
    ) -> list[Any]:
        """The answers of all, by rank. Raises a rank's own SurefootError, or LearnerGone with all killed."""
        if not self._actors:
            raise LearnerGone(f"{method}: the learner is not up", learner_try=self._try)
        actors = self._actors
        seconds = self._cluster.reply_seconds if deadline is None else max(0.0, deadline - time.monotonic())
        replies = [
            _reply(getattr(actor, method).remote(*own))
            for actor, own in zip(actors, arguments, strict=False)  # the first few may be asked alone
        ]
        _, silent = await asyncio.wait(replies, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        if any(_error_of(reply) for reply in replies):
            silent = (await asyncio.wait(silent, timeout=LAST_WORDS_SECONDS))[1] if silent else silent
        elif silent:
            ranks = [rank for rank, reply in enumerate(replies) if reply in silent]
            await self._give_up(actors)
            raise LearnerGone(
                f"learner ranks {ranks} did not answer {method} within {seconds:g} s",
                learner_try=self._try,
                rank=ranks[0],
            )
        errors = [(rank, error) for rank, reply in enumerate(replies) if (error := _error_of(reply))]
        if not errors:
            return [reply.result() for reply in replies]
        own = [error for _, error in errors if isinstance(error, SurefootError)]
        if own and len(own) == len(errors) and not silent:
            raise own[0]
        await self._give_up(actors)
        # A rank whose peer died fails, too; the one that died is the cause.
        rank, error = min(errors, key=lambda found: (not _is_death(found[1]), found[0]))
        what = "died" if _is_death(error) else "failed"
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise LearnerGone(
            f"learner rank {rank} {what} in {method}: {reason}", learner_try=self._try, rank=rank
        ) from error

    async def _give_up(self, actors: list[Any]) -> None:
        if actors is self._actors:  # else it was closed, or started again, meanwhile
            await self.close()


def _reply(ref: Any) -> asyncio.Future[Any]:
    """A Ray reference as a future of this loop; nobody need ask for its error."""
    future = asyncio.wrap_future(ref.future())
    future.add_done_callback(partial(_error_of))
    return future


def _error_of(reply: asyncio.Future[Any]) -> BaseException | None:
    """A finished reply's error, as its rank raised it."""
    if not reply.done() or reply.cancelled():
        return None
    error = reply.exception()
    cause = getattr(error, "cause", None)  # Ray wraps what a rank raised
    return cause if isinstance(cause, SurefootError) else error


def _is_death(error: BaseException) -> bool:
    from ray.exceptions import RayActorError

    return isinstance(error, RayActorError)
