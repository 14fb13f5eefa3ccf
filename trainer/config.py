"""Reading a config: TOML or a dict, overridden key by key, refused in one line, compared with a run's own.

Holds no state. What comes out of `load_config` has every key, every path absolute and every value of the type
and range that `options` states; whatever does not is a ConfigRefused that names key, value, rule and way out.

Paths. A relative path in a config file is taken from the file's own folder if it exists there, otherwise,
like every relative path in a dict or an override, from the current folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ..rollout.tasks import GENERATED, task_name
from ..statemachine.errors import ConfigChanged, ConfigRefused
from .options import EXCLUSIVE, FREE_FORM, OBJECT, PATHS, Config, Section, WrittenPath, may_change
from .wording import default_of, explain, show, unknown

__all__ = ["Config", "changed", "flatten", "load_config", "option_fields", "refuse_changes"]

_FULL_DISTRIBUTION_ONLY = frozenset(
    {
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "penalty",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "length_penalty",
        "penalties",
    }
)
"""Sampling parameters under which an engine's log-probabilities are not the learner's."""


def load_config(
    source: str | Path | Mapping[str, Any] | Config, sets: Sequence[str] = (), *, rows: str | None = None
) -> Config:
    """The config of a TOML file, a nested dict or a Config, with overrides `a.b=value` applied in order.

    An override's value is TOML, or else a bare string; `none` unsets a key that may be unset. `rows` is the
    name of rows that the program passes as objects: they take data.source's place. Raises ConfigRefused.
    """
    folder: Path | None = None
    if isinstance(source, Config):
        tree: dict[str, Any] = source.resolved()
    elif isinstance(source, Mapping):
        tree = _copy(source)
    elif isinstance(source, str | Path):
        tree, folder = _read(Path(source)), Path(source).resolve().parent
    else:
        raise ConfigRefused(
            f"the config is a {type(source).__name__}: give the path of a TOML file, or a dict"
        )
    if rows is not None:
        _override(tree, "data.source", OBJECT + rows)
        for made_of_a_task in ("size", "options"):
            tree["data"].pop(made_of_a_task, None)
    given = dict(flatten(tree))
    for mine, other in EXCLUSIVE:
        if given.get(mine) is not None and given.get(other) is not None:
            both = f"{mine} = {show(given[mine])} and {other} = {show(given[other])}"
            raise ConfigRefused(f"{both}: only one of the two can hold; take one out")
    in_file = {key for key in PATHS if key in given}
    overrides = _overrides(sets)
    for key, value in overrides.items():
        _override(tree, key, value)
        in_file.discard(key)
    for key in list(dict(flatten(tree))):
        _refuse_unknown(key, tree)
    written = _absolute_paths(tree, folder, in_file)
    if isinstance(source, Config):  # its paths were made absolute before, but for those overridden
        written |= {key: said for key in written if key not in overrides and (said := source.written(key))}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigRefused(explain(error, _FIELDS, _SECTIONS)) from None
    config._written.update(written)
    _refuse_contradictions(config)
    return config


def option_fields(
    section: type[BaseModel] = Config, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo, type[BaseModel]]]:
    """Every key by its dotted name, with its field and the section that it stands in, in order."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from option_fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, section


_FIELDS = {key: field for key, field, _ in option_fields()}
_SECTIONS = frozenset({key.rpartition(".")[0] for key in _FIELDS} | {"optim"}) - {""}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a free-form table and an empty table are values."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in FREE_FORM and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def changed(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Where two resolved configs differ: (keys that must not, keys that may), each with (old, new)."""
    before, after = dict(flatten(old)), dict(flatten(new))
    deterministic = bool(before.get("rollout.deterministic"))
    forbidden: dict[str, tuple[Any, Any]] = {}
    allowed: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in after if key not in before)]:
        # A key that one of the two does not have is compared by its default: an option added since.
        default = _default(key)
        pair = (before.get(key, default), after.get(key, default))
        if pair[0] != pair[1]:
            (allowed if may_change(key, deterministic=deterministic) else forbidden)[key] = pair
    return forbidden, allowed


