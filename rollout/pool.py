"""The rollout pool: which attempt is with which worker, and what becomes of it when a worker is lost.

Owns the assignment of attempts to workers and the last published weights. Invariants: every attempt that was
submitted is answered exactly once (by its group, by what went wrong, or by its worker's loss), unless a newer
attempt of the same group has taken its place; a worker gets no work before the last published weights are
loaded; at every moment each place has a worker, a replacement under way, or the pool has failed.

It knows workers only as `WorkerHandle`; Ray's stand in `rayworkers`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..statemachine.errors import RunFailedError, SurefootError, TimedOut
from ..statemachine.events import IssueReason
from .handles import Staged, WorkerGone, WorkerHandle, WorkerSource, WorkRaised
from .protocols import Answer, Group, GroupDone, GroupFailed, GroupRequest, Published, WorkerLost

REPLACEMENTS_IN_A_ROW = 3
"""So many replacements that do not come up, without one that does in between, fail the run."""

CONFIRM_SECONDS = 60.0
CONFIRM_BYTES_PER_SECOND = 50e6
"""A worker confirms new weights within CONFIRM_SECONDS and the time these bytes take at this speed."""

Key = tuple[int, int]  # prompt index, attempt


@dataclass(eq=False)
class _Worker:
    index: int
    handle: WorkerHandle
    version: int = -1  # of the weights that it has confirmed
    lost: bool = False
    held: dict[Key, GroupRequest] = field(default_factory=dict)
    tasks: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    evaluating: bool = False


@dataclass(eq=False)
class _Chunk:
    """Some of an evaluation's requests."""

    first: int
    requests: Sequence[GroupRequest]
    failures: int = 0


