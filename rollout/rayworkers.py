"""Rollout workers as Ray actors, and the pool of them.

Owns the actors. Invariants: whatever was spawned here is dead when `close` returns; no call blocks the event
loop (what may block in Ray runs on the session's thread, replies come as futures); an actor's death, however
it comes about, is a WorkerGone for whoever waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import psutil

from ..statemachine.errors import ConfigRefused, TimedOut
from .engineloop import WorkerBroken
from .handing import Session, handed
from .handles import WorkerGone, WorkRaised
from .pool import WorkerPool
from .protocols import Group, GroupRequest, Published
from .worker import RolloutWorker, WorkerFacts, WorkerSettings, ignore_sigterm

KILL_SECONDS = 2.0  # for Ray to end an actor, after which its process is killed
END_SECONDS = 10.0  # for a killed process to be gone
DETERMINISTIC_GROUPS = 2  # with one worker: the one that is decoded and the next

_encode = msgspec.msgpack.encode


class RolloutConfig(Protocol):
    """The sections of a run's config that are used here; each attribute is documented there."""

    @property
    def data(self) -> Any: ...
    @property
    def reward(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def batch(self) -> Any: ...
    @property
    def rollout(self) -> Any: ...
    @property
    def learner(self) -> Any: ...
    @property
    def cluster(self) -> Any: ...


class RayRolloutPool(WorkerPool):
    """The production RolloutPool."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        session: Session,
        budget: Callable[[], bytes],
        max_prompt_tokens: int,
        reward: Callable[..., Any] | None = None,
    ) -> None:
        """`budget` reads the payload of the run's BudgetResolved event from its log, and is called once
        workers are started. `max_prompt_tokens`: the longest prompt, held-out ones included. `reward`: the
        function, where one was passed as an object. Raises ConfigRefused."""
        rollout = config.rollout
        source = config.data.source
        pickled = _pickled(reward) if reward is not None else None
        slots = max(rollout.max_concurrent, config.batch.group_size if rollout.deterministic else 1)

        def settings() -> bytes:
            return _encode(
                WorkerSettings(
                    budget=budget(),
                    model_path=config.model.path,
                    slots=slots,
                    max_tokens=max_prompt_tokens + rollout.max_new_tokens,
                    deterministic=rollout.deterministic,
                    threads=rollout.threads,
                    gpus=rollout.gpus_per_worker,
                    dtype=config.learner.compute_dtype if rollout.gpus_per_worker > 0 else "float32",
                    reward=config.reward.function,
                    reward_pickled=pickled,
                    reward_timeout_seconds=config.reward.timeout_seconds,
                    source=source,
                    source_options=dict(config.data.options),
                    sys_path=[os.path.abspath(place) for place in sys.path],
                )
            )

        if rollout.deterministic:
            groups = DETERMINISTIC_GROUPS
        else:
            groups = max(1, rollout.max_concurrent // config.batch.group_size)
        super().__init__(
            RayWorkers(session, settings, rollout.gpus_per_worker),
            workers=rollout.workers,
            groups_per_worker=groups,
            samples_per_worker=rollout.max_concurrent,
            start_seconds=config.cluster.start_seconds,
            reply_seconds=config.cluster.reply_seconds,
            max_attempts=rollout.max_attempts,
        )


class RayRolloutWorker(RolloutWorker):
    """The actor."""

    def __init__(self, settings: bytes) -> None:
        import ray

        ignore_sigterm()
        self.node = ray.get_runtime_context().get_node_id()
        super().__init__(settings)


@dataclass(frozen=True)
class StagedObject:
    """Weights in Ray's object store."""

    version: int
    digest: str
    size: int
    ref: Any


class RayWorkers:
    """Spawns actors and ends them; a WorkerSource."""

    def __init__(self, session: Session, settings: Callable[[], bytes], gpus: float) -> None:
        self._session = session
        self._settings = settings
        self._gpus = gpus
        self._spawned: list[RayHandle] = []

    async def spawn(self, index: int) -> RayHandle:
        """Begin a new actor; where it runs is the cluster's choice."""
        return await self._session.call(self._spawn)

    def _spawn(self) -> RayHandle:
        import ray

        actor = (
            ray.remote(RayRolloutWorker)
            .options(num_cpus=1, num_gpus=self._gpus or None, max_restarts=0, scheduling_strategy="SPREAD")
            .remote(self._settings())
        )
        # Kept from the first moment: whoever asked for it may have been cancelled meanwhile.
        handle = RayHandle(self._session, actor)
        self._spawned.append(handle)
        return handle

    async def stage(self, weights: Published) -> StagedObject:
        """Put weights into the object store, from which a worker reads them without a copy."""
        import ray

        ref = await self._session.call(ray.put, np.frombuffer(weights.payload, np.uint8))
        return StagedObject(weights.version, weights.digest, len(weights.payload), ref)

    async def close(self) -> None:
        """Kill every actor; bounded, idempotent."""
        await asyncio.gather(*(handle.kill() for handle in self._spawned))


class RayHandle:
    """One actor; a WorkerHandle."""

    def __init__(self, session: Session, actor: Any) -> None:
        self._session = session
        self._actor = actor
        self._process: psutil.Process | None = None  # once it is ready, and if it is on this machine
        self._live = actor.live.remote()
        self._dead = False
        self.pid: int | None = None  # once it is ready
        self.node = ""  # once it is ready

    async def ready(self) -> None:
        """See WorkerHandle."""
        import ray

        facts = msgspec.msgpack.decode(await _reply(self._actor.ready.remote()), type=WorkerFacts)
        self.pid, self.node = facts.pid, facts.node
        if facts.node == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process = psutil.Process(facts.pid)

    async def load(self, staged: StagedObject) -> None:
        """See WorkerHandle."""
        await _reply(self._actor.load.remote(staged.version, staged.digest, staged.ref))

    async def generate(self, request: GroupRequest) -> Group | None:
        """See WorkerHandle."""
        packed = await self._ask(self._actor.generate, _encode(request))
        return msgspec.msgpack.decode(packed, type=Group) if packed else None

    async def evaluate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """See WorkerHandle."""
        packed = await self._ask(self._actor.evaluate, _encode(list(requests)))
        return msgspec.msgpack.decode(packed, type=list[Group])

    async def _ask(self, method: Any, packed: bytes) -> Any:
        return await _reply(method.remote(await handed(self._session, packed)))

    def abort(self, prompt_index: int, attempt: int) -> None:
        """See WorkerHandle."""
        self._actor.abort.remote(prompt_index, attempt)

    async def gone(self) -> str:
        """See WorkerHandle."""
        try:
            await _reply(self._live)
        except (WorkerGone, WorkRaised) as error:
            self._dead = True
            return str(error)
        return "its process ended"

    async def kill(self) -> None:
        """See WorkerHandle."""
        import ray
        from ray.exceptions import RayError

        if not self._dead and ray.is_initialized():
            try:
                with contextlib.suppress(RayError, ValueError):  # it is dead already
                    await self._session.call(ray.kill, self._actor)
                async with asyncio.timeout(KILL_SECONDS):
                    await self.gone()
            except (TimeoutError, asyncio.CancelledError) as error:
                # One that is stopped does not hear Ray. On another machine that is for its own Ray to see to.
                if self._process is not None:
                    with contextlib.suppress(psutil.Error):
                        self._process.kill()
                if isinstance(error, TimedOut | asyncio.CancelledError):
                    raise
        await self._ended()

    async def _ended(self) -> None:
        """Wait until the process is no more, which is a moment after Ray says so; bounded."""
        deadline = asyncio.get_running_loop().time() + END_SECONDS
        while self._process is not None and asyncio.get_running_loop().time() < deadline:
            try:
                if self._process.status() == psutil.STATUS_ZOMBIE or not self._process.is_running():
                    return
            except psutil.Error:
                return
            await asyncio.sleep(0.01)


async def _reply(ref: Any) -> Any:
    """What an actor's method returns. Raises WorkRaised, WorkerGone."""
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[Any] = loop.create_future()
    source: Future[Any] = ref.future()

    def deliver() -> None:
        if reply.done():  # whoever waited was cancelled
            return
        error = source.exception()
        if error is None:
            reply.set_result(source.result())
        else:
            reply.set_exception(_translated(error))

    def done(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(deliver)

    # Not asyncio.wrap_future: it would cancel Ray's own future, into which Ray writes all the same.
    source.add_done_callback(done)
    return await reply


def _translated(error: BaseException) -> WorkerGone | WorkRaised:
    from ray.exceptions import RayTaskError

    if not isinstance(error, RayTaskError):
        return WorkerGone(_one_line(error))
    cause = error.cause
    if isinstance(cause, WorkerBroken):
        return WorkerGone(str(cause))
    said = str(cause) if str(cause).strip() else type(cause).__name__
    return WorkRaised(" ".join(said.split()), cause)


def _one_line(error: BaseException) -> str:
    """Ray says why an actor died over many lines; the one with the reason, if there is one."""
    if "connection error code" in str(error):
        return "its process ended unexpectedly: killed, out of memory, or crashed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        for mark in ("Worker exit detail:", "because "):
            if mark in line:
                return line.partition(mark)[2].strip()[:300]
    return f"{type(error).__name__}: {' '.join(lines)}"[:300]


def _pickled(reward: Callable[..., Any]) -> bytes:
    from ray import cloudpickle

    try:
        return cloudpickle.dumps(reward)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:  # whatever the function holds on to may refuse
        raise ConfigRefused(
            f"the reward function {getattr(reward, '__name__', reward)!r} cannot be sent to a worker "
            f"({type(error).__name__}: {error}): define it in a module, or let it hold plain values only"
        ) from error
