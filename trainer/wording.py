"""The words a config is refused in: the key, its value, what is expected there, the way out; on one line.

Owns no state and refuses nothing itself. What is expected is read off the options, never written twice.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from decimal import Decimal
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

DOCUMENTED_IN = "docs/config.md"

_ALIKE = 0.6
"""Below this likeness (1: the same), a key is no misspelling of another and naming that would mislead."""

_BOUNDS = (
    ("ge", "greater than or equal to"),
    ("gt", "greater than"),
    ("le", "less than or equal to"),
    ("lt", "less than"),
)
_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Decimal: "a number"}
_OF_THE_WRONG_KIND = ("_type", "_parsing", "_from_float")
"""How the names of pydantic's errors end that say: a value of another kind is expected."""


def counted(number: int, what: str) -> str:
    """`1 learner rank`, `2 learner ranks`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def unknown(key: str, fields: Mapping[str, FieldInfo]) -> str:
    """What is said of a key that is none: the right one it stands for, if one is near."""
    near = nearest(key, fields)
    way_out = f"the nearest is {near}" if near else f"take it out, or find the right one in {DOCUMENTED_IN}"
    return f"{key or repr(key)} is no key of the config; {way_out}"


def nearest(key: str, fields: Mapping[str, FieldInfo]) -> str | None:
    """The key that was most likely meant; None where none is near."""
    section, _, leaf = key.rpartition(".")

    def likeness(candidate: str) -> tuple[float, float]:
        other_section, _, other_leaf = candidate.rpartition(".")
        words, other_words = set(leaf.split("_")), set(other_leaf.split("_"))
        if leaf == other_leaf or "".join(word[:1] for word in leaf.split("_")) == other_leaf:
            last = 1.0  # another section's, or written out: learning_rate for lr
        elif words < other_words or other_words < words:
            last = 0.9
        else:
            last = difflib.SequenceMatcher(None, leaf, other_leaf).ratio()
        return 2 * last + difflib.SequenceMatcher(None, section, other_section).ratio(), last

    near = {candidate: both for candidate in fields if (both := likeness(candidate))[1] >= _ALIKE}
    return max(near, key=lambda candidate: near[candidate]) if near else None


def explain(error: ValidationError, fields: Mapping[str, FieldInfo], sections: frozenset[str]) -> str:
    """The first thing that is wrong, and how many more are."""
    first, *others = error.errors(include_url=False)
    key = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
    # A union's error names the member that failed after the key: cut back to the key itself.
    while key not in fields and key not in sections and "." in key:
        key = key.rpartition(".")[0]
    field = fields.get(key)
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "missing" and (field is None or field.is_required()):
        required = (known for known, option in fields.items() if option.is_required())
        name = next((known for known in required if known.startswith(key)), key)
        return f"{name} is not set: it has no default; give it in the file or with --set{more}"
    return f"{key} = {show(first['input'])}: {_rule(first, field)}; {_way_out(field)}{more}"


def _rule(error: ErrorDetails, field: FieldInfo | None) -> str:
    kind, takes = error["type"], expected(field) if field is not None else ""
    if kind in ("missing", "too_long") and takes:
        return f"has too {'few' if kind == 'missing' else 'many'} values, must be {takes}"
    if any(isinstance(part, int) for part in error["loc"]):
        takes = takes.rpartition("each ")[2]  # what is wrong is one of a list's values
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "finite_number":
        return "must be finite" if takes in ("", "a table") else f"must be {takes}, and finite"
    if kind.endswith(_OF_THE_WRONG_KIND) and takes:
        return f"must be {takes}"
    said = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return said.replace("should be", "must be")


def _way_out(field: FieldInfo | None) -> str:
    if field is None or field.is_required():
        return "give another value"
    value = default_of(field)
    return "give another value, or leave it out" if value is None else f"the default is {show(value)}"


def default_of(field: FieldInfo) -> Any:
    """The option's default, as a config file would hold it."""
    value = field.get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value


def expected(field: FieldInfo) -> str:
    """What the option takes: its kind and its range."""
    return _expected(field.annotation) + _bounds(field.metadata)


def _expected(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _KINDS:
        return _KINDS[kind]
    if origin is Annotated:
        return _expected(arguments[0]) + _bounds(arguments[1:])
    if origin is tuple:
        return f"a list of {len(arguments)}, each {_expected(arguments[0])}"
    if origin is dict:
        return "a table"
    members = [part for part in arguments if part is not NoneType]
    return _expected(members[0]) if members and not isinstance(members[0], str) else "one of its words"


def _bounds(metadata: Any) -> str:
    said: list[str] = []
    for rule in [one for outer in metadata for one in getattr(outer, "metadata", [outer])]:
        for name, words in _BOUNDS:
            limit = getattr(rule, name, None)
            if limit is not None:
                said.append(f"{words} {limit}")
    return f" {' and '.join(said)}" if said else ""


def show(value: Any) -> str:
    """A value as a config file would have it, or nearly."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, tuple):
        return str(list(value))
    return "unset" if value is None else str(value)
