"""Which way bytes go to an actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from surefoot.rollout.handing import INLINE_BYTES, handed


class Calls:
    """A session that keeps what it is to call."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    async def call(self, function: Callable[..., Any], *args: Any) -> str:
        self.made.append((function, *args))
        return "a reference"


@pytest.mark.parametrize(("size", "inline"), [(0, True), (INLINE_BYTES, True), (INLINE_BYTES + 1, False)])
async def test_only_what_is_large_goes_through_the_store_on_the_sessions_thread(
    size: int, inline: bool
) -> None:
    import ray

    session, data = Calls(), bytes(size)
    assert await handed(session, data) == (data if inline else "a reference")
    assert session.made == ([] if inline else [(ray.put, data)])


def test_the_bound_is_below_the_one_at_which_ray_does_it_by_itself() -> None:
    """`max_direct_call_object_size` of Ray's configuration: 100 KiB; what is packed around it counts."""
    assert INLINE_BYTES <= 0.7 * 100 * 1024
