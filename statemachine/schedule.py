"""The learning-rate schedule: one pure function of the optimizer step.

Learner, audit and `plan` all ask `multiplier`; nothing else in Surefoot knows a schedule's shape. It holds
no state: the position is the number of optimizer steps in the log, and is handed in. Invariant: the same
spec and step give the same float on every machine, because redo and audit compare learning rates with `==`.
The cosine is therefore worked out in integers, not by the C library, whose last bit is its own affair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache

import msgspec

SCHEDULE_KINDS = ("constant", "linear", "cosine")

_BITS = 96
_ONE = 1 << _BITS
_ONE_SQUARED = _ONE * _ONE
_HALF_PI = 157079632679489661923132169163975144209858 * _ONE // 10**41
_SINE = [(-1) ** n * _ONE // math.factorial(2 * n + 1) for n in reversed(range(14))]
"""Taylor's coefficients of sin(x)/x in x squared, last first; the first left out is below 2^-83 at pi/2."""


class ScheduleSpec(msgspec.Struct, frozen=True):
    """A schedule's shape. Raises ValueError if it is none."""

    kind: str  # constant | linear | cosine
    horizon: int  # optimizer steps over which it runs; at least those of the run
    warmup_steps: int  # optimizer steps, within the horizon
    min_ratio: float  # multiplier that the decay ends at

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULE_KINDS:
            raise ValueError(f"schedule kind {self.kind!r} is none of {', '.join(SCHEDULE_KINDS)}")
        if self.horizon < 1:
            raise ValueError(f"schedule horizon {self.horizon} is below 1 optimizer step")
        if not 0 <= self.warmup_steps <= self.horizon:
            raise ValueError(f"warmup_steps {self.warmup_steps} is not within 0..{self.horizon}, the horizon")
        if not 0.0 <= self.min_ratio <= 1.0:
            raise ValueError(f"min_ratio {self.min_ratio} is not within 0..1")


def multiplier(spec: ScheduleSpec, optimizer_step: int) -> float:
    """What the learning rate is multiplied by at an optimizer step, from 0.

    With W warm-up steps and horizon H: (k+1)/W while k < W, then the decay over the H-W steps left, its
    first value 1. It is defined at k = H too, which torch's LambdaLR asks for: the decay's end there.
    Raises ValueError outside 0..H.
    """
    k, horizon, warmup_steps = optimizer_step, spec.horizon, spec.warmup_steps
    if not 0 <= k <= horizon:
        raise ValueError(f"optimizer step {k} is outside the schedule's 0..{horizon}")
    if k < warmup_steps:
        return (k + 1) / warmup_steps
    if spec.kind == "constant":
        return 1.0
    if k == horizon:
        return spec.min_ratio
    if k == warmup_steps:
        return 1.0
    steps_left, decay_steps = horizon - k, horizon - warmup_steps
    share = steps_left / decay_steps if spec.kind == "linear" else _raised_cosine(steps_left, decay_steps)
    return spec.min_ratio + (1.0 - spec.min_ratio) * share


@lru_cache(maxsize=1024)  # who folds and audits, or learns and folds, asks twice
def _raised_cosine(steps_left: int, decay_steps: int) -> float:
    """(1 + cos(pi * p)) / 2 at p = 1 - steps_left / decay_steps, correctly rounded.

    As sin(pi/2 * steps_left/decay_steps) squared, so that nothing cancels near the end; Taylor's series in
    fixed point.
    """
    angle = _HALF_PI * steps_left // decay_steps
    square = angle * angle >> _BITS
    series = 0
    for coefficient in _SINE:
        series = (series * square >> _BITS) + coefficient
    sine = min(angle * series >> _BITS, _ONE)
    return sine * sine / _ONE_SQUARED


def learning_rates(lr: float, spec: ScheduleSpec, optimizer_steps: Iterable[int]) -> list[float]:
    """The learning rate at each of these optimizer steps: `lr` times the multiplier, as floats."""
    return [lr * multiplier(spec, optimizer_step) for optimizer_step in optimizer_steps]


def exact_ratio(ratio: Decimal | str | float) -> Decimal:
    """A ratio as the decimal that was written; a float is taken by its shortest repr.

    Raises ValueError if it is no number within 0..1.
    """
    try:
        exact = Decimal(str(ratio))
    except InvalidOperation:
        raise ValueError(f"ratio {ratio!r} is not a decimal number") from None
    if not (exact.is_finite() and 0 <= exact <= 1):
        raise ValueError(f"ratio {ratio} is not within 0..1")
    return exact


def warmup_steps_from_ratio(ratio: Decimal | str | float, horizon: int) -> int:
    """Warm-up in optimizer steps: ratio times horizon, exact, rounded up. Raises as `exact_ratio`."""
    return math.ceil(Fraction(exact_ratio(ratio)) * horizon)
