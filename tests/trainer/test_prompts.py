"""The data as requests: rows in draw order, seeds and temperatures that depend on config and prompt alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from surefoot.rollout.data import draw_order
from surefoot.statemachine.events import Issue
from surefoot.trainer.config import load_config
from surefoot.trainer.plan import prepare
from surefoot.trainer.prompts import DataPrompts

from .models import write_model, write_rows

ROWS, HELD_OUT, GROUP_SIZE = 5, 3, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", ROWS)
    write_rows(tmp_path / "held.jsonl", HELD_OUT, prompt="{i}+1 =")
    write_model(tmp_path / "model")
    return tmp_path


def prompts_of(folder: Path, *sets: str, evaluated: bool = True) -> DataPrompts:
    held_out = {"every_updates": 1, "source": str(folder / "held.jsonl"), "temperature": 0.3}
    tree = {
        "seed": 11,
        "data": {"source": str(folder / "rows.jsonl"), "epochs": 2},
        "model": {"path": str(folder / "model")},
        "batch": {"prompts": 2, "group_size": GROUP_SIZE},
        "rollout": {"max_new_tokens": 8, "temperature": 0.9},
        "eval": held_out if evaluated else {},
    }
    return DataPrompts(prepare(load_config(tree, sets)))


def test_rows_come_in_draw_order_each_once_an_epoch(folder: Path) -> None:
    prompts, order = prompts_of(folder), draw_order(ROWS, 2, 11)
    requests = [prompts.request(Issue(index, 1, 0)) for index in range(2 * ROWS)]
    drawn = [request.row.row_index for request in requests]
    assert drawn == [order(index) for index in range(2 * ROWS)]
    assert sorted(drawn[:ROWS]) == sorted(drawn[ROWS:]) == list(range(ROWS))
    assert drawn[:ROWS] != drawn[ROWS:] and drawn[:ROWS] != list(range(ROWS))
    for request in requests:
        assert request.row.prompt == f"{request.row.row_index}+1="
    with pytest.raises(IndexError):
        prompts.request(Issue(2 * ROWS, 1, 0))


def test_the_draw_order_is_that_of_the_seed(folder: Path) -> None:
    other, order = prompts_of(folder, "seed=12"), draw_order(ROWS, 2, 12)
    drawn = [other.request(Issue(index, 1, 0)).row.row_index for index in range(2 * ROWS)]
    assert drawn == [order(index) for index in range(2 * ROWS)]


def test_every_attempt_of_a_group_asks_for_the_same_samples(folder: Path) -> None:
    prompts = prompts_of(folder)
    first, second = prompts.request(Issue(3, 1, 0)), prompts.request(Issue(3, 2, 7))
    assert (second.prompt_index, second.attempt, second.admission_version) == (3, 2, 7)
    assert msgspec.structs.replace(second, attempt=1, admission_version=0) == first
    assert prompts_of(folder).request(Issue(3, 1, 0)) == first  # as the next driver asks for it


def test_no_two_samples_share_a_seed_whether_of_a_row_a_prompt_or_an_evaluation(folder: Path) -> None:
    prompts = prompts_of(folder)
    trained = [
        seed for index in range(2 * ROWS) for seed in prompts.request(Issue(index, 1, 0)).seeds
    ]  # each row twice, in two epochs
    evaluated = [seed for request in prompts.evaluation() for seed in request.seeds]
    assert len(trained) == 2 * ROWS * GROUP_SIZE and len(evaluated) == HELD_OUT
    assert len({*trained, *evaluated}) == len(trained) + len(evaluated)
    other = prompts_of(folder, "seed=12")
    again = {seed for index in range(2 * ROWS) for seed in other.request(Issue(index, 1, 0)).seeds}
    again |= {seed for request in other.evaluation() for seed in request.seeds}
    assert again.isdisjoint({*trained, *evaluated})


def test_temperatures_and_lengths_are_those_of_the_config(folder: Path) -> None:
    prompts = prompts_of(folder)
    request = prompts.request(Issue(0, 1, 0))
    assert (request.temperature, request.max_new_tokens, len(request.seeds)) == (0.9, 8, GROUP_SIZE)
    assert {(one.temperature, one.max_new_tokens) for one in prompts.evaluation()} == {(0.3, 8)}


def test_an_evaluation_asks_for_one_sample_of_each_held_out_row(folder: Path) -> None:
    requests = prompts_of(folder).evaluation()
    assert [request.row.prompt for request in requests] == ["0+1 =", "1+1 =", "2+1 ="]
    assert [request.prompt_index for request in requests] == [0, 1, 2]
    assert [len(request.seeds) for request in requests] == [1, 1, 1]
    assert requests == prompts_of(folder).evaluation()  # the same at every policy version
    assert {(request.attempt, request.admission_version) for request in requests} == {(1, 0)}


def test_without_an_evaluation_no_row_is_held_out(folder: Path) -> None:
    assert prompts_of(folder, evaluated=False).evaluation() == []
