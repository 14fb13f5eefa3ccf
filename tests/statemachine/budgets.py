"""Budgets for tests: the worked values, and a short way to write an input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.statemachine.budget import BudgetInputs, resolve_budget
from surefoot.statemachine.events import BudgetResolved

CASES: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "cases" / "budget.json").read_text()
)

KEYS = set(BudgetInputs.__struct_fields__)


def inputs(**changes: Any) -> BudgetInputs:
    """Ten rows, three epochs, batches of four, published every four updates; changed as asked."""
    values: dict[str, Any] = {
        "data_len": 10,
        "epochs": 3,
        "batch_prompts": 4,
        "every_updates": 4,
        "learning_rate": 1e-6,
    }
    return BudgetInputs(**(values | changes))


def budget(**changes: Any) -> BudgetResolved:
    return resolve_budget(inputs(**changes))


def inputs_of_case(case: dict[str, Any]) -> BudgetInputs:
    """The inputs of one worked case."""
    return inputs(**{key: value for key, value in case.items() if key in KEYS})
