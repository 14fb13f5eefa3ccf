"""A Ray that does not answer is not waited for for ever, and holds up nobody else; without Ray."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from surefoot.statemachine.errors import ConfigRefused, TimedOut
from surefoot.trainer import raysession
from surefoot.trainer.ending import Ending
from surefoot.trainer.raysession import RaySession


@pytest.fixture
def hangs() -> Iterator[threading.Event]:
    """Set at the end: until then whoever waits for it hangs, as a call to a frozen cluster does."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_call_that_ray_does_not_answer_ends_in_an_error_that_says_which(
    hangs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raysession, "CALL_SECONDS", 0.1)
    session = RaySession(raysession._Host())

    def put() -> None:
        hangs.wait()

    with pytest.raises(TimedOut, match=r"Ray did not answer put within 0\.1 s"):
        await session.call(put)


async def test_a_call_that_runs_into_a_bound_of_its_own_says_so_itself() -> None:
    def call() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await RaySession(raysession._Host()).call(call)


def test_a_cluster_that_is_not_there_is_refused_by_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ConfigRefused, match=rf"cluster.address = {address}: nothing answers there"):
        raysession._Host()._join(address)


async def test_asking_which_nodes_drain_holds_up_no_other_call(hangs: threading.Event) -> None:
    session = RaySession(raysession._Host())
    asked = asyncio.ensure_future(raysession._answer(raysession._aside(hangs.wait), hangs.wait, Ending()))
    assert await session.call(lambda: 7) == 7
    hangs.set()
    assert await asked
