"""Killed at the append of an event that no small run of real parts can be made to write."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from surefoot.statemachine.audit import audit
from surefoot.statemachine.log import EventRow

from ..faults.situations import SIMULATED
from .world import Faults, World, crash_at, ledger, small_config

WRITTEN_WHEN = {"AnswerRefused": "repeated"}
"""What the first answer must be for the event to be written."""


def world_of(kind: str) -> World:
    """One whose ledger is a pure function of its config, where such an event is written."""
    config = small_config(sync={"max_staleness": 0}, checkpoint={"every_updates": 2})
    return World(config, data_len=12, faults=Faults(once=[WRITTEN_WHEN[kind]]))


def append_of(kind: str) -> int:
    """The first append that holds the event, counted from 1."""
    world, appends = world_of(kind), list[set[str]]()

    def look(rows: Sequence[EventRow]) -> None:
        appends.append({row.type for row in rows})

    world.on_commit = look
    assert world.run().exit_code == 0
    return 1 + next(n for n, kinds in enumerate(appends) if kind in kinds)


@pytest.mark.parametrize(("place", "is_there"), [("log.append.before", False), ("log.append.after", True)])
@pytest.mark.parametrize("kind", SIMULATED)
def test_a_driver_killed_at_the_append_of_an_event_is_followed_to_the_same_end(
    kind: str, place: str, is_there: bool
) -> None:
    world = world_of(kind)
    crash_at(world, place, append_of(kind))
    assert bool(world.events(kind)) == is_there
    assert not world.state().ended
    assert world.run().exit_code == 0
    assert audit(world.rows(), world.log.head(world.run_id)).ok
    untouched = World(world.config, world.data_len)
    untouched.run()
    assert ledger(world) == ledger(untouched)
