"""The two threads of a run's driver: one for the log, one for files. Nothing else of it blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Blocking calls off the event loop; the log's in order on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._log = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-log")
        self._files = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-files")

    async def log(self, function: Callable[..., T], *args: Any) -> T:
        """Run on the log's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._log, function, *args)

    async def files(self, function: Callable[..., T], *args: Any) -> T:
        """Run on the files' thread."""
        return await asyncio.get_running_loop().run_in_executor(self._files, function, *args)

    def close(self) -> None:
        """End both once what they are doing is done."""
        self._log.shutdown(wait=True)
        self._files.shutdown(wait=True)
