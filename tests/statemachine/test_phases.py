"""The phase machine: legal moves, their guards, and that machine, fold and picture are one table."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.statemachine.errors import IllegalEvent
from surefoot.statemachine.events import LearnerLost, RunCompleted, RunPreempted, UpdateBegan, WorkersReady
from surefoot.statemachine.phases import MOVES, Phase, Phases, destination, diagram, phase_machine
from surefoot.statemachine.state import RunState, fold
from tests.simulation.world import World, small_config

README = Path(__file__).parents[2] / "README.md"


def states_of(world: World) -> list[tuple[RunState, object]]:
    """The fold before each event of a run, and the event."""
    rows = world.rows()
    return [(fold(rows[:index]), row.event()) for index, row in enumerate(rows) if index]


def test_the_machine_follows_every_event_of_a_run_to_the_folds_phase() -> None:
    world = World(small_config(sync={"every_updates": 2}), data_len=16)
    world.run()
    machine = Phases()
    for before, event in states_of(world):
        assert machine.may(before, event)  # type: ignore[arg-type]
        machine.move(before, event)  # type: ignore[arg-type]
        expected = fold(world.rows()[: before.seq + 1]).phase
        assert machine.state == expected.value
    assert machine.state == "Completed"


def test_the_machine_has_exactly_the_tables_moves() -> None:
    machine = phase_machine(type("Model", (), {})())
    pairs = {(move.event, source.value, move.dest.value) for move in MOVES for source in move.sources}
    found = {
        (event, move.source, move.dest)
        for event in {move.event for move in MOVES}
        for move in machine.get_transitions(event)
    }
    assert found == pairs


def test_workers_are_never_ready_without_a_committed_budget() -> None:
    state = RunState()
    state.phase = Phase.INIT_WORKERS
    event = WorkersReady(learner_try=1, workers=1, ranks=1, fingerprint={}, state_digest="", update=0)
    assert not Phases(Phase.INIT_WORKERS).may(state, event)
    with pytest.raises(IllegalEvent, match="The budget is in the log"):
        destination(state, event)


def test_an_update_needs_a_batch_of_stored_groups() -> None:
    world = World()
    world.run()
    before = next(s for s, e in states_of(world) if isinstance(e, UpdateBegan))
    not_stored = UpdateBegan(update=1, groups=[(0, 1), (7, 1)])
    assert not Phases(Phase.ROLLOUT).may(before, not_stored)
    with pytest.raises(IllegalEvent, match="in the store"):
        destination(before, not_stored)


def test_completed_needs_every_step_and_a_checkpoint_of_the_last_update() -> None:
    world = World(data_len=8)
    world.run()
    complete = RunCompleted(updates=4, optimizer_steps=4, policy_version=4, weights_digest="")
    for before, event in states_of(world):
        if isinstance(event, RunCompleted):
            assert destination(before, complete) is Phase.COMPLETED
            before.checkpoints.clear()
            with pytest.raises(IllegalEvent, match="committed checkpoint"):
                destination(before, complete)
        elif before.phase is Phase.ROLLOUT and before.updates < 4:
            with pytest.raises(IllegalEvent):
                destination(before, complete)


@pytest.mark.parametrize("phase", [Phase.COMPLETED, Phase.STOPPED])
def test_nothing_follows_a_run_that_is_over(phase: Phase) -> None:
    state = RunState()
    state.phase = phase
    for event in (
        RunPreempted(updates=0, optimizer_steps=0, checkpoint_update=0, because=""),
        LearnerLost(learner_try=1, because=""),
    ):
        with pytest.raises(IllegalEvent, match="is legal in"):
            destination(state, event)


def test_the_picture_in_the_readme_is_the_machines() -> None:
    assert diagram() in README.read_text()
