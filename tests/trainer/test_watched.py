"""A run watched from another program: told as it goes on, and left when nobody is going to write more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from surefoot.statemachine import events as ev
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import build_rows
from surefoot.statemachine.phases import Phase
from surefoot.statemachine.sqllog import SqlLog, open_log
from surefoot.trainer.places import Place
from surefoot.trainer.run import Run, Watched

from ..statemachine.logs import dead_driver
from .stories import Story

SOON_SECONDS = 30.0


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    """A run in the middle, which nobody has ended."""
    Story("a").began().updated().save(Place("a", tmp_path))
    watched = await Run.attach("a", runs_dir=tmp_path)
    yield watched
    watched.close()


def taken(place: Place, driver: DriverIdentity) -> SqlLog:
    """The log, with the run in the hands of `driver`."""
    log = open_log(place.log_url, migrate=True)
    log.take_over(place.run, driver)
    return log


async def test_the_events_of_a_run_whose_driver_is_dead_have_an_end(watched: Watched) -> None:
    taken(watched.place, dead_driver()).close()
    async with asyncio.timeout(SOON_SECONDS):
        seen = [type(event).__name__ async for event in watched.events()]
    assert seen[-1] == "IncarnationBegan" and len(seen) == len(await watched.rows())


async def test_the_outcome_of_a_run_whose_driver_is_dead_is_where_it_was_left(watched: Watched) -> None:
    taken(watched.place, dead_driver()).close()
    async with asyncio.timeout(SOON_SECONDS):
        outcome = await watched.outcome()
    assert (outcome.phase, outcome.updates, outcome.exit_code) == (Phase.INIT_WORKERS, 1, 1)
    assert "not ended" in outcome.message and "start it again" in outcome.message


async def test_a_run_whose_driver_lives_is_waited_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, looked_twice = 0, asyncio.Event()
    is_left_at = Watched._is_left_at

    async def counted(self: Watched, seq: int) -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            looked_twice.set()
        return await is_left_at(self, seq)

    monkeypatch.setattr(Watched, "_is_left_at", counted)
    log = taken(watched.place, DriverIdentity.here())
    head = log.head("a")
    seen: list[str] = []

    async def watch() -> None:
        async for event in watched.events(after_seq=head.head_seq):
            seen.append(type(event).__name__)

    watching = asyncio.ensure_future(watch())
    await asyncio.wait_for(looked_twice.wait(), SOON_SECONDS)
    assert not watching.done()
    failed = ev.RunFailed(code="X", error="e", updates=1, optimizer_steps=1, facts={})
    log.append(
        "a",
        head.head_seq,
        head.incarnation,
        build_rows("a", head.head_seq, head.head_hash, head.incarnation, [failed], "2026-01-01T00:00:00Z"),
    )
    log.release("a", head.incarnation)
    log.close()
    await asyncio.wait_for(watching, SOON_SECONDS)
    assert seen == ["RunFailed"]
    assert (await watched.outcome()).phase is Phase.FAILED


async def test_a_silent_driver_elsewhere_is_not_waited_for(watched: Watched) -> None:
    elsewhere = msgspec.structs.replace(DriverIdentity.here(), host="elsewhere.invalid")
    log = taken(watched.place, elsewhere)
    assert log._writing is not None
    log._cursor.execute("UPDATE runs SET heartbeat_at = heartbeat_at - 3600")
    log.close()
    async with asyncio.timeout(SOON_SECONDS):
        assert (await watched.outcome()).phase is Phase.INIT_WORKERS
