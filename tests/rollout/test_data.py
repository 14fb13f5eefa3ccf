"""Rows of data: what is loaded, what is refused and by which words, and the order of the draw."""

import collections
import datetime
import decimal
import enum
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import reasoning_gym
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.rollout.data import (
    digest_rows,
    draw_order,
    eval_task_seed,
    load_eval_rows,
    load_rows,
    sample_seed,
)
from surefoot.rollout.tokens import load_tokenizer
from surefoot.statemachine.errors import ConfigRefused, DataRefused, UserMistake

from . import tiny_models

SUMS = "reasoning_gym:chain_sum"
SMALL_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return load_tokenizer(tiny_models.qwen(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    return load_tokenizer(tiny_models.llama3(tmp_path_factory.mktemp("llama3")))


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return load_tokenizer(tiny_models.sums(tmp_path_factory.mktemp("sums")))


def load(tokenizer, source, **kwargs):
    return load_rows(**{"source": source, "tokenizer": tokenizer, "max_new_tokens": 4} | kwargs)


def write_lines(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def refusal(*args, kind=DataRefused, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        load(*args, **kwargs)
    assert isinstance(caught.value, UserMistake)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- files


def test_lines_become_rows_in_order_with_all_their_columns(qwen, tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "1+1", "answer": "2", "level": [1, {"é": None}]},
        "\n",
        {"prompt": "2+2", "answer": 4},
    )
    data = load(qwen, path)
    assert [row.row_index for row in data.rows] == [0, 1]
    assert [row.prompt for row in data.rows] == ["1+1", "2+2"]
    assert data.rows[0].fields == {"prompt": "1+1", "answer": "2", "level": [1, {"é": None}]}
    assert data.rows[1].prompt_ids == qwen.encode("2+2")
    assert data.filtered == 0


def test_parquet_gives_the_very_rows_that_the_same_lines_give(qwen, tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2", "n": 1},
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2"}],
            "answer": "4",
            "n": 2,
        },
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    from_parquet = load(qwen, str(tmp_path / "a.parquet"), max_new_tokens=1)
    from_lines = load(qwen, write_lines(tmp_path / "a.jsonl", *rows), max_new_tokens=1)
    assert from_parquet == from_lines
    assert from_parquet == load(qwen, rows, max_new_tokens=1)


def test_a_path_may_be_a_path_and_its_ending_in_capitals(qwen, tmp_path):
    write_lines(tmp_path / "A.JSONL", {"prompt": "1", "answer": "1"})
    assert len(load(qwen, tmp_path / "A.JSONL").rows) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x"\n', "line 3 is no JSON"),
        ('{"prompt": "x", "answer": NaN}\n', "line 3 is no JSON: NaN"),
        ("[" * 100_000 + "\n", "line 3 is no JSON"),
        ("[1]\n", "line 3 is a JSON list"),
        ('"prompt"\n', "line 3 is a JSON str"),
        ('{"question": "x", "answer": "y"}\n', "line 3 has no prompt (it has answer, question)"),
        ('{"prompt": 3, "answer": "y"}\n', "line 3: its prompt is 3, not a string"),
        ('{"prompt": null, "answer": "y"}\n', "line 3: its prompt is None"),
        ('{"prompt": "", "answer": "y"}\n', "line 3: its prompt is empty"),
        ('{"prompt": [], "answer": "y"}\n', "line 3: its prompt has no messages"),
        ('{"prompt": ["x"], "answer": "y"}\n', "line 3: a chat message must have role and content"),
        (
            '{"prompt": [{"role": "user"}], "answer": "y"}\n',
            "line 3: a chat message must have role and content",
        ),
        (r'{"prompt": "1+\ud800", "answer": "y"}', "line 3: character 3 of its prompt is half of a"),
        ('{"prompt": "x"}\n', "line 3 has no answer"),
        ('{"prompt": "x", "answer": null}\n', "line 3 has the answer None"),
        ('{"prompt": "x", "answer": " "}\n', "line 3 has the answer ' '"),
        ('{"prompt": "x", "answer": ["y"]}\n', "line 3 has the answer ['y']"),
    ],
)
def test_a_malformed_line_is_refused_by_file_and_number(qwen, tmp_path, line, said):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x", "answer": "y"}, "\n", line)
    assert f"{path} {said}" in refusal(qwen, path)


JSON_WAY_OUT = "correct that line: each is one JSON object, a row with its prompt"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "1+1", "answer"\n', "is no JSON: expecting ':' delimiter at character 27"),
        (b'  {"prompt": "x", "answer": "y"\r\n', "is no JSON: expecting ',' delimiter at character 32"),
        (b'{"prompt": "x\n', "is no JSON: unterminated string starting at character 12"),
        (b'{"prompt": NaN}\n', "is no JSON: NaN is no JSON value"),
        (b'{"prompt": "\xff"}\n', "is no JSON: byte 13 is no UTF-8"),
        (b"[" * 100_000, "is no JSON: it is nested too deeply"),
        (b"[1]\n", "is a JSON list"),
    ],
)
def test_a_malformed_line_has_one_line_number_what_is_wrong_and_the_way_out(qwen, tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "x", "answer": "y"}\n' + line)
    assert refusal(qwen, str(path)) == f"{path} line 2 {said}; {JSON_WAY_OUT}"


