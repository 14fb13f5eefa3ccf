"""One engine on one thread of its own: groups and weights come in between two decode steps, samples go out.

Owns the engine, which nothing else touches, and the groups that wait for weights. Invariants: a group starts
only with its admission version, or a later one, loaded; each group that was added is delivered exactly once,
aborted, or failed with what went wrong.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..statemachine.errors import RunFailedError, SurefootError
from .engine import Engine, FinishedSample, GroupTask

if TYPE_CHECKING:
    import torch


class Aborted(SurefootError):
    """The group's work was ended because a newer attempt has begun."""

    code = "aborted"


class WorkerBroken(SurefootError):
    """The worker cannot go on, and another has to take its place."""

    code = "worker_broken"


@dataclass(slots=True)
class _Group:
    task: GroupTask
    admission_version: int
    done: Future[list[FinishedSample]]
    samples: dict[int, FinishedSample] = field(default_factory=dict)


class EngineLoop:
    """Runs `make_engine()` on a thread; every method may be called from any other thread."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._groups: dict[Hashable, _Group] = {}
        self._waiting: list[Hashable] = []  # for weights; in the order in which they came
        self._engine: Engine
        self._broken: BaseException | None = None
        self.built: Future[None] = _future()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def add(self, task: GroupTask, admission_version: int) -> Future[list[FinishedSample]]:
        """Generate a group, known by its task's key: its samples in the order of their seeds.

        The future raises Aborted, WorkerBroken, RunFailedError (logits that are not finite) or ValueError.
        """
        done: Future[list[FinishedSample]] = _future()
        self._jobs.put(lambda: self._add(_Group(task, admission_version, done)))
        return done

    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Future[None]:
        """Swap weights between two steps."""
        done: Future[None] = _future()
        self._jobs.put(lambda: self._load(version, tensors, done))
        return done

    def abort(self, key: Hashable) -> None:
        """Forget a group; one that is unknown or done is no error."""
        self._jobs.put(lambda: self._abort(key))

    def _run(self) -> None:
        try:
            self._engine = self._make_engine()
        except BaseException as error:
            self.built.set_exception(error)
            self._broken = error
        else:
            self.built.set_result(None)
        while True:
            try:
                self._take_jobs(wait=self._broken is not None or not self._engine.active_samples())
                if self._broken is None:
                    self._step()
            except BaseException as error:
                self._break(error)

    def _take_jobs(self, *, wait: bool) -> None:
        while True:
            try:
                job = self._jobs.get(block=wait)
            except queue.Empty:
                return
            job()
            wait = False

    def _step(self) -> None:
        try:
            finished = self._engine.step() if self._engine.active_samples() else []
        except RunFailedError as error:
            # The engine has forgotten all that was under way, and can go on with what is added now.
            self._fail([key for key in self._groups if key not in self._waiting], error)
            return
        for sample in finished:
            self._collect(sample)

    def _collect(self, sample: FinishedSample) -> None:
        group = self._groups[sample.key]
        group.samples[sample.sample_index] = sample
        if len(group.samples) == len(group.task.seeds):
            del self._groups[sample.key]
            group.done.set_result([group.samples[index] for index in range(len(group.samples))])

    def _add(self, group: _Group) -> None:
        key = group.task.key
        if self._broken is not None:
            group.done.set_exception(_broken(self._broken))
        elif key in self._groups:
            group.done.set_exception(ValueError(f"group {key} is under way already"))
        else:
            self._groups[key] = group
            self._waiting.append(key)
            self._start_waiting()

    def _start_waiting(self) -> None:
        version, waiting = self._engine.version, self._waiting
        self._waiting = [key for key in waiting if self._groups[key].admission_version > version]
        for key in waiting:
            if self._groups[key].admission_version <= version:
                try:
                    self._engine.add(self._groups[key].task)
                except ValueError as error:
                    self._fail([key], error)

    def _load(self, version: int, tensors: Mapping[str, torch.Tensor], done: Future[None]) -> None:
        if self._broken is not None:
            done.set_exception(_broken(self._broken))
            return
        try:
            self._engine.load_weights(version, tensors)
        except BaseException as error:
            done.set_exception(error)
            return
        self._start_waiting()
        done.set_result(None)

    def _abort(self, key: Hashable) -> None:
        if key not in self._groups:
            return
        if key in self._waiting:
            self._waiting.remove(key)
        else:
            self._engine.abort([key])
        self._fail([key], Aborted(f"group {key} was aborted"))

    def _break(self, error: BaseException) -> None:
        """What the engine holds is in doubt: nothing more is done with it."""
        self._broken = error
        self._waiting.clear()
        self._fail(list(self._groups), _broken(error))

    def _fail(self, keys: list[Hashable], error: Exception) -> None:
        for key in keys:
            self._groups.pop(key).done.set_exception(error)


def _broken(error: BaseException) -> WorkerBroken:
    return WorkerBroken(f"the engine failed: {type(error).__name__}: {' '.join(str(error).split())}"[:500])


def _future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on nobody can cancel it under the thread's hands
    return future
