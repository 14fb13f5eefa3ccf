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

SOON = 10.0
"""What no load of the machine makes of half a second, and far from the 20 and the 120 s of a run that nobody
has asked to stop. The shares of the grace time are measured by a clock that is not the machine's, in the
simulation's test_grace."""


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


@pytest.fixture
def hung(hangs: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray that does not come up, in a process that has none yet."""

    def enter(host: raysession._Host, address: str | None, slots: int | None) -> None:
        hangs.wait()

    monkeypatch.setattr(raysession._Host, "current", None)
    monkeypatch.setattr(raysession._Host, "enter", enter)
    monkeypatch.setattr(raysession._Host, "_stop", lambda host: None)
    yield
    raysession._Host.current = None


async def seconds_to_end(ending: Ending, entering: asyncio.Task[None]) -> float:
    """Cancel a start; how long it takes to end."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)
    began = loop.time()
    entering.cancel()
    await asyncio.wait({entering})
    assert entering.cancelled() and ending.asked
    return loop.time() - began


async def enter(ending: Ending) -> None:
    async with RaySession.acquire(None, None, 120.0, ending):
        raise AssertionError("it does not come up")


async def test_a_call_under_way_ends_within_the_grace_time_of_a_run_that_stops(
    hangs: threading.Event,
) -> None:
    ending, loop = Ending(0.5), asyncio.get_running_loop()
    call = asyncio.ensure_future(RaySession(raysession._Host(), ending).call(hangs.wait))
    await asyncio.sleep(0)
    began = loop.time()
    ending.ask()
    with pytest.raises(TimedOut, match="Ray did not answer wait"):
        await call
    assert loop.time() - began < SOON


@pytest.mark.usefixtures("hung")
async def test_a_start_of_ray_that_hangs_is_given_up_within_the_grace_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up: list[raysession._Host] = []
    monkeypatch.setattr(raysession, "kill", lambda processes: given_up.append(processes))
    ending = Ending(0.5)
    assert await seconds_to_end(ending, asyncio.ensure_future(enter(ending))) < SOON
    assert len(given_up) == 1 and raysession._Host.current is None


@pytest.mark.usefixtures("hung")
async def test_a_ray_that_another_run_uses_is_not_killed_by_one_that_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[object] = []
    monkeypatch.setattr(raysession, "kill", killed.append)
    endings = Ending(0.3), Ending(0.3)
    first, second = [asyncio.ensure_future(enter(ending)) for ending in endings]
    await seconds_to_end(endings[0], first)
    assert killed == [] and raysession._Host.current is not None
    await seconds_to_end(endings[1], second)
    assert len(killed) == 1, "nobody is left who uses it"


async def test_a_ray_that_cannot_be_left_is_given_up_within_the_grace_time(
    hangs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[object] = []
    monkeypatch.setattr(raysession._Host, "current", None)
    monkeypatch.setattr(raysession._Host, "enter", lambda *_: None)
    monkeypatch.setattr(raysession._Host, "_stop", lambda host: hangs.wait())
    monkeypatch.setattr(raysession, "kill", killed.append)
    ending, loop = Ending(0.5), asyncio.get_running_loop()
    async with RaySession.acquire(None, None, 120.0, ending):
        loop.call_later(0.1, ending.ask)  # while it is being left
        began = loop.time()
    assert loop.time() - began < SOON
    assert len(killed) == 1 and raysession._Host.current is None


def test_a_ray_that_was_given_up_is_gone_before_another_run_asks_whether_one_is_up(
    hangs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may be about to shut it down: a run that took it for one that was up would lose it."""
    import ray

    ending, seen = threading.Thread(target=hangs.wait), list[bool]()

    def is_up() -> bool:
        seen.append(ending.is_alive())
        return True

    monkeypatch.setattr(ray, "is_initialized", is_up)
    monkeypatch.setattr(raysession._Host, "given_up", [ending])
    ending.start()
    threading.Timer(0.2, hangs.set).start()
    raysession._Host().enter(None, None)
    assert seen == [False] and raysession._Host.given_up == []
