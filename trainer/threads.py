"""The two threads of a run's driver: one for the log, one for files. Nothing else of it blocks.

Owns what they are doing, so that it can be waited for with a bound: a thread that hangs cannot be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from .ending import RAY, Ending

T = TypeVar("T")


class Threads:
    """Blocking calls off the event loop; the log's in order on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._log = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-log")
        self._files = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-files")
        self._under_way: set[Future[Any]] = set()

    async def log(self, function: Callable[..., T], *args: Any) -> T:
        """Run on the log's thread."""
        return await self._on(self._log, function, *args)

    async def files(self, function: Callable[..., T], *args: Any) -> T:
        """Run on the files' thread."""
        return await self._on(self._files, function, *args)

    async def _on(self, thread: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        future = thread.submit(function, *args)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return await asyncio.wrap_future(future)

    async def end(self, ending: Ending) -> None:
        """As `close`; but what hangs is left behind once the grace time of a run that stops is over."""
        done = await ending.wait(*map(_over, self._under_way.copy()), by=RAY)
        self._log.shutdown(wait=done)
        self._files.shutdown(wait=done)

    def close(self) -> None:
        """End both once what they are doing is done."""
        self._log.shutdown(wait=True)
        self._files.shutdown(wait=True)


def _over(future: Future[Any]) -> asyncio.Future[None]:
    """Done once the other is, whatever came of it; to give this one up does not take that one back."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(lambda: over.done() or over.set_result(None))

    future.add_done_callback(tell)
    return over