def refuse_changes(run: str, forbidden: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ConfigChanged if there is any, naming the first with both values."""
    if not forbidden:
        return
    key, (old, new) = next(iter(forbidden.items()))
    more = f" (and {', '.join(list(forbidden)[1:])})" if len(forbidden) > 1 else ""
    raise ConfigChanged(
        f"{key} = {show(new)}{more}, but run {run!r} was started with {show(old)}: what fixes a run's "
        "accounting or numbers cannot change; set it back, or start another run with --new",
        run=run,
        keys=list(forbidden),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigRefused(f"config {path}: no such file; name a TOML file") from None
    except IsADirectoryError:
        raise ConfigRefused(f"config {path}: is a folder; name a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigRefused(
            f"config {path}: cannot be read as UTF-8 text ({error}); name a TOML file"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigRefused(f"config {path}: not TOML: {error}; correct that line") from None


def _overrides(sets: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise ConfigRefused(f"--set {text}: must be key=value, as in --set optim.lr=1e-5")
        if key in _SECTIONS:  # it would silently set all of its other keys back to their defaults
            one = next(name for name in _FIELDS if name.startswith(f"{key}."))
            raise ConfigRefused(
                f"--set {text}: {key} is a table; set its keys one by one, as in --set {one}=..."
            )
        values[key] = _value(key, value.strip())
    for mine, other in EXCLUSIVE:
        if values.get(mine) is not None and values.get(other) is not None:
            raise ConfigRefused(f"--set {mine} and --set {other}: only one of the two can hold; take one out")
    return values


def _value(key: str, text: str) -> Any:
    if text.lower() in ("none", "null") and key in _FIELDS and type(None) in _kinds(_FIELDS[key].annotation):
        return None
    try:
        tree = tomllib.loads(f"value = {text}")
    except ValueError:  # no TOML, or a number of too many digits
        return text
    # More than the one key means that the text holds a line of its own: it is no value.
    return tree["value"] if list(tree) == ["value"] else text


def _kinds(annotation: Any) -> set[Any]:
    return {annotation, *(kind for part in get_args(annotation) for kind in _kinds(part))}


def _override(tree: dict[str, Any], key: str, value: Any) -> None:
    for pair in EXCLUSIVE:
        if key in pair and value is not None:
            for other in pair:
                if other != key:
                    _remove(tree, other)
    *path, name = key.split(".")
    for step in path:
        inner = tree.setdefault(step, {})
        if not isinstance(inner, dict):
            raise ConfigRefused(
                f"--set {key}: {step} = {show(inner)} is not a table; correct the config file"
            )
        tree = inner
    tree[name] = value


def _remove(tree: dict[str, Any], key: str) -> None:
    *path, name = key.split(".")
    for step in path:
        inner = tree.get(step)
        if not isinstance(inner, dict):
            return
        tree = inner
    tree.pop(name, None)


def _refuse_unknown(key: str, tree: Mapping[str, Any]) -> None:
    if key in _FIELDS:
        return
    value = _at(tree, key)
    if key in _SECTIONS:
        if isinstance(value, Mapping):
            return  # an empty table
        raise ConfigRefused(f"{key} = {show(value)}: {key} is a table; write [{key}] and its keys below it")
    if any(key.startswith(f"{free}.") for free in FREE_FORM):
        return
    leaf = key.rpartition(".")[2]
    if leaf in _FULL_DISTRIBUTION_ONLY:
        raise ConfigRefused(
            f"{key} = {show(value)}: training samples from the full distribution scaled by "
            "rollout.temperature, because under any other the engine's log-probabilities are not the "
            "learner's; take it out"
        )
    raise ConfigRefused(unknown(key, _FIELDS))


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _absolute_paths(tree: dict[str, Any], folder: Path | None, in_file: set[str]) -> dict[str, WrittenPath]:
    """Make paths absolute; what was written, by key."""
    written: dict[str, WrittenPath] = {}
    for key in PATHS:
        *path, name = key.split(".")
        value = _at(tree, key)
        if not isinstance(value, str) or not value or not is_path(key, value):
            continue
        given = Path(value).expanduser()
        tried = {str(Path.cwd() / given): "the current folder"}
        if folder is not None and key in in_file:
            tried = {str(folder / given): "the config's folder", **tried}
        if given.is_absolute():
            tried = {str(given): ""}
        found = next((one for one in tried if Path(one).exists()), list(tried)[-1])
        written[key] = WrittenPath(value, tuple(tried.items()))
        _at(tree, ".".join(path))[name] = found
    return written


def missing_path(config: Config, key: str) -> str | None:
    """What to say of a path that is not there: as written, and every place it was looked for. None: it is."""
    path = _at(config.resolved(), key)
    if not isinstance(path, str) or not is_path(key, path) or Path(path).exists():
        return None
    written = config.written(key) or WrittenPath(path, ((path, ""),))
    tried = " nor ".join(f"{one} ({base})" if base else one for one, base in written.tried)
    neither = "neither " if len(written.tried) > 1 else "no "
    return f"{key} = {show(written.text)}: there is {neither}{tried}"


def is_path(key: str, value: str) -> bool:
    """Whether a value of one of PATHS is a path, and no generated task's name."""
    return key == "model.path" or not value.partition(":")[1] or Path(value).suffix in (".jsonl", ".parquet")


def _refuse_contradictions(config: Config) -> None:
    data = config.data
    generated = not is_path("data.source", data.source) and not data.source.startswith(OBJECT)
    if generated and task_name(data.source) is None:
        raise ConfigRefused(
            f"data.source = {show(data.source)}: must be '{GENERATED}TASK', or the path of a .jsonl or "
            ".parquet file"
        )
    if not generated:
        for name, value in (("size", data.size), ("options", data.options)):
            if value:
                raise ConfigRefused(
                    f"data.{name} = {show(value)}: is for generated tasks only, and data.source = "
                    f"{data.source} is none; take it out (data.max_prompts bounds how many are drawn)"
                )
        if config.eval.every_updates is not None and config.eval.source is None:
            raise ConfigRefused(
                f"eval.every_updates = {config.eval.every_updates}: held-out rows never come out of the "
                "training rows, and data.source is no generated task; name a file of their own: eval.source"
            )
    elif data.size is None:
        raise ConfigRefused(
            f"data.size is not set: data.source = {data.source} generates its rows, and the budget needs to "
            "know how many; give data.size"
        )


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _default(key: str) -> Any:
    field = _FIELDS.get(key)
    if field is None or field.is_required():
        return None
    return default_of(field)