def test_a_row_without_a_prompt_is_told_which_column_it_needs(qwen, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"question": "x", "answer": "y"})
    assert refusal(qwen, path) == (
        f"{path} line 1 has no prompt (it has answer, question): every row needs a column of that name; "
        "rename the one that holds the prompt"
    )


def test_a_line_that_is_no_utf8_is_refused_by_number(qwen, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x", "answer": "y"}\n{"prompt": "\xff"}\n')
    assert "a.jsonl line 2 is no JSON" in refusal(qwen, str(tmp_path / "a.jsonl"))


def test_a_malformed_parquet_row_is_refused_by_number(qwen, tmp_path):
    rows = [{"prompt": "x", "answer": "y"}, {"prompt": None, "answer": "y"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert "a.parquet row 2: its prompt is None" in refusal(qwen, str(tmp_path / "a.parquet"))


def test_a_file_that_is_no_parquet_or_cut_short_is_refused(qwen, tmp_path):
    (tmp_path / "a.parquet").write_text("no parquet")
    assert "a.parquet cannot be read" in refusal(qwen, str(tmp_path / "a.parquet"))


def test_an_answer_is_not_needed_with_a_reward_function_of_ones_own(qwen, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x"})
    assert load(qwen, path, needs_answer=False).rows[0].fields == {"prompt": "x"}


def test_a_missing_file_is_refused_by_its_name(qwen, tmp_path):
    assert "data.source = 'no.jsonl' does not exist" in refusal(qwen, "no.jsonl")
    (tmp_path / "a.jsonl").mkdir()
    assert "is a folder" in refusal(qwen, str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("source", ["data.csv", "chain_sum", ""])
def test_a_source_of_no_known_kind_is_refused_with_the_kinds_there_are(qwen, source):
    assert "'reasoning_gym:NAME' or a path to a .jsonl or .parquet file" in refusal(qwen, source)


def test_an_empty_file_is_refused(qwen, tmp_path):
    assert "a.jsonl' has no rows" in refusal(qwen, write_lines(tmp_path / "a.jsonl", "\n\n"))
    table = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "a.parquet' has no rows" in refusal(qwen, str(tmp_path / "a.parquet"))
    assert "the list of rows has no rows" in refusal(qwen, [])


def test_size_and_options_are_for_generated_tasks_only(qwen, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x", "answer": "y"})
    assert "data.size = 5 is for generated tasks" in refusal(qwen, path, size=5, kind=ConfigRefused)
    assert "data.options" in refusal(qwen, path, options={"a": 1}, kind=ConfigRefused)
    assert "a list of rows" in refusal(qwen, [{"prompt": "x"}], size=5, kind=ConfigRefused)


# --- rows passed as objects


class Level(enum.IntEnum):
    HARD = 3


def test_objects_become_plain_values(qwen):
    row = {
        "prompt": np.str_("1+1"),
        "answer": np.int64(2),
        "weights": np.array([0.5, 1.0]),
        "shape": (1, {2: {"b", "a"}}),
        "level": Level.HARD,
        "day": datetime.date(2024, 7, 26),
        "price": decimal.Decimal("1.50"),
        "raw": b"\x00\xff",
    }
    (loaded,) = load(qwen, [row]).rows
    assert loaded.fields == {
        "prompt": "1+1",
        "answer": 2,
        "weights": [0.5, 1.0],
        "shape": [1, {"2": ["a", "b"]}],
        "level": 3,
        "day": "2024-07-26",
        "price": "1.50",
        "raw": b"\x00\xff",
    }
    assert [type(loaded.fields[key]) for key in ("prompt", "answer", "level")] == [str, int, int]


def test_an_object_that_cannot_be_plain_is_refused_by_row_and_key(qwen):
    rows = [{"prompt": "x", "answer": "y"}, {"prompt": "x", "answer": "y", "meta": {"f": object()}}]
    assert "row 1 of the rows passed: meta.f holds a object" in refusal(qwen, rows)
    assert "row 0 of the rows passed is a str" in refusal(qwen, ["x"])


# --- generated tasks


def test_generated_rows_are_the_tasks_own_from_the_runs_seed(qwen):
    data = load(qwen, SUMS, size=5, seed=7, options=SMALL_SUMS, max_new_tokens=1)
    task = reasoning_gym.create_dataset("chain_sum", size=5, seed=7, **SMALL_SUMS)
    assert [row.prompt for row in data.rows] == [entry["question"] for entry in task]
    assert [row.fields["answer"] for row in data.rows] == [entry["answer"] for entry in task]
    assert data.rows[3].fields["prompt"] == data.rows[3].prompt
    assert data.rows[3].fields["metadata"]["num_terms"] == 2


def test_a_generated_source_needs_a_size(qwen):
    assert "data.size is needed" in refusal(qwen, SUMS, kind=ConfigRefused)
    assert "data.size = 0" in refusal(qwen, SUMS, size=0, kind=ConfigRefused)


def test_a_row_that_cannot_be_made_is_refused_by_its_place(qwen, monkeypatch):
    class Task:
        def __getitem__(self, index):
            if index == 1:
                raise RuntimeError("no puzzle\nof that size")
            return {"question": "1", "answer": "1", "metadata": {}}

    monkeypatch.setattr("surefoot.rollout.sources.make_task", lambda *args, **kwargs: Task())
    said = refusal(qwen, SUMS, size=3)
    assert "row 1 of reasoning_gym:chain_sum cannot be made: no puzzle of that size" in said


def test_the_digest_is_the_same_in_a_process_with_another_hash_seed(qwen, tmp_path):
    folder = tiny_models.sums(tmp_path)
    code = (
        "import sys; from surefoot.rollout.data import load_rows\n"
        "from surefoot.rollout.tokens import load_tokenizer\n"
        "rows = [{'prompt': '1', 'answer': '1', 'set': {'a', 'b', 'c', 'd'}, 'z': 1, 'y': 2}]\n"
        "t = load_tokenizer(sys.argv[1])\n"
        "print(load_rows(source=rows, tokenizer=t, max_new_tokens=1).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 32


# --- prompts


def test_messages_go_through_the_models_chat_template_and_get_no_second_begin_token(llama3):
    (row,) = load(llama3, [{"prompt": CHAT, "answer": "y"}]).rows
    assert row.prompt == '<|begin|>[user]"hi"<|eot|>[assistant]'
    assert row.prompt_ids == llama3.encode(row.prompt, add_special_tokens=False)
    assert row.prompt_ids.count(0) == 1


def test_a_string_stays_plain_and_gets_what_the_tokenizer_adds(llama3):
    (row,) = load(llama3, [{"prompt": "hi", "answer": "y"}]).rows
    assert row.prompt == "hi"
    assert row.prompt_ids == llama3.encode("hi")
    assert row.prompt_ids[0] == 0


@pytest.mark.parametrize(
    ("template", "prompt", "begin_tokens"),
    [
        ("Q: {{ prompt }} of {{ level.name }}\n", "Q: hi of hard\n", 1),
        ("{{ bos_token }}{{ prompt }}{{ eos_token }}", "<|begin|>hi<|eot|>", 1),
        ("{{ chat(prompt) }}", '<|begin|>[user]"hi"<|eot|>[assistant]', 1),
        (
            "{{ chat([{'role': 'assistant', 'content': prompt}]) }}\nA",
            '<|begin|>[assistant]"hi"<|eot|>[assistant]\nA',
            1,
        ),
    ],
)
def test_a_template_sees_the_rows_columns_and_the_models_tokens(llama3, template, prompt, begin_tokens):
    (row,) = load(
        llama3, [{"prompt": "hi", "answer": "y", "level": {"name": "hard"}}], template=template
    ).rows
    assert row.prompt == prompt
    assert row.prompt_ids.count(0) == begin_tokens


def test_a_template_takes_messages_in_place_of_the_models_own(sums):
    template = "{% for message in prompt %}{{ message.content }}={% endfor %}"
    (row,) = load(
        sums, [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}], template=template
    ).rows
    assert row.prompt == "1+1="


def test_messages_without_any_template_are_refused_with_the_way_out(sums):
    said = refusal(sums, [{"prompt": CHAT, "answer": "y"}])
    assert "row 0 of the rows passed" in said
    assert "the model has no chat template: set data.template" in said


def test_a_template_that_fails_is_refused_by_row_or_by_key(qwen, llama3):
    row = {"prompt": "hi", "answer": "y"}
    assert "data.template cannot be rendered: 'question' is undefined" in refusal(
        qwen, [row], template="{{ question }}"
    )
    assert "data.template is no jinja2 template" in refusal(
        qwen, [row], template="{% if %}", kind=ConfigRefused
    )
    said = refusal(llama3, [{"prompt": [{"role": "tool", "content": ""}], "answer": "y"}])
    assert "the model's chat template cannot be rendered: no role tool" in said


# --- lengths


def test_long_prompts_are_filtered_and_counted_and_rows_are_numbered_after_it(sums):
    rows = [{"prompt": "1" * n, "answer": "1"} for n in (3, 9, 4, 10, 2)]
    data = load(sums, rows, max_prompt_tokens=4)
    assert [(row.row_index, len(row.prompt_ids)) for row in data.rows] == [(0, 3), (1, 4), (2, 2)]
    assert data.filtered == 2


def test_a_filter_that_leaves_nothing_is_refused_with_the_shortest(sums):
    rows = [{"prompt": "1" * n, "answer": "1"} for n in (9, 7, 8)]
    said = refusal(sums, rows, max_prompt_tokens=4)
    assert "data.max_prompt_tokens = 4 leaves none of 3 rows: the shortest prompt has 7 tokens" in said


def test_a_prompt_that_does_not_fit_the_context_is_refused_with_both_numbers_and_the_way_out(sums, tmp_path):
    lines = [{"prompt": "1" * n, "answer": "1"} for n in (60, 61)]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    said = refusal(sums, path)  # context 64, max_new_tokens 4
    assert f"{path} line 2: its prompt of 61 tokens and rollout.max_new_tokens = 4" in said
    assert "context of 64: set data.max_prompt_tokens to at most 60" in said
    assert [len(row.prompt_ids) for row in load(sums, path, max_prompt_tokens=60).rows] == [60]
    assert "lower rollout.max_new_tokens" in refusal(sums, path, max_new_tokens=64)
    assert "set data.max_prompt_tokens" not in refusal(sums, path, max_new_tokens=64)


# --- digests


def test_the_digest_is_over_prompts_ids_and_columns_in_order(sums):
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "é"}]
    line = b'["1",[3],{"answer":"1","prompt":"1"}]\n["2",[4],{"answer":"\\u00e9","prompt":"2"}]\n'
    assert load(sums, rows).digest == xxhash.xxh3_128(line).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[::-1],
        lambda rows: rows[:-1],
        lambda rows: [*rows, rows[0]],
        lambda rows: [rows[0] | {"answer": "3"}, rows[1]],
        lambda rows: [rows[0] | {"extra": None}, rows[1]],
        lambda rows: [rows[0] | {"answer": 1}, rows[1]],
        lambda rows: [rows[0] | {"prompt": "1 "}, rows[1]],
    ],
)
def test_the_digest_changes_with_any_row(sums, change):
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "2"}]
    assert load(sums, change(rows)).digest != load(sums, rows).digest


