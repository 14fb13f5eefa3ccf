"""Answers: how they are found in a response, when two are the same, and what the default rewards give."""

import pickle
from decimal import Decimal

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from surefoot.rollout import tasks
from surefoot.rollout.data import load_rows
from surefoot.rollout.tasks import (
    TaskReward,
    exact_match_reward,
    extract_answer,
    make_task,
    same_answer,
    task_name,
)
from surefoot.rollout.tokens import load_tokenizer
from surefoot.statemachine.errors import ConfigRefused, DataRefused

from . import tiny_models


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("17", "17"),
        ("  17 \n", "17"),
        ("First I add.\nThen it is\n17\n\n", "17"),
        ("so <answer> 5 </answer> no: <answer>\n17\n</answer> indeed", "17"),
        ("so <answer>17</answer>, or \\boxed{5}, or\n#### 5", "17"),
        ("we get \\boxed{5}, then \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("we get \\boxed{17} and \\boxed{cut short", "17"),
        ("10 + 7 = 17\n#### 17", "17"),
        ("#### 5\n#### 17 \nas said", "17"),
        ("<think>is it <answer>5</answer>?</think>17", "17"),
        ("<answer>cut short", "<answer>cut short"),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_the_answer_is_found(response, answer):
    assert extract_answer(response) == answer


def test_an_answer_of_many_lines_is_the_whole_response_where_nothing_marks_it():
    assert extract_answer(" 1 2\n3 4\n", many_lines=True) == "1 2\n3 4"
    assert extract_answer("it is\n<answer>1 2\n3 4</answer>", many_lines=True) == "1 2\n3 4"


@given(st.text(max_size=30), st.text(alphabet="abc 123{}", max_size=10))
def test_what_is_in_the_last_answer_tags_is_the_answer_whatever_stands_before(before, inside):
    assert extract_answer(f"{before}<answer>{inside}</answer>") == inside.strip()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,000", "1000"),
        ("1,234,567.50", "1234567.5"),
        ("3.0", "3"),
        ("3.", "3"),
        ("+3", "3"),
        ("007", "7"),
        (".5", "0.50"),
        ("-0", "0"),
        ("−3", "-3"),
        ("1e3", "1000"),
        ("$17$", "17"),
        ("  a   b\n c ", "a b c"),
        ("9" * 40, "9" * 40 + ".0"),
    ],
)
def test_answers_that_are_the_same(one, other):
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,00", "100"),
        ("10,00,000", "1000000"),
        ("3.1", "3"),
        ("3 4", "34"),
        ("yes", "no"),
        ("nan", "nan "[:3] + "x"),
        ("", "0"),
        ("9" * 40, "9" * 39 + "8"),
        ("1e9999999999", "1e9999999998"),
    ],
)
def test_answers_that_are_not_the_same(one, other):
    assert not same_answer(one, other)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_a_number_is_the_same_however_it_is_written(number):
    assert same_answer(f"{number:,.3f}", str(number))
    assert same_answer(f"{number:.5f}", str(number))
    assert not same_answer(str(number), str(number + Decimal("0.001")))


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("17", "It is 17", 0.0),  # the whole last line is the answer
        ("17", "It is\n17", 1.0),
        (17, "<answer>17.0</answer>", 1.0),
        (3.0, "3", 1.0),
        ("thought out\n#### 1,700", "so\n#### 1700", 1.0),  # as GSM8K writes its answers
        ("17", "18", 0.0),
        ("1 2\n3 4", "1 2\n3 4", 1.0),
        ("1 2\n3 4", "3 4", 0.0),
        ("17", "", 0.0),
    ],
)
def test_a_files_rows_are_scored_by_exact_match(answer, response, reward):
    assert exact_match_reward({"answer": answer}, response, []) == reward


def test_only_a_generated_source_has_a_task():
    assert task_name("reasoning_gym:chain_sum") == "chain_sum"
    assert task_name("data/reasoning_gym.jsonl") is None
    assert task_name([{"prompt": "x"}]) is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(tiny_models.qwen(tmp_path_factory.mktemp("qwen")))


