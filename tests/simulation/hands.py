"""The hands of one simulated driver: everything it does to the world goes through them.

Several drivers may live in one world. Each has hands of its own, found by the tasks that it started, so that
one dies while another lives on, and one stands still while another works. The invariant: a dead driver's
hands reach nothing, and a call that was begun is done even if nobody waits for it any more, as a thread's is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any


class Crashed(BaseException):
    """The driver's process is gone, as by SIGKILL."""


class Hands:
    """What one driver touches the world with."""

    def __init__(self) -> None:
        self.dead = False
        self.calls = 0  # blocking calls begun
        self.on_call: Callable[[int], None] | None = None
        self.takes: Callable[[], float] = lambda: 0.0  # seconds of the next blocking call
        self._free_at = 0.0  # by the loop's clock

    def touch(self) -> None:
        """Raise Crashed if this driver is no more."""
        if self.dead:
            raise Crashed

    def hold(self, seconds: float) -> None:
        """Let no blocking call go on for so long: a slow disk, or a process that was stopped."""
        self._free_at = max(self._free_at, asyncio.get_running_loop().time() + seconds)

    async def blocking(self, function: Callable[..., Any], *args: Any) -> Any:
        """A blocking call, as the driver's parts make it."""
        return await asyncio.shield(asyncio.ensure_future(self._call(function, *args)))

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.touch()
        self.calls += 1
        if self.on_call is not None:
            self.on_call(self.calls)
        await asyncio.sleep(self.takes())
        loop = asyncio.get_running_loop()
        while (seconds := self._free_at - loop.time()) > 0:  # noqa: ASYNC110 - it may be held again
            await asyncio.sleep(seconds)
        self.touch()
        return function(*args)


HANDS: ContextVar[Hands | None] = ContextVar("hands", default=None)
"""Those of the driver that the running task belongs to."""


def touch() -> None:
    """Raise Crashed in a task of a driver that is no more."""
    hands = HANDS.get()
    if hands is not None:
        hands.touch()


def die() -> None:
    """The driver that the running task belongs to dies here."""
    hands = HANDS.get()
    assert hands is not None, "no driver is at work here"
    hands.dead = True
    raise Crashed