def test_the_digest_does_not_depend_on_the_order_of_columns_and_takes_any_value(sums):
    row = {"prompt": "1", "answer": "1", "big": 2**80, "raw": b"\xff", "no": float("nan")}
    assert load(sums, [row]).digest == load(sums, [dict(reversed(row.items()))]).digest
    assert digest_rows([]) == xxhash.xxh3_128().hexdigest()


# --- held-out rows


def held_out(tokenizer, train, **kwargs):
    defaults = {"train": train, "tokenizer": tokenizer, "max_new_tokens": 1, "eval_source": None}
    return load_eval_rows(**defaults | kwargs)


def test_held_out_tasks_are_distinct_and_none_is_in_training(qwen):
    task = {"source": SUMS, "options": SMALL_SUMS}
    train = load(qwen, size=60, max_new_tokens=1, **task).rows  # of about 190 prompts there are
    data = held_out(qwen, train, size=50, **task)
    prompts = [row.prompt for row in data.rows]
    assert len(set(prompts)) == 50
    assert not set(prompts) & {row.prompt for row in train}
    assert [row.row_index for row in data.rows] == list(range(50))
    assert data == held_out(qwen, train, size=50, **task)
    assert data.digest != held_out(qwen, train, size=50, seed=1, **task).digest


def test_held_out_tasks_are_the_tasks_rows_from_that_seed(qwen):
    data = held_out(qwen, [], source=SUMS, options=SMALL_SUMS, size=3, seed=5)
    task = reasoning_gym.create_dataset("chain_sum", size=3, seed=eval_task_seed(5), **SMALL_SUMS)
    assert [row.prompt for row in data.rows] == [entry["question"] for entry in task]