# Those whose metadata is more than JSON can hold: tuples, integer keys, numpy's strings and floats.
@pytest.mark.parametrize("name", ["chain_sum", "arc_agi", "rearc", "graph_color", "codeio", "knights_knaves"])
def test_plain_rows_score_as_the_tasks_own_entries_do(name, tokenizer):
    source = f"reasoning_gym:{name}"
    tokenizer.context_length = None
    rows = load_rows(source=source, size=4, seed=5, tokenizer=tokenizer, max_new_tokens=1).rows
    task = reasoning_gym.create_dataset(name, size=4, seed=5)
    reward = TaskReward(name, {})
    for row, entry in zip(rows, task, strict=True):
        for answer in (entry["answer"], "3", "0 0\n0 0"):
            expected = task.score_answer(answer, entry)
            assert reward(row.fields, f"hm\n<answer>{answer}</answer>", []) == expected
    assert any(task.score_answer(entry["answer"], entry) == 1.0 for entry in task) or name == "graph_color"


def test_a_partial_answer_in_a_sentence_is_extracted_first():
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=5)[0]
    reward = TaskReward("chain_sum", {})
    assert reward(entry, f"The sum is\n{entry['answer']}", []) == 1.0
    assert 0 < reward(entry, f"the sum is {entry['answer']}", []) < 0.5


def test_an_answer_that_a_scorer_cannot_parse_is_wrong_and_not_an_error():
    task = reasoning_gym.create_dataset("prime_factorization", size=1, seed=5)
    with pytest.raises(ValueError, match="invalid literal"):
        task.score_answer("x y z", task[0])
    reward = TaskReward("prime_factorization", {})
    assert reward(task[0], "x y z", []) == 0.0
    assert reward(task[0], task[0]["answer"], []) == 1.0


def test_a_scorer_that_raises_on_the_right_answer_too_is_broken_and_says_so():
    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=5)[0]
    with pytest.raises(ValueError, match="invalid literal"):
        TaskReward("prime_factorization", {})(entry | {"answer": "not primes"}, "x", [])


def test_a_held_out_row_from_a_file_is_scored_by_exact_match():
    reward = TaskReward("chain_sum", {})
    assert reward({"prompt": "1+1", "answer": "2"}, "2.0", []) == 1.0
    assert reward({"prompt": "1+1", "answer": "2", "metadata": {"from": "a file"}}, "2.0", []) == 1.0


def test_a_task_reward_goes_to_a_worker_without_its_task():
    reward = TaskReward("chain_sum", {"min_terms": 2})
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=5)[0]
    reward(entry, "1", [])
    copy = pickle.loads(pickle.dumps(reward))
    assert (copy.name, copy.options, copy._task) == ("chain_sum", {"min_terms": 2}, None)
    assert len(pickle.dumps(reward)) < 200


def test_a_task_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(DataRefused, match=r"chain_sun'.* no such task, .*'reasoning_gym:chain_sum'"):
        make_task("chain_sun", size=1, seed=0, options={})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_termz": 2}, "min_termz"),
        ({"min_terms": 9, "max_terms": 2}, "chain_sum"),
        ({"seed": 3}, "set seed"),
        ({"size": 3}, "set data.size"),
    ],
)
def test_options_that_a_task_does_not_take_are_refused(options, said):
    with pytest.raises(ConfigRefused, match=said) as caught:
        make_task("chain_sum", size=1, seed=0, options=options)
    assert "\n" not in str(caught.value)


def test_a_task_whose_rows_change_from_process_to_process_is_refused_unless_the_hash_seed_is_fixed(
    monkeypatch,
):
    monkeypatch.setattr(tasks.sys, "flags", type("Flags", (), {"hash_randomization": 1}))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(DataRefused, match="PYTHONHASHSEED=0"):
        tasks.refuse_unstable_task("word_ladder")
    tasks.refuse_unstable_task("chain_sum")
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    tasks.refuse_unstable_task("word_ladder")
