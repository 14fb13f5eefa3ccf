"""Fixtures for all tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest


def pytest_report_header() -> str:
    from .faults.matrix import CASES_A_DAY, seed_of_the_day

    return f"faults of the day: python -m tests.faults --count {CASES_A_DAY} --seed {seed_of_the_day()}"


@pytest.fixture(scope="session")
def ray_up() -> Iterator[None]:
    """One local Ray for all tests of this process that ask for it; their own sessions share it.

    It is held by a loop on a thread of its own, as a program beside the test would hold it.
    """
    from surefoot.trainer.raysession import RaySession

    up: threading.Event = threading.Event()
    errors: list[BaseException] = []
    loop, end = asyncio.new_event_loop(), asyncio.Event()

    async def hold() -> None:
        async with RaySession.acquire(None, 12, 240.0):
            up.set()
            await end.wait()

    def run() -> None:
        try:
            loop.run_until_complete(hold())
        except BaseException as error:
            errors.append(error)
        finally:
            up.set()
            loop.close()

    thread = threading.Thread(target=run, name="ray for tests")
    thread.start()
    assert up.wait(300)
    if errors:
        raise errors[0]
    yield
    loop.call_soon_threadsafe(end.set)
    thread.join(120)
    assert not thread.is_alive()
    assert not errors
