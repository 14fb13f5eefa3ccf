"""Rows as their source has them, each with the place that names it in an error; owns no state.

A source is a generated task, a .jsonl or .parquet file, or a list of Python dicts. Whatever it is, its rows
leave here as plain values (what JSON can hold, and bytes), because they go to other processes and into a
digest that must be the same in every life of a run.
"""

from __future__ import annotations

import datetime
import decimal
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..statemachine.errors import ConfigRefused, DataRefused
from .tasks import GENERATED, make_task, refuse_unstable_task, task_name

Source = str | os.PathLike[str] | Sequence[Mapping[str, Any]]


class RawRow(NamedTuple):
    """One row: where it is, for people, and its columns."""

    place: str
    fields: dict[str, Any]


def is_file(source: Source) -> bool:
    """Whether the source is a path."""
    return isinstance(source, str | os.PathLike) and task_name(source) is None


def read_source(
    source: Source,
    *,
    size: int | None,
    options: Mapping[str, Any],
    seed: int,
    key: str = "data.source",
) -> Iterator[RawRow]:
    """The rows in order; `key` names the source in errors. Raises DataRefused and ConfigRefused, for a
    malformed row when it is come to."""
    name = task_name(source)
    if name is not None:
        if size is None:
            raise ConfigRefused(f"data.size is needed: {source!r} makes as many rows as it is asked for")
        if size < 1:
            raise ConfigRefused(f"data.size = {size}: it must be at least 1")
        return _generated(name, size, seed, dict(options))
    for option, value in (("size", size), ("options", dict(options) or None)):
        if value is not None:
            raise ConfigRefused(
                f"data.{option} = {value!r} is for generated tasks ('{GENERATED}NAME'), and {key} is "
                f"{_said(source)}: leave it out"
                + (", or set data.max_prompts to use fewer rows" if option == "size" else ""),
                key=f"data.{option}",
            )
    if not isinstance(source, str | os.PathLike):
        return _objects(source)
    path = Path(source)
    readers = {".jsonl": _json_lines, ".parquet": _parquet}
    if path.suffix.lower() not in readers:
        raise DataRefused(
            f"{key} = {str(source)!r} is of no kind that is read: it must be '{GENERATED}NAME' or a path to "
            "a .jsonl or .parquet file",
            source=str(source),
        )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataRefused(
            f"{key} = {str(source)!r} {what}: it must be a file, seen from {Path.cwd()}",
            source=str(source),
        )
    return readers[path.suffix.lower()](path)


def plain(value: Any, place: str, key: str) -> Any:
    """The value as JSON has it (tuples and sets as lists, keys as strings, numpy as Python), and bytes.
    Raises DataRefused for what cannot be made plain."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(one, place, f"{key}.{name}") for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, place, key) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(one, place, key) for one in value), key=repr)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    if isinstance(value, str):  # enums and other children of the plain kinds
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if callable(getattr(value, "tolist", None)):  # numpy's scalars and arrays
        return plain(value.tolist(), place, key)
    raise DataRefused(
        f"{place}: {key} holds a {type(value).__name__}, which is no plain value and cannot go to workers: "
        "use strings, numbers, lists and dicts"
    )


def _generated(name: str, size: int, seed: int, options: dict[str, Any]) -> Iterator[RawRow]:
    refuse_unstable_task(name)
    task = make_task(name, size=size, seed=seed, options=options)
    for index in range(size):
        place = f"row {index} of {GENERATED}{name}"
        try:
            entry = task[index]
        except Exception as error:
            because = " ".join(str(error).split()) or type(error).__name__
            raise DataRefused(
                f"{place} cannot be made: {because}; lower data.size or change data.options"
            ) from error
        fields = {"prompt": entry["question"], **entry}
        yield RawRow(place, {key: plain(value, place, key) for key, value in fields.items()})


def _objects(rows: Sequence[Mapping[str, Any]]) -> Iterator[RawRow]:
    for index, row in enumerate(rows):
        place = f"row {index} of the rows passed"
        if not isinstance(row, Mapping):
            raise DataRefused(
                f"{place} is a {type(row).__name__}: it must be a dict with a prompt", row=index
            )
        yield RawRow(place, {str(key): plain(value, place, str(key)) for key, value in row.items()})


def _json_lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            place = f"{path} line {line_number}"
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode("utf-8-sig").rstrip(), parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                raise DataRefused(
                    f"{place} is no JSON: {_what_is_wrong(error)}; {_WAY_OUT}",
                    file=str(path),
                    line=line_number,
                ) from error
            if not isinstance(fields, dict):
                raise DataRefused(
                    f"{place} is a JSON {type(fields).__name__}; {_WAY_OUT}",
                    file=str(path),
                    line=line_number,
                )
            yield RawRow(place, fields)


def _parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    place = f"{path} row {number}"
                    yield RawRow(place, {key: plain(value, place, key) for key, value in row.items()})
    except (pyarrow.ArrowException, OSError) as error:
        raise DataRefused(
            f"{path} cannot be read after row {number}: {_one_line(error)}; write it again, or name "
            "another file",
            file=str(path),
            row=number,
        ) from error


_WAY_OUT = "correct that line: each is one JSON object, a row with its prompt"


def _what_is_wrong(error: Exception) -> str:
    """In words without a line number: the decoder has seen one line only, and counts that as its first."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:].removesuffix(' at')} at character {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is no UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else _one_line(error)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _said(source: Source) -> str:
    return repr(os.fspath(source)) if isinstance(source, str | os.PathLike) else "a list of rows"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
