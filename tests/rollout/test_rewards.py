"""Rewards: what counts as one, and that whatever a function does ends in a number or one line."""

import asyncio
import functools
import math
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from surefoot.rollout.protocols import Row
from surefoot.rollout.rewards import Score, resolve_reward, score, score_group
from surefoot.rollout.tasks import TaskReward, exact_match_reward
from surefoot.statemachine.errors import ConfigRefused, RewardFailed
from surefoot.trainer.rayhost import deaf

ROW = Row(row_index=7, prompt="1+1=", prompt_ids=[1, 2], fields={"prompt": "1+1=", "answer": "2"})


def call(reward, timeout_seconds=30.0) -> Score:
    return asyncio.run(score(reward, ROW, "2", [5, 6], timeout_seconds))


def failure(reward, timeout_seconds=30.0) -> str:
    with pytest.raises(RewardFailed) as caught:
        call(reward, timeout_seconds)
    assert caught.value.row_index == 7
    assert str(caught.value).startswith("the reward of row 7 ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- which function


def test_the_default_is_the_tasks_own_scorer_else_exact_match():
    default = resolve_reward(None, "reasoning_gym:chain_sum", {"min_terms": 2})
    assert isinstance(default, TaskReward)
    assert (default.name, default.options) == ("chain_sum", {"min_terms": 2})
    assert resolve_reward(None, "data.jsonl") is exact_match_reward
    assert resolve_reward(None, [{"prompt": "x"}]) is exact_match_reward


def test_a_function_is_itself_and_a_path_is_imported():
    assert resolve_reward(call) is call
    assert resolve_reward("math:sqrt", "x.jsonl") is math.sqrt
    assert resolve_reward("collections:OrderedDict.fromkeys") is not None


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("math.sqrt", "'math.sqrt' is not of the form pkg.mod:fn"),
        (":sqrt", "not of the form"),
        ("math:", "not of the form"),
        (
            "no_such_module.here:fn",
            "cannot be imported (ModuleNotFoundError: No module named 'no_such_module')",
        ),
        ("math:cube", "math has no cube"),
        ("math:pi", "is a float: it must be a function"),
        (3, "the reward is a int"),
    ],
)
def test_what_cannot_be_a_reward_is_refused_in_one_line(spec, said):
    with pytest.raises(ConfigRefused) as caught:
        resolve_reward(spec)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", ["raise RuntimeError('first\\nsecond')", "raise SystemExit(3)", "def f(:\n"])
def test_a_module_that_fails_to_import_is_refused_in_one_line(tmp_path, monkeypatch, body):
    (tmp_path / "failing_reward.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigRefused, match="failing_reward cannot be imported") as caught:
        resolve_reward("failing_reward:fn")
    assert "\n" not in str(caught.value)
    sys.modules.pop("failing_reward", None)


# --- calling it


def sync_reward(row, text, ids):
    return float(row["answer"] == text and ids == [5, 6])


async def async_reward(row, text, ids):
    await asyncio.sleep(0)
    return sync_reward(row, text, ids)


class CallableReward:
    def __call__(self, row, text, ids):
        return sync_reward(row, text, ids)


class AsyncCallableReward:
    async def __call__(self, row, text, ids):
        return await async_reward(row, text, ids)


@pytest.mark.parametrize(
    "reward",
    [
        sync_reward,
        async_reward,
        CallableReward(),
        AsyncCallableReward(),
        functools.partial(async_reward),
        lambda row, text, ids: async_reward(row, text, ids),
        exact_match_reward,
    ],
)
def test_any_kind_of_function_is_called_with_row_text_and_ids(reward):
    assert call(reward) == Score(1.0, {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.5, -0.5),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
    ],
)
def test_what_is_a_number_is_a_reward(value, expected):
    got = call(lambda row, text, ids: value)
    assert got == Score(expected, {})
    assert type(got.reward) is float


def test_a_dict_of_parts_is_their_sum():
    parts = {"right": True, "short": np.float64(0.25), "polite": 0.1, "calm": 0.2}
    got = call(lambda row, text, ids: parts)
    assert got.reward == math.fsum([1.0, 0.25, 0.1, 0.2])
    assert got.parts == {"right": 1.0, "short": 0.25, "polite": 0.1, "calm": 0.2}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "is None, not a number"),
        ("1", "is '1', not a number"),
        (b"1", "is b'1', not a number"),
        (1j, "is 1j, not a number"),
        ([1.0], "is [1.0], not a number"),
        (np.array([1.0, 2.0]), "not a number"),
        (10**400, "not a number (OverflowError"),
        (float("nan"), "is nan, and must be finite"),
        (float("-inf"), "is -inf, and must be finite"),
        ({}, "is an empty dict"),
        ({"a": 1.0, "b": float("inf")}, "the part 'b' is inf, and must be finite"),
        ({"a": "x"}, "the part 'a' is 'x', not a number"),
        ({"a": 1e308, "b": 1e308}, "the sum of its parts"),
    ],
)
def test_what_is_no_finite_number_fails(value, said):
    assert said in failure(lambda row, text, ids: value)


def raising(row, text, ids):
    raise ValueError("no such answer:\n  '2'")


async def async_raising(row, text, ids):
    raising(row, text, ids)


