"""Worker processes that a test holds by their strings: each answers and dies when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.rollout.handles import WorkerGone, WorkRaised
from surefoot.rollout.pool import WorkerPool
from surefoot.rollout.protocols import Group, GroupRequest, Published, Row

from .groups import a_group, a_sample

START_SECONDS, REPLY_SECONDS = 100.0, 600.0


def request(prompt_index: int, attempt: int = 1, samples: int = 2) -> GroupRequest:
    return GroupRequest(
        prompt_index=prompt_index,
        attempt=attempt,
        admission_version=0,
        row=Row(row_index=prompt_index, prompt="1+1=", prompt_ids=[1, 2], fields={}),
        seeds=list(range(samples)),
        temperature=1.0,
        max_new_tokens=4,
    )


def weights(version: int = 0) -> Published:
    return Published(version=version, update=version, digest=f"d{version}", payload=b"w" * 10)


@dataclass(frozen=True)
class Staged:
    version: int
    size: int


class FakeWorker:
    """Begins alive and obedient; see its switches."""

    def __init__(self, index: int, source: FakeSource) -> None:
        self.index = index
        self.node = f"node {len(source.spawned)}"
        self.killed = False
        self.loads: list[int] = []
        self.aborted: list[tuple[int, int]] = []
        self.work: dict[tuple[int, int], asyncio.Future[Group | None]] = {}
        self.evaluations: list[list[int]] = []
        self.hang_at_load = False
        self.before_load: Callable[[int], None] = source.before_load
        self.evaluate_as: Callable[[Sequence[GroupRequest]], list[Group] | None] = _answers
        self._source = source
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, because: str = "out of memory") -> None:
        if not self._end.done():
            self._end.set_result(because)

    def finish(self, prompt_index: int, attempt: int = 1) -> None:
        self.work.pop((prompt_index, attempt)).set_result(a_group(prompt_index, attempt))

    def raise_in(self, prompt_index: int, error: str, attempt: int = 1) -> None:
        self.work.pop((prompt_index, attempt)).set_exception(WorkRaised(error))

    async def _unless_dead(self, work: asyncio.Future[Any]) -> Any:
        await asyncio.wait({work, self._end}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise WorkerGone(self._end.result())
        return work.result()

    async def ready(self) -> None:
        ready = asyncio.ensure_future(self._source.ready(self))
        try:
            await self._unless_dead(ready)
        finally:
            ready.cancel()

    async def load(self, staged: Staged) -> None:
        self.before_load(staged.version)
        if self.hang_at_load:
            await self._unless_dead(asyncio.get_running_loop().create_future())
        await asyncio.sleep(0)
        if self._end.done():
            raise WorkerGone(self._end.result())
        self.loads.append(staged.version)

    async def generate(self, request: GroupRequest) -> Group | None:
        future = asyncio.get_running_loop().create_future()
        self.work[request.prompt_index, request.attempt] = future
        return await self._unless_dead(future)

    async def evaluate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        self.evaluations.append([request.prompt_index for request in requests])
        found = self.evaluate_as(requests)
        if found is None:
            await self._unless_dead(asyncio.get_running_loop().create_future())
        assert found is not None
        await asyncio.sleep(0)
        return found

    def abort(self, prompt_index: int, attempt: int) -> None:
        self.aborted.append((prompt_index, attempt))

    async def gone(self) -> str:
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        self.killed = True
        self.die("killed")
        await asyncio.sleep(0)


def _answers(requests: Sequence[GroupRequest]) -> list[Group]:
    return [a_group(one.prompt_index, 1, [a_sample(str(one.prompt_index))]) for one in requests]


class FakeSource:
    """Every worker that was ever spawned, in order."""

    def __init__(self) -> None:
        self.spawned: list[FakeWorker] = []
        self.ready: Callable[[FakeWorker], Any] = self._at_once
        self.before_load: Callable[[int], None] = lambda version: None
        self.closed = 0

    async def _at_once(self, worker: FakeWorker) -> None:
        pass

    async def spawn(self, index: int) -> FakeWorker:
        await asyncio.sleep(0)
        worker = FakeWorker(index, self)
        self.spawned.append(worker)
        return worker

    async def stage(self, weights: Published) -> Staged:
        return Staged(weights.version, len(weights.payload))

    async def close(self) -> None:
        self.closed += 1
        for worker in self.spawned:
            await worker.kill()

    @property
    def living(self) -> list[FakeWorker]:
        return [worker for worker in self.spawned if not worker._end.done()]


def a_pool(source: FakeSource, workers: int = 2, groups: int = 2, **options: Any) -> WorkerPool:
    return WorkerPool(
        source,
        workers=workers,
        groups_per_worker=groups,
        **{
            "samples_per_worker": 4,
            "start_seconds": START_SECONDS,
            "reply_seconds": REPLY_SECONDS,
            "max_attempts": 3,
            **options,
        },
    )


async def settle() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)
