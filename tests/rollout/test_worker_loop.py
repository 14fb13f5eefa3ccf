"""The engine's thread: what starts when, what is delivered, and what fails with what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import numpy as np
import pytest

from surefoot.rollout.engine import FinishedSample, GroupTask
from surefoot.rollout.engineloop import Aborted, EngineLoop, WorkerBroken
from surefoot.statemachine.errors import ModelRefused, RunFailedError

SECONDS = 20.0  # bound on every wait: none is expected to be reached


class StepwiseEngine:
    """Gives each sample the version of every step; steps only when the test lets it, or freely."""

    def __init__(self, *, tokens: int = 3) -> None:
        self.version = -1
        self.added: list[Hashable] = []
        self.step_gate = threading.Event()
        self.step_gate.set()
        self.stepped = threading.Semaphore(0)
        self.before_step: Callable[[], None] = lambda: None
        self._tokens = tokens
        self._running: dict[tuple[Hashable, int], list[int]] = {}

    def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        if tensors:
            raise ModelRefused("these weights do not fit")
        self.version = version

    def add(self, task: GroupTask) -> None:
        if not task.prompt_ids:
            raise ValueError("an empty prompt")
        self.added.append(task.key)
        for index in reversed(range(len(task.seeds))):
            self._running[task.key, index] = []

    def step(self) -> list[FinishedSample]:
        assert self.step_gate.wait(SECONDS)
        self.before_step()
        finished: list[FinishedSample] = []
        for (key, index), versions in list(self._running.items()):
            versions.append(self.version)
            if len(versions) == self._tokens:
                del self._running[key, index]
                finished.append(
                    FinishedSample(
                        key=key,
                        sample_index=index,
                        ids=np.full(self._tokens, index, dtype=np.int32),
                        logprobs=np.zeros(self._tokens, dtype=np.float32),
                        versions=np.array(versions, dtype=np.int32),
                        truncated=False,
                    )
                )
        self.stepped.release()
        return finished

    def abort(self, keys: Collection[Hashable]) -> None:
        self._running = {place: own for place, own in self._running.items() if place[0] not in keys}

    def forget_all(self) -> None:
        self._running.clear()

    def active_samples(self) -> int:
        return len(self._running)

    def free_samples(self) -> int:
        return 8


def looping(engine: StepwiseEngine, version: int | None = 0) -> EngineLoop:
    loop = EngineLoop(lambda: engine)
    loop.built.result(SECONDS)
    if version is not None:
        loop.load(version, {}).result(SECONDS)
    return loop


def key(index: int) -> tuple[str, int, int]:
    return ("train", index, 1)


def task(index: int, samples: int = 2, prompt: tuple[int, ...] = (1,)) -> GroupTask:
    return GroupTask(
        key=key(index), prompt_ids=prompt, seeds=range(samples), temperature=1.0, max_new_tokens=9
    )


def test_a_group_comes_whole_and_in_the_order_of_its_seeds() -> None:
    loop = looping(StepwiseEngine())
    samples = loop.add(task(0, samples=4), 0).result(SECONDS)
    assert [sample.sample_index for sample in samples] == [0, 1, 2, 3]


def test_a_group_starts_only_with_its_admission_version_or_a_later_one() -> None:
    engine = StepwiseEngine()
    loop = looping(engine, version=0)
    early = loop.add(task(1), 2)
    loop.add(task(0), 0).result(SECONDS)
    loop.load(1, {}).result(SECONDS)
    assert engine.added == [key(0)]
    assert not early.done()
    loop.load(3, {}).result(SECONDS)
    assert {int(version) for sample in early.result(SECONDS) for version in sample.versions} == {3}


def test_nothing_starts_before_the_first_weights() -> None:
    engine = StepwiseEngine()
    loop = looping(engine, version=None)
    waiting = loop.add(task(0), 0)
    loop.abort(key(9))
    loop.load(0, {}).result(SECONDS)
    waiting.result(SECONDS)


def test_weights_are_swapped_under_what_is_under_way() -> None:
    engine = StepwiseEngine(tokens=4)
    loop = looping(engine, version=0)
    engine.step_gate.clear()
    group = loop.add(task(0, samples=1), 0)
    engine.before_step = engine.step_gate.clear  # one step each time the gate is opened
    engine.step_gate.set()
    assert engine.stepped.acquire(timeout=SECONDS)
    loaded = loop.load(1, {})
    engine.step_gate.set()
    loaded.result(SECONDS)
    engine.before_step = lambda: None
    engine.step_gate.set()
    versions = group.result(SECONDS)[0].versions.tolist()
    assert versions[0] == 0
    assert versions[-1] == 1
    assert versions == sorted(versions)
    assert len(versions) == 4


def test_an_aborted_group_is_forgotten_and_the_others_go_on() -> None:
    engine = StepwiseEngine()
    loop = looping(engine)
    engine.step_gate.clear()
    first, second, unborn = (
        loop.add(task(0), 0),
        loop.add(task(1), 0),
        loop.add(task(2), 7),
    )
    loop.abort(key(0))
    loop.abort(key(2))
    engine.step_gate.set()
    assert len(second.result(SECONDS)) == 2
    for aborted in (first, unborn):
        with pytest.raises(Aborted):
            aborted.result(SECONDS)
    assert len(loop.add(task(0), 0).result(SECONDS)) == 2


def test_a_group_that_cannot_run_fails_alone() -> None:
    loop = looping(StepwiseEngine())
    bad, good = loop.add(task(0, prompt=()), 0), loop.add(task(1), 0)
    with pytest.raises(ValueError, match="empty prompt"):
        bad.result(SECONDS)
    assert len(good.result(SECONDS)) == 2


def test_logits_that_are_not_finite_fail_the_groups_under_way_and_no_others() -> None:
    engine = StepwiseEngine()
    loop = looping(engine)
    waiting = loop.add(task(1), 1)

    def diverge() -> None:
        engine.before_step = lambda: None
        engine.forget_all()
        raise RunFailedError("logits are not finite")

    engine.before_step = diverge
    with pytest.raises(RunFailedError, match="not finite"):
        loop.add(task(0), 0).result(SECONDS)
    loop.load(1, {}).result(SECONDS)
    assert len(waiting.result(SECONDS)) == 2


def test_an_engine_that_fails_breaks_the_worker() -> None:
    engine = StepwiseEngine()
    loop = looping(engine)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    waiting = loop.add(task(1), 1)
    engine.before_step = fail
    with pytest.raises(WorkerBroken, match="illegal memory access"):
        loop.add(task(0), 0).result(SECONDS)
    for failing in (waiting, loop.add(task(2), 0), loop.load(1, {})):
        with pytest.raises(WorkerBroken, match="illegal memory access"):
            failing.result(SECONDS)


def test_an_engine_that_cannot_be_built_says_why() -> None:
    def refuse() -> StepwiseEngine:
        raise ModelRefused("no such architecture")

    loop = EngineLoop(refuse)
    with pytest.raises(ModelRefused, match="no such architecture"):
        loop.built.result(SECONDS)
    with pytest.raises(WorkerBroken, match="no such architecture"):
        loop.add(task(0), 0).result(SECONDS)


def test_weights_that_do_not_fit_leave_the_old_ones() -> None:
    engine = StepwiseEngine()
    loop = looping(engine, version=3)
    with pytest.raises(ModelRefused):
        loop.load(4, {"of another model": None}).result(SECONDS)  # type: ignore[dict-item]
    assert engine.version == 3
    assert len(loop.add(task(0), 3).result(SECONDS)) == 2
