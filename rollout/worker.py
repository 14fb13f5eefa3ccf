"""A rollout worker: one engine, one reward function; requests in, whole groups out.

Owns its engine loop and the version of its weights. Invariants: it is built from the budget as the log holds
it and from nothing that could stand for one; weights are loaded only if their digest, taken over the bytes
that arrived, is the published one; a group is returned as one value, which outlives the worker.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..statemachine.errors import ConfigRefused, RunFailedError
from ..statemachine.events import BudgetResolved, decode
from .engine import Engine, FinishedSample, GroupTask
from .engineloop import Aborted, EngineLoop, WorkerBroken
from .packing import pack_f32, pack_i32
from .protocols import Group, GroupRequest, RewardFunction, Sample

if TYPE_CHECKING:
    import torch

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""Types of weights: as safetensors calls them, and as torch does."""

ABORTED = b""
"""What `generate` returns for a group that was aborted."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker is built from, as it crosses the process border."""

    budget: bytes  # payload of the run's BudgetResolved event, as read from the log
    model_path: str
    slots: int  # samples decoded at a time
    max_tokens: int  # longest prompt and response together
    deterministic: bool = False
    threads: int = 1
    gpus: float = 0.0  # above 0: the engine runs on the GPU that the worker is given
    dtype: str = "float32"  # of the engine's weights and cache
    reward: str | None = None  # `pkg.mod:fn`; unset: the default for `source`
    reward_pickled: bytes | None = None  # a function that was passed as an object; takes precedence
    reward_timeout_seconds: float = 30.0
    source: str | None = None  # data.source, where it is a string
    source_options: dict[str, Any] = {}
    sys_path: list[str] = []  # the driver's, so that users' modules are found


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker runs."""

    pid: int
    node: str = ""  # the cluster's name for the machine; empty where it has none


class RolloutWorker:
    """Its methods run on one event loop; the engine has a thread of its own."""

    node = ""

    def __init__(self, settings: bytes) -> None:
        self._settings = msgspec.msgpack.decode(settings, type=WorkerSettings)
        sys.path[:0] = [place for place in self._settings.sys_path if place not in sys.path]
        budget = decode("BudgetResolved", BudgetResolved.schema, self._settings.budget)
        assert isinstance(budget, BudgetResolved)
        self._budget = budget
        self._device = "cuda" if self._settings.gpus > 0 else "cpu"
        self._loop = EngineLoop(self._make_engine)

    async def ready(self) -> bytes:
        """Wait until the engine is built; WorkerFacts. Raises what was wrong with model, budget or reward."""
        from .rewards import resolve_reward
        from .tokens import load_tokenizer

        settings = self._settings
        if self._budget.optimizer_steps_total < 1:
            raise RunFailedError(f"a budget of {self._budget.optimizer_steps_total} optimizer steps is none")
        self._reward: RewardFunction = resolve_reward(
            _unpickled(settings.reward_pickled) if settings.reward_pickled else settings.reward,
            settings.source,
            settings.source_options,
        )
        self._tokenizer = load_tokenizer(settings.model_path)
        await asyncio.wrap_future(self._loop.built)
        return msgspec.msgpack.encode(WorkerFacts(pid=os.getpid(), node=self.node))

    async def load(self, version: int, digest: str, payload: Any) -> int:
        """Load published weights once their digest is checked; the version. Raises WorkerBroken."""
        tensors = await asyncio.to_thread(_verified, version, digest, payload)
        await asyncio.wrap_future(self._loop.load(version, tensors))
        return version

    async def generate(self, request: bytes) -> bytes:
        """One attempt of one group: a packed Group, or ABORTED.

        Raises RewardFailed and RunFailedError for the group, WorkerBroken for the worker.
        """
        wanted = msgspec.msgpack.decode(request, type=GroupRequest)
        if not 0 <= wanted.prompt_index < self._budget.prompts_total:
            raise RunFailedError(
                f"prompt {wanted.prompt_index} is none of the budget's {self._budget.prompts_total}",
                prompt_index=wanted.prompt_index,
            )
        try:
            return msgspec.msgpack.encode(await self._answer("train", wanted))
        except Aborted:
            return ABORTED

    async def evaluate(self, requests: bytes) -> bytes:
        """Held-out rows: packed list of groups, in order. Raises as `generate`."""
        wanted = msgspec.msgpack.decode(requests, type=list[GroupRequest])
        answering = [asyncio.ensure_future(self._answer("evaluate", request)) for request in wanted]
        try:
            return msgspec.msgpack.encode(await asyncio.gather(*answering))
        finally:  # if one failed, the others are given up with it, and may be asked for again at once
            for request in wanted:
                self._loop.abort(("evaluate", request.prompt_index, request.attempt))
            await asyncio.gather(*answering, return_exceptions=True)

    async def abort(self, prompt_index: int, attempt: int) -> None:
        """End the work on an attempt that no longer counts."""
        self._loop.abort(("train", prompt_index, attempt))

    async def live(self) -> None:
        """Never returns: whoever waits for it hears of this worker's death."""
        await asyncio.Event().wait()

    async def _answer(self, kind: str, request: GroupRequest) -> Group:
        task = GroupTask(
            key=(kind, request.prompt_index, request.attempt),
            prompt_ids=request.row.prompt_ids,
            seeds=request.seeds,
            temperature=request.temperature,
            max_new_tokens=request.max_new_tokens,
        )
        samples = await asyncio.wrap_future(self._loop.add(task, request.admission_version))
        return Group(
            prompt_index=request.prompt_index,
            attempt=request.attempt,
            row_index=request.row.row_index,
            prompt_ids=pack_i32(request.row.prompt_ids),
            temperature=request.temperature,
            samples=await self._scored(request, samples),
        )

    async def _scored(self, request: GroupRequest, samples: Sequence[FinishedSample]) -> list[Sample]:
        from .rewards import score_group

        ids = [sample.ids.tolist() for sample in samples]
        texts = [self._tokenizer.decode(sample) for sample in ids]
        scores = await score_group(
            self._reward,
            request.row,
            list(zip(texts, ids, strict=True)),
            self._settings.reward_timeout_seconds,
        )
        return [
            Sample(
                ids=pack_i32(own),
                logprobs=pack_f32(sample.logprobs.tolist()),
                versions=pack_i32(sample.versions.tolist()),
                truncated=sample.truncated,
                text=text,
                reward=score.reward,
                parts=score.parts,
            )
            for sample, own, text, score in zip(samples, ids, texts, scores, strict=True)
        ]

    def _make_engine(self) -> Engine:
        """On the engine's thread, whose number of threads it sets."""
        from .architecture import Architecture, read_config

        settings = self._settings
        # First, as it may be refused: torch takes seconds to load.
        architecture = Architecture.of(read_config(settings.model_path), settings.model_path)

        import torch

        from .tokens import load_tokenizer
        from .torch_engine import TorchEngine

        torch.set_num_threads(settings.threads)
        return TorchEngine(
            architecture,
            slots=settings.slots,
            max_tokens=settings.max_tokens,
            stop_ids=load_tokenizer(settings.model_path).stop_ids,
            device=self._device,
            dtype=getattr(torch, settings.dtype),
            deterministic=settings.deterministic,
        )


