"""The actors of one learner try, seen from the driver: asked all at once, ended all together.

Owns the actors. Invariants: every wait has a bound; once a rank has died, hung or failed, all of them are
ended before `LearnerGone` is raised, so that no rank of an older try can answer; no call blocks the event
loop (what may block in Ray runs on the session's thread, replies come as futures).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import psutil

from ..rollout.handing import Session, handed
from ..statemachine.errors import LearnerGone, SurefootError

LAST_WORDS_SECONDS = 5.0  # for the other ranks, once one has failed: the first to fail is rarely the cause
END_SECONDS = 10.0  # for killed processes to be gone
POLL_SECONDS = 0.01


class Whereabouts(NamedTuple):
    """Where an actor runs."""

    address: str  # of its node
    node: str  # Ray's id of it
    pid: int


class Ranks:
    """Any number of learner ranks. `reply_seconds`: the bound of a call that has no deadline."""

    def __init__(self, session: Session, learner_try: int, reply_seconds: float) -> None:
        self._session = session
        self._try = learner_try
        self._reply_seconds = reply_seconds
        self._actors: list[Any] = []
        self._processes: list[psutil.Process] = []  # of actors on this machine
        self.places: list[Whereabouts] = []

    async def spawn(self, ranks: int, gpus_per_rank: float, deadline: float) -> None:
        """Bring the actors up, and learn where they are. Raises LearnerGone."""
        await self._session.call(self._spawn, ranks, gpus_per_rank)
        self.places = [Whereabouts(*place) for place in await self.ask("where", deadline=deadline)]
        import ray

        here = ray.get_runtime_context().get_node_id()
        with contextlib.suppress(psutil.NoSuchProcess):  # the next call to it will say so
            self._processes = [psutil.Process(place.pid) for place in self.places if place.node == here]

    def _spawn(self, ranks: int, gpus_per_rank: float) -> None:
        import ray

        from .rankactor import FILES, RankActor

        # Without a name: a dead driver's actors stand in nobody's way.
        remote: Any = ray.remote
        make = remote(
            num_cpus=1,
            num_gpus=gpus_per_rank or None,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={FILES: 1},
        )(RankActor)
        for _ in range(ranks):
            self._actors.append(make.remote())  # kept at once: whoever asked may be cancelled meanwhile

    async def handed(self, data: bytes) -> Any:
        """What ranks are about to be handed, as an argument."""
        return await handed(self._session, data)

    async def ask(
        self, method: str, *arguments: Any, deadline: float | None = None, first: int | None = None
    ) -> list[Any]:
        """Call a method of every rank, or of the `first` few, with the same arguments."""
        asked = len(self._actors[:first])
        return await self.ask_each(method, [arguments] * asked, deadline=deadline)

    async def ask_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline: float | None = None
    ) -> list[Any]:
        """The answers by rank. Raises a SurefootError that ranks raised, or LearnerGone with all ended."""
        if not self._actors:
            raise LearnerGone(f"{method}: the learner is not up", learner_try=self._try)
        seconds = self._reply_seconds if deadline is None else max(0.0, deadline - time.monotonic())
        replies = [
            _reply(getattr(actor, method).remote(*own))
            for actor, own in zip(self._actors, arguments, strict=False)
        ]
        _, silent = await asyncio.wait(replies, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        failed = any(_error_of(reply) for reply in replies)
        if failed and silent:
            silent = (await asyncio.wait(silent, timeout=LAST_WORDS_SECONDS))[1]
        errors = [(rank, error) for rank, reply in enumerate(replies) if (error := _error_of(reply))]
        if not errors and not silent:
            return [reply.result() for reply in replies]
        own = [error for _, error in errors if isinstance(error, SurefootError)]
        if own and len(own) == len(errors) and not silent:
            raise own[0]
        await self.end()
        if not errors:
            ranks = [rank for rank, reply in enumerate(replies) if reply in silent]
            raise LearnerGone(
                f"learner ranks {ranks} did not answer {method} within {seconds:g} s",
                learner_try=self._try,
                rank=ranks[0],
            )
        # A rank whose peer has died fails, too; the one that died is the cause.
        rank, error = min(errors, key=lambda found: (not _is_death(found[1]), found[0]))
        raise LearnerGone(
            f"learner rank {rank} {'died' if _is_death(error) else 'failed'} in {method}: {_one_line(error)}",
            learner_try=self._try,
            rank=rank,
        ) from error

    async def end(self) -> None:
        """Kill every actor and wait until it is dead; bounded, idempotent."""
        import ray

        actors, self._actors = self._actors, []
        if not actors or not ray.is_initialized():
            return
        try:
            await self._session.call(_kill, actors)
        finally:
            # A process that is stopped does not hear Ray, which may hang itself. psutil kills none that only
            # has the same number.
            for process in self._processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        await asyncio.to_thread(_wait_until_gone, self._processes)


def _wait_until_gone(processes: Sequence[psutil.Process]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(actors: Sequence[Any]) -> None:
    import ray
    from ray.exceptions import RayError

    for actor in actors:
        with contextlib.suppress(RayError, ValueError):  # it is dead already
            ray.kill(actor)


def _reply(ref: Any) -> asyncio.Future[Any]:
    """What an actor's method returns, as a future of this loop; nobody need ask for its error."""
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[Any] = loop.create_future()
    reply.add_done_callback(_error_of)
    source: Future[Any] = ref.future()

    def deliver() -> None:
        if reply.done():
            return
        error = source.exception()
        if error is None:
            reply.set_result(source.result())
        else:
            reply.set_exception(error)

    def done(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(deliver)

    # Not asyncio.wrap_future: it would cancel Ray's own future, into which Ray writes all the same.
    source.add_done_callback(done)
    return reply


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


def _one_line(error: BaseException) -> str:
    """Ray tells a story; the line with the reason, where there is one."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        said = " ".join(str(cause).split())
        return f"{type(cause).__name__}: {said}"[:300]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        for mark in ("Worker exit detail:", "because "):
            if mark in line:
                return line.partition(mark)[2].strip()[:300]
    return f"{type(error).__name__}: {' '.join(lines)}"[:300]
