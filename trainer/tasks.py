"""One small thing about asyncio tasks that several modules need."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel what is still running and wait until it has ended; errors of others are theirs to raise."""
    live = [task for task in tasks if task is not None]
    for task in live:
        task.cancel()
    if live:
        await asyncio.gather(*live, return_exceptions=True)
