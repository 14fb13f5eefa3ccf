"""An event loop whose clock jumps to the next timer: no sleep takes time, and a hang is an error at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
LIMIT_SECONDS = 5_000.0
"""Heartbeats tick for ever; a life that has taken this long is stuck."""


class Deadlock(AssertionError):
    """Nothing is ready and no timer is set: the program would wait for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing can run."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and not self._stopping:  # type: ignore[attr-defined]
            scheduled = [handle for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
            if not scheduled:
                raise Deadlock("nothing is ready and no timer is set")
            if self._now > LIMIT_SECONDS:
                raise Deadlock(f"only timers have run for {LIMIT_SECONDS} seconds")
            self._now = max(self._now, min(handle.when() for handle in scheduled))
        super()._run_once()  # type: ignore[misc]


def _leave_the_dead_alone(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A driver that dies leaves tasks whose errors nobody takes: of those there is nothing to say."""
    if "never retrieved" not in context["message"]:
        loop.default_exception_handler(context)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a fresh virtual loop; cancels whatever is left."""
    loop = VirtualLoop()
    loop.set_exception_handler(_leave_the_dead_alone)
    try:
        return loop.run_until_complete(main)
    finally:
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