class WorkerPool:
    """See RolloutPool for what it does; all of it on one event loop."""

    def __init__(
        self,
        source: WorkerSource,
        *,
        workers: int,
        groups_per_worker: int,
        samples_per_worker: int,
        start_seconds: float,
        reply_seconds: float,
        max_attempts: int,
    ) -> None:
        self._source = source
        self._places = workers
        self._groups_per_worker = groups_per_worker
        self._samples_per_worker = samples_per_worker
        self._start_seconds = start_seconds
        self._reply_seconds = reply_seconds
        self._max_attempts = max_attempts
        self._workers: dict[int, _Worker] = {}  # by place; a place without one is being filled
        self._backlog: deque[GroupRequest] = deque()  # attempts that no worker has room for
        self._draining: frozenset[str] = frozenset()  # machines that are going away
        self._staged: Staged | None = None
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        self._background: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()  # a worker came or went, or the pool failed
        self._failures_in_a_row = 0
        self._failure: SurefootError | None = None
        self._closed = False

    # -- the protocol ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring every worker up, without weights. Raises TimedOut, RunFailedError, or what a worker raised
        (a model or reward that it refuses)."""
        bringing = [asyncio.ensure_future(self._bring_up(index)) for index in range(self._places)]
        try:
            done, waiting = await asyncio.wait(
                bringing, timeout=self._start_seconds, return_when=asyncio.FIRST_EXCEPTION
            )
            up = [task.result() for task in done]
            if waiting:
                raise TimedOut(
                    f"{len(waiting)} of {self._places} rollout workers were not up within "
                    f"cluster.start_seconds = {self._start_seconds:g}: allow more, or use fewer",
                    waited_for="rollout workers",
                    seconds=self._start_seconds,
                )
        except BaseException as error:
            await _cancel(*bringing)
            ended = [task for task in bringing if not task.cancelled() and task.exception() is None]
            await asyncio.gather(*(task.result().handle.kill() for task in ended))
            if isinstance(error, WorkRaised) and isinstance(error.cause, SurefootError):
                raise error.cause from None
            if isinstance(error, WorkRaised | WorkerGone):
                raise RunFailedError(f"a rollout worker could not start: {error}") from error
            raise
        for worker in up:
            self._seat(worker)

    def free_slots(self) -> int:
        """How many more groups could start now; 0 before the first publication is loaded."""
        return max(0, sum(self._room(worker) for worker in self._loaded()) - len(self._backlog))

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Hand requests to the freest workers; those beyond their room wait here."""
        for request in requests:
            self._forget_older(request.prompt_index, request.attempt)
            self._backlog.append(request)
        self._dispatch()

    async def answers(self) -> list[Answer]:
        """All that are there, waiting for one; none: a replaced worker's slots have come free.

        Raises RunFailedError once the pool has failed.
        """
        if self._failure is not None:
            raise self._failure
        found = [await self._answers.get()]
        while not self._answers.empty():
            found.append(self._answers.get_nowait())
        if self._failure is not None:
            raise self._failure
        return [answer for answer in found if answer is not None]

    async def publish(self, weights: Published) -> None:
        """Send weights to every worker under way; those that do not confirm in time are replaced.

        A replacement loads them before it gets work. Returns once each worker has confirmed or is lost.
        """
        try:
            async with asyncio.timeout(self._reply_seconds):
                staged = await self._source.stage(weights)
        except TimeoutError as error:
            raise TimedOut(
                f"policy version {weights.version} could not be handed to the cluster within "
                f"cluster.reply_seconds = {self._reply_seconds:g}",
                waited_for="publication",
                seconds=self._reply_seconds,
            ) from error
        self._staged = staged
        await asyncio.gather(*(self._load(worker) for worker in list(self._workers.values())))

    def drain(self, nodes: frozenset[str]) -> None:
        """These machines are going away: their workers get nothing new, and are replaced once they are idle.

        `nodes` are all of them as of now.
        """
        self._draining = nodes
        for worker in list(self._workers.values()):
            self._leave_if_draining(worker)

    def _drains(self, worker: _Worker) -> bool:
        return bool(worker.handle.node) and worker.handle.node in self._draining

    def _leave_if_draining(self, worker: _Worker) -> None:
        if self._drains(worker) and not worker.held and not worker.evaluating:
            self._lose(worker, f"its node {worker.handle.node} is being drained")

    async def evaluate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Answer held-out rows with the version that is loaded; retried on another worker if one dies.

        Raises RunFailedError for rows that fail `rollout.max_attempts` times, or with the pool.
        """
        found: dict[int, list[Group]] = {}
        pending = deque(self._chunks(requests))
        running: dict[asyncio.Task[list[Group] | None], tuple[_Worker, _Chunk]] = {}
        try:
            while pending or running:
                if self._failure is not None:
                    raise self._failure
                self._changed.clear()
                for worker in self._loaded():
                    if pending and not worker.evaluating and not self._drains(worker):
                        chunk, worker.evaluating = pending.popleft(), True
                        running[asyncio.ensure_future(self._evaluate(worker, chunk))] = (worker, chunk)
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait({changed, *running}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                for task in [task for task in running if task.done()]:
                    worker, chunk = running.pop(task)
                    worker.evaluating = False
                    self._leave_if_draining(worker)
                    groups = task.result()
                    if groups is None:
                        pending.append(chunk)
                    else:
                        found[chunk.first] = groups
        finally:
            for worker, _ in running.values():
                worker.evaluating = False
            await _cancel(*running)
        return [group for first in sorted(found) for group in found[first]]

    async def close(self) -> None:
        """End every worker; idempotent, bounded."""
        self._closed = True
        await _cancel(*self._background)  # whoever works, watches or replaces
        self._workers.clear()
        await self._source.close()

    # -- workers --------------------------------------------------------------------------------------

    async def _bring_up(self, index: int) -> _Worker:
        handle = await self._source.spawn(index)
        try:
            await handle.ready()
        except BaseException:
            await handle.kill()
            raise
        return _Worker(index, handle)

    def _seat(self, worker: _Worker) -> None:
        self._workers[worker.index] = worker
        self._in_background(self._watch(worker))
        self._changed.set()

    async def _watch(self, worker: _Worker) -> None:
        self._lose(worker, await worker.handle.gone())

    def _lose(self, worker: _Worker, because: str) -> None:
        """Answer for all that a worker held, end what is left of it, and begin to replace it."""
        if worker.lost or self._closed:
            return
        worker.lost = True
        del self._workers[worker.index]
        self._answers.put_nowait(WorkerLost(worker=worker.index, because=because))
        for request in worker.held.values():
            self._answers.put_nowait(_failed(worker, request, IssueReason.WORKER_LOST, because))
        worker.held.clear()  # what it may still return is nobody's any more
        self._in_background(worker.handle.kill())
        self._in_background(self._replace(worker.index))
        self._changed.set()

    async def _replace(self, index: int) -> None:
        """Fill a place again: a worker with the last published weights, or the pool fails."""
        while True:
            try:
                async with asyncio.timeout(self._start_seconds):
                    worker = await self._bring_up_loaded(index)
                break
            except (SurefootError, TimeoutError) as error:
                said = str(error) or f"not up within cluster.start_seconds = {self._start_seconds:g}"
                self._failures_in_a_row += 1
                if self._failures_in_a_row >= REPLACEMENTS_IN_A_ROW:
                    self._fail(
                        RunFailedError(
                            f"a rollout worker could not be replaced {self._failures_in_a_row} times in a "
                            f"row; the last: {said}",
                            worker=index,
                        )
                    )
                    return
        self._failures_in_a_row = 0
        self._seat(worker)
        self._dispatch()
        self._answers.put_nowait(None)  # its slots are free, and nobody else would say so

    async def _bring_up_loaded(self, index: int) -> _Worker:
        worker = await self._bring_up(index)
        try:
            # Until it has the last ones: others may be published while it loads.
            while self._staged is not None and worker.version < self._staged.version:
                staged = self._staged
                await worker.handle.load(staged)
                worker.version = staged.version
        except BaseException:
            await worker.handle.kill()
            raise
        return worker

    async def _load(self, worker: _Worker) -> None:
        staged = self._staged
        assert staged is not None
        seconds = min(self._reply_seconds, CONFIRM_SECONDS + staged.size / CONFIRM_BYTES_PER_SECOND)
        try:
            async with asyncio.timeout(seconds):
                await worker.handle.load(staged)
        except TimeoutError:
            self._lose(worker, f"did not confirm policy version {staged.version} within {seconds:g} s")
        except (WorkerGone, WorkRaised) as error:
            self._lose(worker, str(error))
        else:
            worker.version = staged.version
            self._changed.set()
            self._dispatch()

    def _fail(self, error: SurefootError) -> None:
        if self._failure is None and not self._closed:
            self._failure = error
            self._answers.put_nowait(None)
            self._changed.set()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)
        return task

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failure = RunFailedError(f"the rollout pool failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    # -- work -----------------------------------------------------------------------------------------

    def _loaded(self) -> list[_Worker]:
        return [worker for _, worker in sorted(self._workers.items()) if worker.version >= 0]

    def _room(self, worker: _Worker) -> int:
        return 0 if self._drains(worker) else self._groups_per_worker - len(worker.held)

    def _dispatch(self) -> None:
        while self._backlog and (workers := self._loaded()):
            freest = max(workers, key=self._room)
            if self._room(freest) <= 0:
                return
            request = self._backlog.popleft()
            key = (request.prompt_index, request.attempt)
            freest.held[key] = request
            task = freest.tasks[key] = self._in_background(self._work(freest, key, request))
            task.add_done_callback(lambda _, tasks=freest.tasks, key=key: tasks.pop(key, None))

    async def _work(self, worker: _Worker, key: Key, request: GroupRequest) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer: Answer | None = None
        try:
            async with asyncio.timeout(self._reply_seconds):
                group = await worker.handle.generate(request)
            if group is not None:
                answer = GroupDone(worker=worker.index, group=group, seconds=loop.time() - began)
        except TimeoutError:
            self._lose(
                worker,
                f"did not answer group {key[0]} within cluster.reply_seconds = {self._reply_seconds:g}",
            )
        except WorkerGone as error:
            self._lose(worker, str(error))
        except WorkRaised as error:
            answer = _failed(worker, request, IssueReason.FAILED, str(error))
        if worker.held.pop(key, None) is not None:
            if answer is not None:
                self._answers.put_nowait(answer)
            self._leave_if_draining(worker)
            self._dispatch()

    def _forget_older(self, prompt_index: int, attempt: int) -> None:
        """A newer attempt has begun: end the work on older ones. They are answered no more."""
        self._backlog = deque(
            request
            for request in self._backlog
            if request.prompt_index != prompt_index or request.attempt >= attempt
        )
        for worker in self._workers.values():
            for key in [key for key in worker.held if key[0] == prompt_index and key[1] < attempt]:
                del worker.held[key]
                worker.tasks[key].cancel()
                worker.handle.abort(*key)

    # -- evaluation -----------------------------------------------------------------------------------

    def _chunks(self, requests: Sequence[GroupRequest]) -> list[_Chunk]:
        """Requests in order, cut so that each chunk fits a worker and every worker gets some."""
        samples = sum(len(request.seeds) for request in requests)
        bound = min(self._samples_per_worker, -(-samples // self._places))
        chunks: list[_Chunk] = []
        first, held = 0, 0
        for index, request in enumerate(requests):
            if held and held + len(request.seeds) > bound:
                chunks.append(_Chunk(first, requests[first:index]))
                first, held = index, 0
            held += len(request.seeds)
        if held:
            chunks.append(_Chunk(first, requests[first:]))
        return chunks

    async def _evaluate(self, worker: _Worker, chunk: _Chunk) -> list[Group] | None:
        """The chunk's groups, or None if it has to be tried again."""
        try:
            async with asyncio.timeout(self._reply_seconds):
                return await worker.handle.evaluate(chunk.requests)
        except TimeoutError:
            because = f"did not answer an evaluation within cluster.reply_seconds = {self._reply_seconds:g}"
            self._lose(worker, because)
        except WorkerGone as error:
            because = str(error)
            self._lose(worker, because)
        except WorkRaised as error:
            because = str(error)
        chunk.failures += 1
        if chunk.failures >= self._max_attempts:
            raise RunFailedError(
                f"held-out rows could not be evaluated {chunk.failures} times "
                f"(rollout.max_attempts = {self._max_attempts}): {because}"
            )
        return None


def _failed(worker: _Worker, request: GroupRequest, reason: IssueReason, error: str) -> GroupFailed:
    return GroupFailed(
        worker=worker.index,
        prompt_index=request.prompt_index,
        attempt=request.attempt,
        reason=reason,
        error=error,
    )


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
