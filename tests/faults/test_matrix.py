"""The matrix of faults: that it is whole, and a random part of it on every run of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surefoot.statemachine.crashpoints import CRASHPOINTS, crashpoint
from surefoot.statemachine.events import EVENT_TYPES

from .matrix import (
    AFTER_A_CRASH,
    BEFORE_WORKERS,
    BY_EVENT,
    CASES_A_DAY,
    NTH,
    all_cases,
    live_through,
    seed_of_the_day,
    some_cases,
    table,
)
from .situations import SIMULATED, SITUATIONS, UNDISTURBED, Untouched

ROOT = Path(__file__).parents[2]


def test_every_place_in_the_code_is_registered_and_every_registered_place_is_in_the_code() -> None:
    found = set()
    for folder in ("statemachine", "rollout", "trainer", "migrations"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r'crashpoint(?:\)?\(|,\s*)"([a-z_.]+)"', path.read_text()))
    assert found == set(CRASHPOINTS)


def test_what_the_matrix_says_of_places_is_said_of_registered_ones() -> None:
    for begins in (*BEFORE_WORKERS, *AFTER_A_CRASH, *NTH):
        assert any(place.startswith(begins) for place in CRASHPOINTS), begins


def test_the_driver_is_killed_inside_and_after_an_append_of_every_type_of_event() -> None:
    told = [*UNDISTURBED, *SITUATIONS, *SIMULATED]
    assert sorted(told) == sorted(EVENT_TYPES), "each in one table, with its cases or its reason"
    killed = {(place, kind) for place in BY_EVENT for kind in EVENT_TYPES if kind not in SIMULATED}
    assert {(case.place, case.victim) for case in all_cases() if case.kind} == {
        (f"{place}@{kind}", "driver") for place, kind in killed
    }


def test_a_place_that_is_not_registered_cannot_be_reached() -> None:
    with pytest.raises(KeyError):
        crashpoint("nowhere")


@pytest.mark.real
@pytest.mark.timeout(900)
def test_a_random_part_of_the_matrix_equals_the_run_that_nobody_touched(
    untouched_runs: Untouched, tmp_path: Path
) -> None:
    seed = seed_of_the_day()
    again = f"python -m tests.faults --count {CASES_A_DAY} --seed {seed}"
    print(again)  # for a case that raises
    verdicts = [live_through(case, untouched_runs, tmp_path) for case in some_cases(seed, CASES_A_DAY)]
    said = f"{again}\n{table(verdicts)}"
    print(said)
    assert all(verdict.ok for verdict in verdicts), said
