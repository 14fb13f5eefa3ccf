"""What a fault of the driver can do to a log: nothing. What the fold would refuse is not written, and the run
goes on from a log that is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from surefoot.statemachine import events as ev
from surefoot.statemachine.audit import audit
from surefoot.statemachine.errors import IllegalEvent
from surefoot.statemachine.events import type_of
from surefoot.statemachine.phases import Phase
from surefoot.statemachine.state import RunState, fold
from surefoot.trainer.journal import Journal

from .virtual import run_virtually
from .world import World, crash_at, ledger, small_config

SECTIONS: dict[str, Any] = {
    "checkpoint": {"every_updates": 1, "keep": 2},
    "eval": {"every_updates": 1, "size": 2, "source": "object:x"},
    "sync": {"max_staleness": 0},
    "rollout": {"deterministic": True},
}

Spoil = Callable[[Any], ev.Event]

FAULTS: dict[str, Spoil] = {
    "WorkersReady": lambda e: replace(e, learner_try=e.learner_try + 1),
    "GroupsAdmitted": lambda e: replace(e, groups=[*e.groups, replace(e.groups[-1], attempt=1)]),
    "GroupsStored": lambda e: replace(e, groups=[replace(e.groups[0], attempt=7), *e.groups[1:]]),
    "UpdateBegan": lambda e: replace(e, update=e.update + 1),
    "UpdateApplied": lambda e: replace(e, steps=[replace(e.steps[0], learning_rate=-1.0), *e.steps[1:]]),
    "WeightsPublished": lambda e: replace(e, version=e.version + 1),
    "EvaluationDone": lambda e: replace(e, policy_version=e.policy_version + 1),
    "CheckpointCommitted": lambda e: replace(e, update=e.update + 1),
    "FilesRetired": lambda e: replace(e, group_files=["another.msgpack"]),
    "RunCompleted": lambda e: ev.RunStopped(
        updates=e.updates,
        optimizer_steps=e.optimizer_steps,
        policy_version=e.policy_version,
        weights_digest=e.weights_digest,
        updates_short=0,
        optimizer_steps_short=0,
        because="a fault",
    ),
}


def commit_spoilt(journal: Journal, kind: str, nth: int) -> None:
    """Let the journal be handed a spoilt event in the place of the n-th one of its kind."""
    whole, seen = journal.commit, 0

    async def commit(decide: Callable[[RunState], Sequence[ev.Event]]) -> list[ev.Event]:
        def spoilt(state: RunState) -> list[ev.Event]:
            nonlocal seen
            events = list(decide(state))
            for place, event in enumerate(events):
                seen += type_of(event) == kind
                if type_of(event) == kind and seen == nth:
                    events[place] = FAULTS[kind](event)
            return events

        return await whole(spoilt)

    journal.commit = commit  # type: ignore[method-assign]


ONCE = ("WorkersReady", "RunCompleted")


@pytest.mark.parametrize(
    ("kind", "nth"), [*((k, 1) for k in FAULTS), *((k, 2) for k in FAULTS if k not in ONCE)]
)
def test_a_driver_that_decides_what_is_not_legal_fails_and_its_heir_ends_the_run(kind: str, nth: int) -> None:
    world, untouched = (World(small_config(**SECTIONS), data_len=16) for _ in range(2))
    untouched.run()

    async def life() -> None:
        driver = world.new_driver()
        commit_spoilt(driver._journal, kind, nth)
        await driver.run()

    with pytest.raises(IllegalEvent):
        run_virtually(life())
    assert world.rows()[-1].type == "RunFailed"
    assert fold(world.rows()).phase is Phase.FAILED
    world.run()
    assert fold(world.rows()).phase is Phase.COMPLETED
    assert audit(world.rows()).ok
    assert ledger(world) == ledger(untouched)


def test_a_transaction_is_refused_whole_and_the_journal_goes_on() -> None:
    """Its first event would be legal alone; neither is written, and the next decision is as before."""
    world = World(data_len=16)

    async def life() -> None:
        journal = world.new_driver()._journal
        before, held = world.rows(), fold(world.rows())
        legal = ev.WorkerReplaced(worker=0, because="killed")
        with pytest.raises(IllegalEvent, match=f"event {held.seq + 2}: UpdateBegan is not allowed"):
            await journal.append(legal, ev.UpdateBegan(update=1, groups=[]))
        assert world.rows() == before
        assert vars(journal.state) == vars(held)
        assert not journal.broken
        await journal.append(legal)
        assert [row.type for row in world.rows()] == [*(row.type for row in before), "WorkerReplaced"]

    run_virtually(life())


def test_the_state_is_what_is_committed_while_an_append_is_under_way() -> None:
    world, asked = World(data_len=16), list[int]()

    async def life() -> None:
        journal = world.new_driver()._journal
        seq, append = journal.state.seq, journal.log.append

        def appending(*arguments: Any) -> Any:
            asked.append(journal.state.seq - seq)
            return append(*arguments)

        journal.log.append = appending  # type: ignore[method-assign]
        await journal.append(world.budget)
        asked.append(journal.state.seq - seq)

    run_virtually(life())
    assert asked == [0, 1]


def test_no_question_to_the_log_is_asked_on_the_event_loop() -> None:
    """A database that is away would hold it up."""
    world, inside = World(data_len=16), [False]
    crash_at(world, "update.committed", 3)

    async def life() -> None:
        journal = world.new_driver()._journal
        read = journal.log.read

        async def blocking(function: Callable[..., Any], *arguments: Any) -> Any:
            inside[0] = True
            try:
                return function(*arguments)
            finally:
                inside[0] = False

        def asked(*arguments: Any) -> Any:
            assert inside[0]
            return read(*arguments)

        journal._blocking, journal.log.read = blocking, asked  # type: ignore[method-assign]
        assert list(await journal.every_record()) == [1, 2, 3]
        assert len(await journal.read_all()) == journal.state.seq

    run_virtually(life())
