"""An update executed again, held against its record: what must be equal, and how far the rest is apart.

Pure. Learning rates, steps and which of them were applied are equal always. Loss and gradient norm are equal
bit for bit while every update so far ran as it was recorded; once one ran on another execution (ranks,
device, versions, ...), the weights differ in their last bits and so may all that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..statemachine.events import Number, OptimizerStep


@dataclass
class Deviation:
    """How far re-executed updates were from their records."""

    loss: float = 0.0
    grad_norm: float = 0.0
    same_execution: bool = True  # of every update so far
    accepted: bool = False

    def ran(self, recorded: dict[str, str], now: dict[str, str], *, redone_elsewhere: bool = False) -> None:
        """Take in one more update: the execution fingerprints, as recorded and as executed again, and whether
        what it began with was a redo's on another execution."""
        self.same_execution = self.same_execution and recorded == now and not redone_elsewhere


@dataclass(frozen=True)
class Difference:
    """Two executions of one optimizer step that differ; `forbidden` where no other machine explains it."""

    was: OptimizerStep
    now: OptimizerStep
    forbidden: bool

    @property
    def position(self) -> bool:
        """Whether it is another step, or another learning rate: then nothing else need be compared."""
        return _position(self.was) != _position(self.now)

    def __str__(self) -> str:
        if self.position:
            return (
                f"recorded with optimizer step {self.was.optimizer_step} at learning rate "
                f"{self.was.learning_rate}, executed again with {self.now.optimizer_step} at "
                f"{self.now.learning_rate}"
            )
        return (
            f"optimizer step {self.was.optimizer_step} was recorded with loss {self.was.loss}, gradient norm "
            f"{self.was.grad_norm}, applied {self.was.applied}; executed again it gives {self.now.loss}, "
            f"{self.now.grad_norm}, {self.now.applied}"
        )


def compare_steps(
    recorded: list[OptimizerStep], executed: list[OptimizerStep], deviation: Deviation
) -> list[Difference]:
    """The steps that differ, in order; `deviation` grows by what they do.

    Raises ValueError for another number of steps.
    """
    differences: list[Difference] = []
    for was, now in zip(recorded, executed, strict=True):
        if _position(was) != _position(now):
            differences.append(Difference(was, now, forbidden=True))
            continue
        deviation.loss = max(deviation.loss, _apart(was.loss, now.loss))
        deviation.grad_norm = max(deviation.grad_norm, _apart(was.grad_norm, now.grad_norm))
        if (was.loss, was.grad_norm, was.applied) != (now.loss, now.grad_norm, now.applied):
            forbidden = deviation.same_execution or was.applied != now.applied
            differences.append(Difference(was, now, forbidden))
    return differences


def _position(step: OptimizerStep) -> tuple[int, Number]:
    return step.optimizer_step, step.learning_rate


def _apart(was: Number, now: Number) -> float:
    if was == now:
        return 0.0
    difference = abs(float(was) - float(now))
    return math.inf if math.isnan(difference) else difference
