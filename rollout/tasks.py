"""Tasks and their answers: generated tasks, how an answer is found in a response, and the default rewards.

Owns no state. A generated task scores its own answers; rows of a file are scored by exact match. Both look
at the answer that the response gives, never at the whole response, because scorers give a right answer
within a sentence little or nothing.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from decimal import Decimal, InvalidOperation
from typing import Any

from ..statemachine.errors import ConfigRefused, DataRefused

GENERATED = "reasoning_gym:"
HASH_ORDERED = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Tasks that go through sets of strings: other rows in every process, unless Python's hash seed is fixed."""
TUPLES_COMPARED = frozenset({"arc_agi", "rearc"})
"""Tasks whose scorer compares with tuples, which plain values hold as lists."""

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_AFTER_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")


def task_name(source: Any) -> str | None:
    """The task of a generated source (`reasoning_gym:chain_sum` -> `chain_sum`); None for any other."""
    if isinstance(source, str) and source.startswith(GENERATED):
        return source.removeprefix(GENERATED)
    return None


def make_task(name: str, *, size: int, seed: int, options: dict[str, Any]) -> Any:
    """The task's rows, made as they are asked for. Raises DataRefused for a name that is none and
    ConfigRefused for options that the task does not take."""
    import reasoning_gym  # 3 s of imports, so only once it is needed
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        raise DataRefused(
            f"data.source = '{GENERATED}{name}': there is no such task"
            + (f", the nearest is '{GENERATED}{near[0]}'" if near else ": reasoning-gym lists them"),
            source=f"{GENERATED}{name}",
        )
    for key in ("seed", "size"):
        if key in options:
            raise ConfigRefused(
                f"data.options.{key} = {options[key]!r}: "
                + ("the run's seed is used, set seed" if key == "seed" else "set data.size"),
                key=f"data.options.{key}",
            )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except Exception as error:  # tasks check their options with bare asserts
        raise ConfigRefused(
            f"data.options = {options!r} does not suit the task {name}: {_one_line(error)}; take that out, "
            "or give what the task takes",
            key="data.options",
        ) from error


def refuse_unstable_task(name: str) -> None:
    """Refuse a task whose rows differ from process to process: a run that goes on would find other data."""
    fixed = sys.flags.hash_randomization == 0 or os.environ.get("PYTHONHASHSEED", "random") != "random"
    if name in HASH_ORDERED and not fixed:
        raise DataRefused(
            f"data.source = '{GENERATED}{name}': its rows depend on Python's hash seed, so a run could not "
            "go on with them: set PYTHONHASHSEED=0 in the environment, or write the rows to a .jsonl file",
            source=f"{GENERATED}{name}",
        )


class TaskReward:
    """The default reward of a generated task: the task's own score of the extracted answer, 0 to 1."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.options = dict(options)
        self._task: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskReward, (self.name, self.options)

    def __call__(self, row: dict[str, Any], text: str, ids: list[int]) -> float:
        metadata = row.get("metadata")
        if not isinstance(metadata, dict) or metadata.get("source_dataset") != self.name:
            return exact_match_reward(row, text, ids)  # a held-out row from a file
        if self._task is None:
            self._task = make_task(self.name, size=1, seed=0, options=self.options)
        entry = row
        if self.name in TUPLES_COMPARED:
            entry = {**row, "metadata": _with_tuples(row["metadata"])}
        answer = extract_answer(text, many_lines="\n" in str(row["answer"]))
        try:
            return float(self._task.score_answer(answer, entry))
        except Exception:
            # Some scorers parse the answer and raise on one that is not of its form: such an answer is wrong.
            # One that raises on the right answer too is broken, and that is said.
            if row["answer"] is not None:
                self._task.score_answer(row["answer"], entry)
            return 0.0


def exact_match_reward(row: dict[str, Any], text: str, ids: list[int]) -> float:
    """The default reward of a file's rows: 1 if the extracted answer is the answer column's, else 0."""
    expected = str(row["answer"])
    marked = _marked_answer(expected)
    found = extract_answer(text, many_lines=marked is None and "\n" in expected.strip())
    return float(same_answer(found, expected if marked is None else marked))


def extract_answer(text: str, *, many_lines: bool = False) -> str:
    r"""The answer that a response gives: the last `<answer>...</answer>`, else the last `\boxed{...}`, else
    what follows the last `####`, else its last line that is not empty (`many_lines`: all of it). What was
    thought before `</think>` does not count."""
    text = text.rpartition("</think>")[2]
    marked = _marked_answer(text)
    if marked is not None:
        return marked
    stripped = text.strip()
    return stripped if many_lines else stripped.rpartition("\n")[2].strip()


def same_answer(one: str, other: str) -> bool:
    """Equal after whitespace is evened out; numbers by value, so `1,000` is `1000` and `3.0` is `3`."""
    one, other = _tidy(one), _tidy(other)
    if one == other:
        return True
    first, second = _number(one), _number(other)
    return first is not None and first == second


def _marked_answer(text: str) -> str | None:
    tags = _ANSWER_TAG.findall(text)
    if tags:
        return tags[-1].strip()
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    hashes = _AFTER_HASHES.findall(text)
    return hashes[-1].strip() if hashes else None


def _last_boxed(text: str) -> str | None:
    """What the last closed `\\boxed{...}` holds, braces within it matched."""
    start = len(text)
    while (start := text.rfind("\\boxed{", 0, start)) >= 0:
        depth = 0
        for end in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : end].strip()
    return None


def _tidy(text: str) -> str:
    text = " ".join(text.replace("−", "-").split())
    return text[1:-1].strip() if len(text) > 2 and text[0] == text[-1] == "$" else text


def _number(text: str) -> Decimal | None:
    text = text.removesuffix(".")
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_with_tuples(one) for one in value)
    if isinstance(value, dict):
        return {key: _with_tuples(one) for key, one in value.items()}
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
