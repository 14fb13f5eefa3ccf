"""Rewards: which function scores a run's responses, and calling it with a bound on its time.

Owns no state. A user's function may be slow, raise, hang or answer nonsense: each of these becomes one
RewardFailed that names the row, and a function that hangs keeps nothing but its own thread.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, cast

from ..statemachine.errors import ConfigRefused, RewardFailed
from .files import digest_of
from .protocols import RewardFunction, Row
from .tasks import TaskReward, exact_match_reward, task_name


class Score(NamedTuple):
    """A finite reward, and its named parts if it has any."""

    reward: float
    parts: dict[str, float]


def resolve_reward(
    spec: str | Callable[..., Any] | None, source: Any = None, options: dict[str, Any] | None = None
) -> RewardFunction:
    """The reward function: the callable itself, `pkg.mod:fn` imported, or the default of the data source
    (a generated task's own scorer, else exact match). Raises ConfigRefused."""
    if spec is None:
        name = task_name(source)
        return exact_match_reward if name is None else TaskReward(name, options or {})
    if not isinstance(spec, str):
        if not callable(spec):
            raise ConfigRefused(f"the reward is a {type(spec).__name__}: it must be a function")
        return cast(RewardFunction, spec)
    said = f"reward.function = {spec!r}"
    module_name, colon, path = spec.partition(":")
    if not (colon and module_name and path):
        raise ConfigRefused(f"{said} is not of the form pkg.mod:fn", key="reward.function")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ConfigRefused(
            f"{said}: {module_name} cannot be imported ({_described(error)}): it must be installed or lie in "
            "the folder that the command runs in",
            key="reward.function",
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigRefused(
                f"{said}: {module_name} has no {path}; name a function that it has", key="reward.function"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigRefused(
            f"{said} is a {type(found).__name__}: it must be a function", key="reward.function"
        )
    return cast(RewardFunction, found)


def code_digest(reward: Callable[..., Any]) -> str | None:
    """xxh3-128 of the file that a function of the user's stands in; None where there is none to read."""
    written: Any = inspect.unwrap(reward)
    if not (inspect.isroutine(written) or inspect.isclass(written)):
        written = type(written)
    try:
        file = inspect.getsourcefile(written)
        return None if file is None else digest_of(Path(file).read_bytes())
    except (TypeError, OSError):
        return None


async def score(
    reward: RewardFunction, row: Row, text: str, ids: Sequence[int], timeout_seconds: float
) -> Score:
    """The score of one response. Raises RewardFailed."""
    return (await score_group(reward, row, [(text, ids)], timeout_seconds))[0]


async def score_group(
    reward: RewardFunction, row: Row, responses: Sequence[tuple[str, Sequence[int]]], timeout_seconds: float
) -> list[Score]:
    """The scores of a row's responses (text, ids), in order; each call has `timeout_seconds` of its own.

    A coroutine function is awaited here, all responses at once; any other is called on a thread of its own,
    one response after another, and must bear several threads at once. Raises RewardFailed for the first call
    that fails.
    """
    arguments = [(dict(row.fields), text, list(ids)) for text, ids in responses]
    _let_children_hear_sigterm()  # of an async reward; a thread is made with the mask of this one
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None)):  # noqa: B004
        values = await _await_all(row, [(reward, one) for one in arguments], timeout_seconds)
    else:
        values = await _Calls(reward, row, arguments).finish(timeout_seconds)
        if any(inspect.isawaitable(value) for value in values):
            values = await _await_all(row, [(_itself, (value,)) for value in values], timeout_seconds)
    return [_checked(row, value) for value in values]


async def _itself(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _await_all(
    row: Row, calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], timeout_seconds: float
) -> list[Any]:
    async def one(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        bound = asyncio.timeout(timeout_seconds)
        try:
            async with bound:
                return await function(*arguments)
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and bound.expired():
                raise _took_too_long(row, timeout_seconds) from error
            raise _raised(row, error) from error

    tasks = [asyncio.ensure_future(one(*call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Calls:
    """A group's calls on one daemon thread. The thread of a call that hangs is left behind: it makes no
    further call, nobody waits for it, and it does not keep the process from ending."""

    def __init__(self, reward: Callable[..., Any], row: Row, arguments: Sequence[tuple[Any, ...]]) -> None:
        self._reward = reward
        self._row = row
        self._arguments = arguments
        self._values: list[Any] = []
        self._call_began = monotonic()
        self._left_behind = False

    async def finish(self, timeout_seconds: float) -> list[Any]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[BaseException | None] = loop.create_future()

        def tell(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(error)

        def run() -> None:
            error: BaseException | None = None
            try:
                for arguments in self._arguments:
                    if self._left_behind:
                        return
                    self._call_began = monotonic()
                    self._values.append(self._reward(*arguments))
            except BaseException as raised:  # a SystemExit in a reward ends the reward, not the worker
                error = raised
            if not self._left_behind:
                with suppress(RuntimeError):  # the loop was closed in the meantime: nobody waits
                    loop.call_soon_threadsafe(tell, error)

        threading.Thread(target=run, name=f"reward of row {self._row.row_index}", daemon=True).start()
        try:
            while not done.done():
                left = self._call_began + timeout_seconds - monotonic()
                if left <= 0:
                    raise _took_too_long(self._row, timeout_seconds)
                await asyncio.wait([done], timeout=left)
        finally:
            self._left_behind = True
        error = done.result()
        if error is not None:
            raise _raised(self._row, error) from error
        return self._values


def _let_children_hear_sigterm() -> None:
    """Workers are started deaf to SIGTERM; what a reward starts is not to be: `terminate` must end it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _checked(row: Row, value: Any) -> Score:
    """A finite number, or a dict of them whose sum is the reward. Raises RewardFailed."""
    if isinstance(value, dict):
        parts = {str(name): _finite(row, part, f"the part {name!r}") for name, part in value.items()}
        if not parts:
            raise _failed(row, "is an empty dict: it must be a number or a dict of named numbers")
        return Score(_finite(row, sum(parts.values()), "the sum of its parts"), parts)
    return Score(_finite(row, value, ""), {})


def _finite(row: Row, value: Any, what: str) -> float:
    what = f"{what} " if what else ""
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):  # str has neither
        raise _failed(row, f"{what}is {_short(value)}, not a number")
    try:
        number = float(value)
    except Exception as error:  # an array of several values, an integer past all floats
        raise _failed(row, f"{what}is {_short(value)}, not a number ({_described(error)})") from error
    if not math.isfinite(number):
        raise _failed(row, f"{what}is {number}, and must be finite")
    return number


def _took_too_long(row: Row, timeout_seconds: float) -> RewardFailed:
    return _failed(row, f"took longer than reward.timeout_seconds = {timeout_seconds:g}")


def _raised(row: Row, error: BaseException) -> RewardFailed:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return _failed(row, f"raised {_described(error)}{where}")


def _failed(row: Row, what: str) -> RewardFailed:
    return RewardFailed(f"the reward of row {row.row_index} {what}", row_index=row.row_index)


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    name = type(error).__name__
    return _cut(f"{name}: {text}" if text else name, 300)


def _short(value: Any) -> str:
    return _cut(" ".join(repr(value).split()), 60)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
