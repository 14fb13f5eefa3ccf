"""What a difference between a record and its second execution means."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from surefoot.statemachine.events import OptimizerStep
from surefoot.trainer.comparing import Deviation, compare_steps

STEP = OptimizerStep(optimizer_step=3, learning_rate=0.5, loss=1.0, grad_norm=2.0, tokens=10, applied=True)
HERE, THERE = {"ranks": "1"}, {"ranks": "2"}


def other(**values: Any) -> OptimizerStep:
    return msgspec.structs.replace(STEP, **values)


def test_equal_steps_have_no_difference() -> None:
    assert compare_steps([STEP], [other()], Deviation()) == []


def test_a_last_bit_is_forbidden_on_the_same_execution_and_measured_on_another() -> None:
    for recorded, forbidden in ((HERE, True), (THERE, False)):
        deviation = Deviation()
        deviation.ran(recorded, HERE)
        (difference,) = compare_steps([STEP], [other(loss=1.5, grad_norm=1.0)], deviation)
        assert difference.forbidden is forbidden
        assert (deviation.loss, deviation.grad_norm) == (0.5, 1.0)


def test_after_one_update_of_another_execution_later_ones_may_deviate_too() -> None:
    # The weights that update 2 starts from are no longer those it was recorded with.
    deviation = Deviation()
    deviation.ran(THERE, HERE)
    deviation.ran(HERE, HERE)
    (difference,) = compare_steps([STEP], [other(loss=1.5)], deviation)
    assert not difference.forbidden


@pytest.mark.parametrize("changed", [{"learning_rate": 0.25}, {"optimizer_step": 4}])
def test_another_step_or_learning_rate_is_forbidden_on_any_execution(changed: dict[str, Any]) -> None:
    deviation = Deviation()
    deviation.ran(THERE, HERE)
    (difference,) = compare_steps([STEP], [other(**changed)], deviation)
    assert difference.forbidden and difference.position


def test_a_step_skipped_in_one_execution_only_is_forbidden_on_any() -> None:
    deviation = Deviation()
    deviation.ran(THERE, HERE)
    (difference,) = compare_steps([STEP], [other(applied=False)], deviation)
    assert difference.forbidden and not difference.position


def test_a_loss_that_became_nan_is_infinitely_far() -> None:
    deviation = Deviation()
    compare_steps([STEP], [other(loss="nan")], deviation)
    assert deviation.loss == float("inf")


def test_another_number_of_steps_is_an_error() -> None:
    with pytest.raises(ValueError):
        compare_steps([STEP], [], Deviation())
