"""The end of a run that was asked to stop: one deadline, and every wait of the run knows it.

Owns when the run was asked. Invariant: once it was, no wait that goes through here lasts beyond its share of
the grace time, the waits that were under way by then included.

The shares are cut for the worst case, in which Ray's head hangs, the database is away, and nothing ends by
itself. Where all is well each takes a moment, and what a checkpoint has is nearly all of the grace time.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

GRACE_SECONDS = 30.0

# By which share of the grace time, counted from the asking, what is over.
CHECKPOINT = 0.84  # the last checkpoint: committed or given up
LOG = 0.85  # the log's own patience with its database
EVENT = 0.88  # the last event: committed or not
WORKERS = 0.91  # ending workers and ranks, and every call to Ray
RAY = 0.94  # leaving Ray; what is left of a local one is killed then
PROCESS = 0.96  # everything, the process of the command line included

MOMENT_SECONDS = 0.05  # that every wait has, however late it is: what ends at once is not given up


class Ending:
    """One run's."""

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        self.grace_seconds = grace_seconds  # from the config, once that is read
        self._asked_at: float | None = None  # by the loop's clock
        self._asked = asyncio.Event()
        self._paused_at: float | None = None

    def ask(self) -> None:
        """The run is to stop: its grace time begins now. The first asking counts."""
        if self._asked_at is None:
            self._asked_at = asyncio.get_running_loop().time()
            self._asked.set()

    def pause(self) -> None:
        """The run has stopped; what the program does until it leaves the run is not of its grace time."""
        self._paused_at = asyncio.get_running_loop().time()

    def resume(self) -> None:
        """The program leaves: what is still to be ended has what was left of the grace time."""
        if self._asked_at is not None and self._paused_at is not None:
            self._asked_at += asyncio.get_running_loop().time() - max(self._paused_at, self._asked_at)
        self._paused_at = None

    @property
    def asked(self) -> bool:
        """Whether the run was asked to stop."""
        return self._asked_at is not None

    def left(self, share: float) -> float:
        """Seconds until this share of the grace time is over, at least 0; infinite if nobody has asked."""
        if self._asked_at is None:
            return math.inf
        over = self._asked_at + share * self.grace_seconds
        return max(0.0, over - asyncio.get_running_loop().time())

    async def wait(self, *awaited: asyncio.Future[Any], by: float, seconds: float = math.inf) -> bool:
        """Wait until all are done, for at most so many seconds, and not beyond the share `by` of the grace
        time, which may begin meanwhile. Whether all are done; their errors are theirs, nothing is cancelled.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            while live := {future for future in awaited if not future.done()}:
                left = max(self.left(by), began + MOMENT_SECONDS - loop.time())
                left = min(left, began + seconds - loop.time())
                if left <= 0:
                    return False
                listening: set[asyncio.Future[Any]] = live if self.asked else live | {asked}
                await asyncio.wait(
                    listening,
                    timeout=None if math.isinf(left) else left,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            return True
        finally:
            asked.cancel()

    async def cancel(self, *tasks: asyncio.Task[Any] | None, by: float, seconds: float = math.inf) -> bool:
        """Cancel what is still running and wait for it as `wait` does. Whether all of it has ended; what it
        raised, then or before, is looked at by whoever asks, and is not printed as unseen."""
        there = [task for task in tasks if task is not None]
        for task in there:
            task.add_done_callback(_look_at)
            task.cancel()  # of no effect on one that is done
        return await self.wait(*there, by=by, seconds=seconds)


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
