"""For every identity of publications and evaluations, a log that breaks just it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from surefoot.statemachine.events import EvaluationDone, WeightsPublished, WeightsRemade

from .audits import assert_only, failures
from .scenario import Scenario, whole_run


def begun(**options: Any) -> Scenario:
    return Scenario(**options).begin()


# -- publications -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2])
def test_a_version_that_does_not_follow_is_found(version: int) -> None:
    run = begun().work(2).change(WeightsPublished, 0, version=version)
    assert_only(run, "publications", f"version {version} was published after 0")


def test_a_publication_that_is_missing_is_found_at_the_next_update() -> None:
    run = begun().admit().store().update()
    run.began().applied()  # update 2, which is due for publication
    run.began()
    assert_only(run, "publications", "update 3 began, update 2 was not published")


def test_an_early_publication_is_found() -> None:
    run = begun().admit().store().update().publish()
    assert_only(run, "publications", "update 1 was published")


def test_a_publication_of_an_older_update_is_found() -> None:
    run = begun().work(2).change(WeightsPublished, 0, update=1)
    failed = failures(run)
    assert "update 1 was published when 2 updates were done" in failed["publications"]


def test_an_update_published_twice_is_found() -> None:
    run = begun().work(2).publish()
    assert_only(run, "publications", "update 2 was published a second time")


def test_a_last_publication_that_does_not_say_so_is_found() -> None:
    run = whole_run().change(WeightsPublished, -1, final=False)
    assert_only(run, "publications", "update 6 says final=False, updates cannot follow")


def test_a_publication_that_says_it_is_the_last_and_is_not_is_found() -> None:
    run = whole_run().change(WeightsPublished, 0, final=True)
    assert_only(run, "publications", "update 2 says final=True, updates can follow", "update 3 began")


def test_a_run_that_ends_unpublished_is_found() -> None:
    run = whole_run(data_len=10)  # 5 updates: the last publication is of update 5, out of turn
    run.remove(WeightsPublished, -1)
    failed = failures(run)
    assert "the run ended after update 5, published is update 4" in failed["publications"]


def remade(**changes: Any) -> WeightsRemade:
    return msgspec.structs.replace(
        WeightsRemade(version=1, update=2, digest="other", recorded_digest="w2"), **changes
    )


def test_a_version_made_again_on_another_execution_is_right() -> None:
    run = begun().work(2).take_over(ready=False).redo().add(remade()).ready()
    assert failures(run) == {}
    again = remade(digest="third", recorded_digest="other")
    assert failures(run.take_over(ready=False).redo().add(again).ready()) == {}


@pytest.mark.parametrize("changes", [{"version": 0}, {"update": 1}, {"recorded_digest": "w1"}], ids=str)
def test_a_version_made_again_for_something_else_is_found(changes: dict[str, Any]) -> None:
    run = begun().work(2).add(remade(**changes))
    assert_only(run, "publications", "was made again for digest")


# -- evaluations --------------------------------------------------------------------------------------


def evaluated_run() -> Scenario:
    """Due at version 0, at the first publication at or after updates 3 and 6, and at the end."""
    run = begun(eval_every_updates=3).evaluate().work(2).work(2).evaluate().work(2).evaluate()
    return run.checkpoint().complete()


def test_evaluations_when_they_are_due_are_right() -> None:
    assert failures(evaluated_run()) == {}


@pytest.mark.parametrize(("missing", "version"), [(0, 0), (1, 2), (2, 3)])
def test_an_evaluation_that_is_missing_is_found(missing: int, version: int) -> None:
    run = evaluated_run().remove(EvaluationDone, missing)
    assert_only(run, "evaluations", f"version {version} was due for evaluation and had none")


def test_without_evaluation_none_is_due() -> None:
    assert failures(whole_run()) == {}


@pytest.mark.parametrize("changes", [{"policy_version": 1}, {"update": 3}], ids=str)
def test_an_evaluation_of_a_version_that_is_not_served_is_found(changes: dict[str, int]) -> None:
    run = evaluated_run().change(EvaluationDone, 1, **changes)
    assert "served is 2 of update 4" in failures(run)["evaluations"]


def test_a_version_evaluated_twice_is_found() -> None:
    run = evaluated_run()
    run.insert_after(EvaluationDone, 1, run.event(EvaluationDone, 1))
    assert_only(run, "evaluations", "version 2 was evaluated a second time")