@pytest.mark.parametrize(
    "reward", [raising, async_raising, lambda row, text, ids: async_raising(row, text, ids)]
)
def test_a_reward_that_raises_fails_with_what_it_said_and_where(reward):
    said = failure(reward)
    assert "raised ValueError: no such answer: '2'" in said
    line = raising.__code__.co_firstlineno + 1
    assert f"test_rewards.py:{line})" in said


@pytest.mark.parametrize("error", [SystemExit(3), TimeoutError("mine"), StopIteration()])
def test_no_exception_escapes_as_another(error):
    def sync(row, text, ids):
        raise error

    async def asynchronous(row, text, ids):
        raise error

    assert f"raised {type(error).__name__}" in failure(sync)
    if not isinstance(error, StopIteration):  # Python itself makes a RuntimeError of that one
        assert f"raised {type(error).__name__}" in failure(asynchronous)


def test_a_reward_that_hangs_fails_in_its_time_and_keeps_no_one_waiting():
    release = threading.Event()
    began = time.monotonic()
    said = failure(lambda row, text, ids: release.wait(60), timeout_seconds=0.05)
    assert "took longer than reward.timeout_seconds = 0.05" in said
    assert time.monotonic() - began < 30  # neither the call nor the loop's end waited for the thread
    hanging = [thread for thread in threading.enumerate() if thread.name == "reward of row 7"]
    assert all(thread.daemon for thread in hanging)
    release.set()
    for thread in hanging:
        thread.join(30)


def test_an_async_reward_that_hangs_is_cancelled():
    cancelled = []

    async def hanging(row, text, ids):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(text)
            raise

    assert "took longer" in failure(hanging, timeout_seconds=0.05)
    assert cancelled == ["2"]
    assert "took longer" in failure(lambda *args: hanging(*args), timeout_seconds=0.5)


def group(reward, texts, timeout_seconds=30.0):
    return asyncio.run(score_group(reward, ROW, [(text, [1]) for text in texts], timeout_seconds))


@pytest.mark.parametrize("reward", [exact_match_reward, AsyncCallableReward()])
def test_a_groups_scores_come_in_order(reward):
    if reward is exact_match_reward:
        assert [one.reward for one in group(reward, ["2", "3", "2.0"])] == [1.0, 0.0, 1.0]
    else:
        assert [one.reward for one in group(reward, ["2", "3"])] == [0.0, 0.0]  # ids are [1]


class Clock:
    """A clock that calls move; `seen` waits until whoever bounds the calls has read it twice more."""

    def __init__(self) -> None:
        self.now, self.reads, self.changed = 0.0, 0, threading.Condition()

    def __call__(self) -> float:
        with self.changed:
            self.reads += 1
            self.changed.notify_all()
            return self.now

    def seen(self) -> None:
        with self.changed:
            wanted = self.reads + 2
            assert self.changed.wait_for(lambda: self.reads >= wanted, timeout=60)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("surefoot.rollout.rewards.monotonic", clock)
    return clock


def test_a_groups_time_is_that_of_each_call_and_not_of_all(clock):
    def takes_most_of_its_time(row, text, ids):
        clock.now += 0.006
        clock.seen()
        return 1.0

    assert len(group(takes_most_of_its_time, "abc", timeout_seconds=0.01)) == 3


def test_after_a_call_that_hangs_its_thread_makes_no_further_call(clock):
    release, called = threading.Event(), []

    def hangs_on_b(row, text, ids):
        called.append(text)
        if text == "b":
            clock.now += 1
            release.wait(60)
        return 1.0

    with pytest.raises(RewardFailed, match="took longer"):
        group(hangs_on_b, "abc", timeout_seconds=0.01)
    threads = [thread for thread in threading.enumerate() if thread.name == "reward of row 7"]
    release.set()
    for thread in threads:
        thread.join(30)
    assert called == ["a", "b"]


def test_async_calls_of_a_group_run_at_once():
    together = asyncio.Barrier(3)

    async def meets(row, text, ids):
        await together.wait()  # would wait for ever if one came after another
        return 1.0

    assert len(group(meets, "abc")) == 3


def test_one_failing_async_call_cancels_the_others():
    ended = []

    async def fails_on_b(row, text, ids):
        if text == "b":
            raise ValueError("b")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(text)

    with pytest.raises(RewardFailed, match="raised ValueError: b"):
        group(fails_on_b, "abc", timeout_seconds=1000)
    assert sorted(ended) == ["a", "c"]


def test_a_function_may_change_what_it_is_given_without_harm():
    def greedy(row, text, ids):
        row.clear()
        ids.clear()
        return 1.0

    assert len(group(greedy, "ab")) == 2
    assert ROW.fields == {"prompt": "1+1=", "answer": "2"}


def start_and_terminate(row, text, ids) -> float:
    """A reward that runs a program and ends it."""
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    return float(child.wait(timeout=20))


async def start_terminate_and_await(row, text, ids) -> float:
    return start_and_terminate(row, text, ids)


@pytest.mark.parametrize("reward", [start_and_terminate, start_terminate_and_await])
def test_what_a_reward_starts_hears_sigterm_though_the_worker_was_started_deaf(reward) -> None:
    with deaf():
        assert call(reward).reward == -signal.SIGTERM
