"""What Ray's actors are handed: small bytes travel with the call, large ones through the object store.

Owns nothing. Invariant: to hand something over never blocks the event loop. Ray itself puts an argument
of more than 100 KiB into its store, on the thread that makes the call, and stands there for as long as its
raylet hangs; so what is large goes there first, on the session's thread, whose calls have a bound.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

INLINE_BYTES = 64 * 1024


class Session(Protocol):
    """The thread that calls Ray."""

    def call(self, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Make a call that may block."""
        ...


async def handed(session: Session, data: bytes) -> Any:
    """The bytes, or a reference to them: the same for an actor's method, whose arguments Ray looks up."""
    if len(data) <= INLINE_BYTES:
        return data
    import ray

    return await session.call(ray.put, data)