def ignore_sigterm() -> None:
    """A supervisor's SIGTERM goes to every process; when workers end is the driver's decision.

    By the C library, because Python sets handlers on its main thread only and Ray may build an actor on
    another. Not SIG_IGN: processes that a reward starts would inherit it, and `terminate` not end them; a
    handler is not inherited, and `abs` is one that does nothing. SIGKILL, with which Ray ends actors, stays.
    """
    library = ctypes.CDLL(None)
    library.signal(int(signal.SIGTERM), ctypes.cast(library.abs, ctypes.c_void_p))


def _unpickled(reward: bytes) -> Any:
    try:
        return pickle.loads(reward)
    except Exception as error:  # it imports the user's modules
        raise ConfigRefused(
            "the reward function that was passed cannot be made again in a worker "
            f"({type(error).__name__}: {error}): its module must be importable where the program runs"
        ) from error


def _verified(version: int, digest: str, payload: Any) -> dict[str, torch.Tensor]:
    """The tensors in the bytes that arrived, as views of them. Raises WorkerBroken."""
    import torch

    from .payload import digest_of, read_tensors

    try:
        found = read_tensors(memoryview(payload))
    except ValueError as error:
        raise WorkerBroken(f"the weights of policy version {version} arrived as {error}") from error
    arrived = digest_of(found)
    if arrived != digest:
        raise WorkerBroken(
            f"the weights of policy version {version} arrived with digest {arrived}, published was {digest}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory cannot be written: nobody will
        return {
            name: torch.frombuffer(tensor.data, dtype=getattr(torch, DTYPES[tensor.dtype])).view(tensor.shape)
            for name, tensor in found.items()
        }
