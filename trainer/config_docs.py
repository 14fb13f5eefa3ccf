"""The page docs/config.md, made from the options; `python -m surefoot.trainer.config_docs` prints it.

Owns nothing. The committed page is always what this makes: a test compares them.
"""

from __future__ import annotations

import sys
from decimal import Decimal
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from .config import option_fields
from .options import may_change

_INTRODUCTION = """\
# Configuration

Made from `trainer/options.py` by `make docs`; every default is stated there and nowhere else.

A config is a TOML file. Tables nest as the keys' dots say: `optim.schedule.kind` is `kind` under
`[optim.schedule]`. `--set KEY=VALUE` overrides one key; the value is TOML, or else a bare string, and
`none` unsets a key that may be unset. An unknown key is refused. Of `optim.schedule.warmup_steps` and
`optim.schedule.warmup_ratio` only one can hold; `--set` on one takes the other's place.

A relative path in the file is taken from the file's own folder if it exists there, otherwise from the
current folder.

top_p, top_k, min_p and penalties are refused: training samples from the full distribution scaled by
`rollout.temperature`, since under any other one the engine's log-probabilities are not the learner's.

When a run goes on, every key must be as it was, but for those marked *may change*, which do not touch its
accounting or numbers. With `rollout.deterministic`, `rollout.max_concurrent` and `rollout.threads` stay
too.
"""


def document() -> str:
    """The page, in Markdown."""
    lines = [_INTRODUCTION]
    heading: str | None = None
    for key, field, section in option_fields():
        table = key.rpartition(".")[0]
        if table != heading:
            heading = table
            title = f"## `[{table}]`\n\n{section.__doc__}" if table else "## Top level"
            lines.append(f"\n{title}\n\n| key | type | default | |\n| --- | --- | --- | --- |")
        note = " *May change.*" if may_change(key, deterministic=False) else ""
        cells = (f"`{key}`", _kind(field), _default(field), f"{field.description}{note}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value!r}`".replace("'", '"')


def _kind(field: FieldInfo) -> str:
    kind = _name(field.annotation)
    for rule in field.metadata:
        for bound, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            limit: Any = getattr(rule, bound, None)
            if limit is not None and limit < 2**62:
                kind += f", {sign} {limit}"
    return kind


def _name(kind: Any) -> str:
    names = {int: "integer", float: "number", str: "string", bool: "true or false", Decimal: "exact number"}
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in names:
        return names[kind]
    if origin is Annotated:
        return _name(arguments[0])
    if origin is Literal:
        return " or ".join(f'`"{word}"`' for word in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_name(part) for part in arguments if part is not NoneType)
    if origin is dict:
        return "table"
    if origin is tuple:
        return f"{len(arguments)} of: {_name(arguments[0])}"
    raise TypeError(f"an option of type {kind} has no name for the page")


if __name__ == "__main__":
    sys.stdout.write(document())
