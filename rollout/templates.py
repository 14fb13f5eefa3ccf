"""Prompt templates: jinja2 in the sandbox and with the names that chat templates are written for.

A template comes with a model or a config, so it is not trusted: it sees plain data only, cannot reach
Python's insides or change what it was given, and every way in which it fails is one error of one line. What
it renders is a function of its input alone; its clock stands still, or a run that goes on tomorrow would find
other prompts than it began with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_DATE = datetime(2024, 7, 26)
"""What templates that ask for the date are told: the day that Llama's own templates fall back to."""


class TemplateFailed(ValueError):
    """A template that cannot be compiled or rendered; one line."""


class Template:
    """One compiled template. `strict`: a name that is not there is an error, not an empty string."""

    def __init__(self, source: str, *, strict: bool = False) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            undefined=jinja2.StrictUndefined if strict else jinja2.Undefined,
            # What ends the text of a prompt is part of it.
            keep_trailing_newline=strict,
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"is no jinja2 template: {_one_line(error)}") from error

    def render(self, names: Mapping[str, Any]) -> str:
        """The text. Raises TemplateFailed."""
        try:
            return self._template.render(dict(names))
        except Exception as error:  # a template can raise anything that its expressions can
            raise TemplateFailed(f"cannot be rendered: {_one_line(error)}") from error


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's own text for others, leaves it as it is here."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML, which no model has been trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return TEMPLATE_DATE.strftime(form)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