def test_held_out_tasks_come_from_a_seed_far_from_the_runs(qwen):
    # A task uses the seeds from its own on, one a row: the next seed would give the training rows again.
    assert all(abs(eval_task_seed(seed) - seed) > 100_000 for seed in range(1000))
    assert all(0 <= eval_task_seed(seed) < 2**31 for seed in (-1, 0, 2**70))


def test_a_task_with_too_few_prompts_for_evaluation_is_refused_with_how_many_there_are(qwen):
    with pytest.raises(ConfigRefused, match=r"eval.size = 500, but the task gave only \d+ prompts"):
        held_out(qwen, [], source=SUMS, options=SMALL_SUMS, size=500)


def test_held_out_rows_of_a_file_leave_out_those_in_training(sums, tmp_path):
    train = load(sums, [{"prompt": str(n), "answer": "1"} for n in (1, 2)]).rows
    path = write_lines(tmp_path / "e.jsonl", *({"prompt": str(n), "answer": "1"} for n in (2, 3, 3, 4, 5)))
    data = held_out(sums, train, source="train.jsonl", eval_source=path, size=2)
    assert [(row.row_index, row.prompt) for row in data.rows] == [(0, "3"), (1, "4")]
    assert len(held_out(sums, train, source="train.jsonl", eval_source=path, size=128).rows) == 3


