"""The schedule: worked values, its ends, and the same float everywhere."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.statemachine.schedule import (
    SCHEDULE_KINDS,
    ScheduleSpec,
    learning_rates,
    multiplier,
    warmup_steps_from_ratio,
)

CASES = json.loads((Path(__file__).parent / "cases" / "budget.json").read_text())


@st.composite
def specs(draw: st.DrawFn) -> ScheduleSpec:
    horizon = draw(st.integers(1, 10_000))
    return ScheduleSpec(
        draw(st.sampled_from(SCHEDULE_KINDS)),
        horizon,
        draw(st.integers(0, horizon)),
        draw(st.floats(0.0, 1.0)),
    )


@pytest.mark.parametrize("case", CASES["schedules"], ids=lambda case: f"{case['kind']}-{case['horizon']}")
def test_multipliers_are_the_worked_ones(case: dict) -> None:
    spec = ScheduleSpec(case["kind"], case["horizon"], case["warmup_steps"], case["min_ratio"])
    got = [multiplier(spec, k) for k in range(case["horizon"])]
    assert got == pytest.approx(case["multipliers"], abs=1e-10)


@pytest.mark.parametrize("case", CASES["warmup_ratio"], ids=lambda case: f"{case['ratio']}-{case['horizon']}")
def test_a_warmup_ratio_is_exact_and_rounded_up(case: dict) -> None:
    horizon, expected = case["horizon"], case["warmup_steps"]
    assert warmup_steps_from_ratio(case["ratio"], horizon) == expected
    assert warmup_steps_from_ratio(Decimal(case["ratio"]), horizon) == expected
    assert warmup_steps_from_ratio(float(case["ratio"]), horizon) == expected


def test_a_float_ratio_is_what_was_written_and_not_its_binary_neighbour() -> None:
    # 0.1 as binary is a little above 1/10: taken at its word it would round up to 4.
    assert warmup_steps_from_ratio(0.1, 30) == 3
    assert math.ceil(Decimal.from_float(0.1) * 30) == 4


def test_a_part_of_a_warmup_step_is_a_whole_one() -> None:
    assert warmup_steps_from_ratio("0.1", 12) == 2  # 1.2
    assert warmup_steps_from_ratio("0.001", 12) == 1  # 0.012


@pytest.mark.parametrize("ratio", ["1.01", "-0.1", "nan", "inf", "ten", ""])
def test_a_ratio_outside_0_to_1_is_refused(ratio: str) -> None:
    with pytest.raises(ValueError):
        warmup_steps_from_ratio(ratio, 10)


@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup_steps", [0, 3, 7])
@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_the_end_of_the_horizon_is_defined_and_nothing_beyond_it(
    kind: str, warmup_steps: int, min_ratio: float
) -> None:
    spec = ScheduleSpec(kind, 7, warmup_steps, min_ratio)
    assert multiplier(spec, 7) == (1.0 if kind == "constant" else min_ratio)
    for outside in (-1, 8, 1_000_000):
        with pytest.raises(ValueError, match=rf"{outside} is outside .*0\.\.7"):
            multiplier(spec, outside)


@pytest.mark.parametrize(
    ("kind", "horizon", "warmup_steps", "min_ratio"),
    [
        ("exponential", 7, 0, 0.0),
        ("cosine", 0, 0, 0.0),
        ("cosine", -1, 0, 0.0),
        ("cosine", 7, 8, 0.0),
        ("cosine", 7, -1, 0.0),
        ("cosine", 7, 0, 1.5),
        ("cosine", 7, 0, math.nan),
    ],
)
def test_a_shape_that_is_none_is_refused(
    kind: str, horizon: int, warmup_steps: int, min_ratio: float
) -> None:
    with pytest.raises(ValueError):
        ScheduleSpec(kind, horizon, warmup_steps, min_ratio)


@given(specs(), st.data())
def test_a_multiplier_is_within_0_and_1(spec: ScheduleSpec, data: st.DataObject) -> None:
    assert 0.0 <= multiplier(spec, data.draw(st.integers(0, spec.horizon))) <= 1.0


@given(specs(), st.data())
def test_no_step_within_the_horizon_is_spent_at_0(spec: ScheduleSpec, data: st.DataObject) -> None:
    assert multiplier(spec, data.draw(st.integers(0, spec.horizon - 1))) > 0.0


@given(specs(), st.data())
def test_the_curve_rises_through_the_warmup_and_never_after(spec: ScheduleSpec, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, spec.horizon - 1))
    now, then = multiplier(spec, k), multiplier(spec, k + 1)
    if k + 1 < spec.warmup_steps:
        assert then > now
    elif k >= spec.warmup_steps:
        assert then <= now
    if k + 1 == spec.warmup_steps:
        assert now == 1.0
    if k == spec.warmup_steps:
        assert now == 1.0


@given(specs(), st.data())
def test_the_decay_is_the_textbook_one(spec: ScheduleSpec, data: st.DataObject) -> None:
    if spec.warmup_steps == spec.horizon:
        return
    k = data.draw(st.integers(spec.warmup_steps, spec.horizon))
    progress = (k - spec.warmup_steps) / (spec.horizon - spec.warmup_steps)
    share = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[
        spec.kind
    ]
    floor = 1.0 if spec.kind == "constant" else spec.min_ratio
    assert multiplier(spec, k) == pytest.approx(floor + (1 - floor) * share, abs=1e-12)


def test_the_cosine_asks_no_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines may differ in the last bit of cos; learning rates are compared with ==."""
    spec = ScheduleSpec("cosine", 1000, 10, 0.1)
    before = [multiplier(spec, k) for k in range(1000)]
    for name in ("cos", "sin"):
        monkeypatch.setattr(math, name, lambda angle: math.nan)
    assert [multiplier(spec, k) for k in range(1000)] == before
    # exact values of the half-way and the third points: cos(pi/2) = 0, cos(pi/3) = 1/2, cos(2 pi/3) = -1/2
    assert [multiplier(ScheduleSpec("cosine", 6, 0, 0.0), k) for k in (2, 3, 4)] == [0.75, 0.5, 0.25]


def test_a_learning_rate_is_one_product_of_floats() -> None:
    spec = ScheduleSpec("cosine", 7, 2, 0.0)
    assert learning_rates(2e-4, spec, range(7)) == [2e-4 * multiplier(spec, k) for k in range(7)]
    assert learning_rates(2e-4, spec, [5, 1]) == [2e-4 * multiplier(spec, 5), 2e-4]
