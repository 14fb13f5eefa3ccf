"""When an answer is waited for: the rule by which answers share a transaction and hold up no batch."""

from __future__ import annotations

import pytest

from surefoot.statemachine.admission import completes_batch
from surefoot.statemachine.state import RunState, fold

from .scenario import Scenario


def state_of(scenario: Scenario) -> RunState:
    """What the scenario's events add up to."""
    return fold(scenario.rows())


def test_the_last_answer_of_the_next_batch_completes_it() -> None:
    """Batches of two: prompt 0 alone does not, 0 and 1 do, and 2 is of the batch after."""
    state = state_of(Scenario().begin().admit())
    assert list(state.live)[:4] == [0, 1, 2, 3]
    assert not completes_batch(state, {0})
    assert completes_batch(state, {0, 1})
    assert not completes_batch(state, {0, 2, 3})


def test_what_is_stored_already_is_not_waited_for() -> None:
    state = state_of(Scenario().begin().admit().store(0))
    assert completes_batch(state, {1})
    assert not completes_batch(state_of(Scenario().begin().admit().store(0, 1)), {2, 3})


def test_while_an_update_is_executed_the_batch_after_it_is_waited_for() -> None:
    state = state_of(Scenario().begin().admit().store(0, 1).began())
    assert state.batch is not None and [index for index, _ in state.batch.groups] == [0, 1]
    assert not completes_batch(state, {2})
    assert completes_batch(state, {2, 3})


@pytest.mark.parametrize(("arrived", "completes"), [({3}, False), ({2, 3}, True), ({1, 2, 3}, True)])
def test_where_ready_groups_are_taken_first_their_number_counts(arrived: set[int], completes: bool) -> None:
    assert completes_batch(state_of(Scenario(on_stale="reissue").begin().admit()), arrived) is completes


def test_where_ready_groups_are_taken_first_a_batch_that_is_there_waits_for_nobody() -> None:
    state = state_of(Scenario(on_stale="reissue").begin().admit().store(1, 3))
    assert not completes_batch(state, {0})


def test_after_the_last_batch_nothing_is_waited_for() -> None:
    scenario = Scenario(data_len=4, every_updates=1, max_staleness=1).begin().admit().store(0, 1)
    state = state_of(scenario.update().store(2, 3).began())
    assert state.updates == 1 and not completes_batch(state, set())