def test_a_held_out_file_that_is_the_training_file_is_refused(sums, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1"})
    with pytest.raises(DataRefused, match="has no row that is not in training"):
        held_out(sums, load(sums, path).rows, source=path, eval_source=path, size=3)


@pytest.mark.parametrize(
    ("source", "eval_source", "kind", "said"),
    [
        ("a.jsonl", None, ConfigRefused, "eval.source is needed"),
        ([{"prompt": "1"}], None, ConfigRefused, "eval.source is needed"),
        ("a.jsonl", "no.jsonl", DataRefused, "eval.source = 'no.jsonl' does not exist"),
        (SUMS, "reasoning_gym:lcm", ConfigRefused, "must be those of data.source"),
    ],
)
def test_held_out_rows_that_cannot_be_had_are_refused(sums, source, eval_source, kind, said):
    with pytest.raises(kind, match=said):
        held_out(sums, [], source=source, eval_source=eval_source, size=3)


def test_a_held_out_file_needs_answers_also_where_training_is_generated(qwen, tmp_path):
    path = write_lines(tmp_path / "e.jsonl", {"prompt": "x"})
    with pytest.raises(DataRefused, match=r"e.jsonl line 1 has no answer"):
        held_out(qwen, [], source=SUMS, eval_source=path, size=3)


# --- the draw


@settings(deadline=None)
@given(data_len=st.integers(1, 60), epochs=st.integers(1, 4), seed=st.integers(-(2**70), 2**70))
def test_every_epoch_draws_every_row_once(data_len, epochs, seed):
    order = draw_order(data_len, epochs, seed)
    drawn = [order(prompt_index) for prompt_index in range(len(order))]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * data_len : (epoch + 1) * data_len]) == list(range(data_len))
    # any prompt can be asked for, in any order
    again = draw_order(data_len, epochs, seed)
    assert [again(prompt_index) for prompt_index in reversed(range(len(order)))] == drawn[::-1]


def test_the_draw_is_fixed_for_good():
    # Written down from the definition: rows sorted by xxh3-64 of the row, under a key of seed and epoch.
    key = xxhash.xxh3_64_intdigest(b"draw order/42/1") >> 1
    by_hash = sorted(range(8), key=lambda row: xxhash.xxh3_64_intdigest(row.to_bytes(8, "little"), key))
    assert [draw_order(8, 2, 42)(prompt_index) for prompt_index in range(8, 16)] == by_hash
    assert by_hash == [draw_order(8, 9, 42)(prompt_index) for prompt_index in range(8, 16)]


def test_epochs_and_seeds_are_shuffled_apart():
    order = draw_order(50, 2, 0)
    first, second = ([order(start + i) for i in range(50)] for start in (0, 50))
    other = [draw_order(50, 1, 1)(i) for i in range(50)]
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(50))}) == 4


def test_each_row_is_first_about_equally_often():
    firsts = collections.Counter(draw_order(4, 1, seed)(0) for seed in range(2000))
    assert all(400 < firsts[row] < 600 for row in range(4))


def test_nothing_is_drawn_beyond_the_last_epoch():
    order = draw_order(10, 3, 0)
    assert len(order) == 30
    for prompt_index in (30, -1):
        with pytest.raises(IndexError, match=f"prompt {prompt_index} of 3 epochs of 10 rows"):
            order(prompt_index)
    with pytest.raises(ValueError, match="no prompts"):
        draw_order(0, 1, 0)


def test_a_long_run_remembers_two_epochs_at_most():
    order = draw_order(10, 1000, 0)
    for prompt_index in range(0, len(order), 5):
        order(prompt_index)
    assert len(order._shuffled) == 2


# --- sampling seeds


def test_sampling_seeds_are_of_63_bits_and_differ_by_prompt_and_sample_and_run():
    seeds = {
        sample_seed(run, prompt, sample) for run in range(5) for prompt in range(100) for sample in range(16)
    }
    assert len(seeds) == 5 * 100 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert sample_seed(1, 23, 4) != sample_seed(12, 3, 4)  # numbers do not run into each other


def test_a_sampling_seed_is_fixed_for_good_and_knows_no_attempt():
    assert sample_seed(0, 1, 2) == xxhash.xxh3_64_intdigest(b"sample/0/1/2") >> 1
    assert sample_seed(0, 1, 2) == sample_seed(0, 1, 2)
