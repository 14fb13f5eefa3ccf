"""The default engine: continuous admission over a slot-based key-value cache, on torch alone.

Owns which sample is in which row of the cache. Invariants: rows 0..n-1 are the running ones; a place that
becomes free is taken at the next step; one wait for the device a step, and no loop over rows in Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..statemachine.errors import ModelRefused, RunFailedError
from .architecture import Architecture
from .attention import DecodeRows, Integers, PromptBlock
from .decoder import Decoder
from .engine import FinishedSample, GroupTask
from .sampling import pick, seed_words, uniforms

PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, that one step takes in: bounds a step's memory and its length."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A group with samples that have no row yet."""

    task: GroupTask
    prompt: Integers
    seeds: np.ndarray[Any, np.dtype[np.uint64]]
    started: int = field(default=0)  # samples that have, or had, a row

    @property
    def left(self) -> int:
        return len(self.seeds) - self.started


class TorchEngine:
    """See Engine for what it does; one thread calls it.

    With `deterministic` each group is decoded alone, in as many rows as it has samples, all kept until the
    last of them is done: every shape is a function of the request, so that the same request on the same
    weights gives the same bits whatever else is queued. The number of threads is part of that: it has to
    stay what it was when the engine was built.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        slots: int,
        max_tokens: int,
        stop_ids: Collection[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
    ) -> None:
        """`slots`: samples running at once; `max_tokens`: the longest prompt and response together."""
        if slots < 1 or max_tokens < 2:
            raise ValueError(f"an engine of {slots} slots of {max_tokens} tokens holds no sample")
        if max_tokens > architecture.context:
            raise ModelRefused(
                f"prompt and response take up to {max_tokens} tokens, the model's context holds "
                f"{architecture.context}: lower rollout.max_new_tokens or data.max_prompt_tokens",
                max_tokens=max_tokens,
                context=architecture.context,
            )
        self._slots, self._max_tokens, self._deterministic = slots, max_tokens, deterministic
        self._threads = torch.get_num_threads()
        with torch.inference_mode():
            self._decoder = Decoder(architecture, slots=slots, length=max_tokens, device=device, dtype=dtype)
        self._version = -1
        self._is_stop = np.zeros(architecture.vocabulary, dtype=bool)
        self._is_stop[[stop for stop in stop_ids if 0 <= stop < architecture.vocabulary]] = True
        self._waiting: deque[_Waiting] = deque()
        self._running = 0
        # One entry per row; rows move together, so they are listed once.
        self._groups: list[_Waiting | None] = [None] * slots
        self._sample = np.zeros(slots, dtype=np.int64)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._temperature = np.zeros(slots, dtype=np.float32)
        self._limit = np.zeros(slots, dtype=np.int64)
        self._token = np.zeros(slots, dtype=np.int64)  # taken in at the next step ...
        self._position = np.zeros(slots, dtype=np.int64)  # ... here
        self._made = np.zeros(slots, dtype=np.int64)  # response tokens so far
        self._over = np.zeros(slots, dtype=bool)  # returned or aborted; only deterministic rows linger
        self._ids = np.zeros((slots, max_tokens), dtype=np.int32)
        self._logprobs = np.zeros((slots, max_tokens), dtype=np.float32)
        self._versions = np.zeros((slots, max_tokens), dtype=np.int32)
        self._columns = (
            self._sample, self._seed, self._temperature, self._limit, self._token, self._position,
            self._made, self._over, self._ids, self._logprobs, self._versions,
        )  # fmt: skip

    @property
    def version(self) -> int:
        """Policy version of the weights that are loaded; -1 before the first."""
        return self._version

    @torch.inference_mode()
    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Swap weights between two steps; see Engine."""
        self._decoder.load(tensors)
        self._version = version

    def add(self, task: GroupTask) -> None:
        """Take a group in; see Engine."""
        prompt = np.array(task.prompt_ids, dtype=np.int64)
        vocabulary = len(self._is_stop)
        if not len(prompt) or not task.seeds or task.max_new_tokens < 1 or not task.temperature >= 0:
            raise ValueError(
                f"group {task.key!r} cannot run: {len(prompt)} prompt tokens, {len(task.seeds)} seeds, "
                f"temperature {task.temperature}, max_new_tokens {task.max_new_tokens}"
            )
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise ValueError(f"group {task.key!r} has a prompt id outside the vocabulary of {vocabulary}")
        if len(prompt) + task.max_new_tokens > self._max_tokens:
            raise ValueError(
                f"group {task.key!r} needs {len(prompt)} + {task.max_new_tokens} tokens, a slot holds "
                f"{self._max_tokens}"
            )
        if self._deterministic and len(task.seeds) > self._slots:
            raise ValueError(
                f"group {task.key!r} has {len(task.seeds)} samples, which have to run together when "
                f"deterministic, and the engine {self._slots} slots"
            )
        self._waiting.append(_Waiting(task, prompt, seed_words(list(task.seeds))))

    def active_samples(self) -> int:
        """Samples added and not yet returned."""
        lingering = int(self._over[: self._running].sum())
        return self._running - lingering + sum(group.left for group in self._waiting)

    def free_samples(self) -> int:
        """How many more samples could start at the next step."""
        return max(0, self._slots - self._running - sum(group.left for group in self._waiting))

    @torch.inference_mode()
    def abort(self, keys: Collection[Hashable]) -> None:
        """Forget these groups; see Engine."""
        unwanted = set(keys)
        self._waiting = deque(group for group in self._waiting if group.task.key not in unwanted)
        for row, group in enumerate(self._groups[: self._running]):
            if group is not None and group.task.key in unwanted:
                self._over[row] = True
        self._close_rows()

    @torch.inference_mode()
    def step(self) -> list[FinishedSample]:
        """One token for every running sample; see Engine."""
        if self._version < 0:
            raise RuntimeError("no weights are loaded")
        if self._deterministic and torch.get_num_threads() != self._threads:
            raise RuntimeError(
                f"torch runs {torch.get_num_threads()} threads, and {self._threads} when this deterministic "
                "engine was built: set them before, and leave them"
            )
        decoded, block = self._admit()
        count = self._running
        if count == 0:
            return []
        rows = DecodeRows(self._token[:decoded], self._position[:decoded]) if decoded else None
        numbers = uniforms(self._seed[:count], self._made[:count])
        logits = self._decoder.forward(rows, block)
        chosen = pick(logits, self._temperature[:count], numbers)
        # One transfer, and the step's only wait for the device; doubles hold both without loss.
        host = torch.stack([part.double() for part in chosen]).cpu().numpy()
        tokens, logprobs = host[0].astype(np.int64), host[1].astype(np.float32)
        if not np.isfinite(logprobs).all():
            self._reset()
            raise RunFailedError(
                f"the model's logits are not finite at policy version {self._version}: training has "
                "diverged, lower optim.lr or optim.max_grad_norm",
                policy_version=self._version,
            )
        return self._record(tokens, logprobs)

    def _admit(self) -> tuple[int, PromptBlock | None]:
        """Give free rows to waiting samples: the rows to decode, and the prompts of those behind them."""
        if self._deterministic and self._running:
            return self._running, None
        self._join_siblings()
        decoded, room = self._running, PREFILL_TOKENS
        prompts: list[Integers] = []
        owners: list[int] = []
        while self._waiting and self._running < self._slots:
            group = self._waiting[0]
            width = max([len(group.prompt), *map(len, prompts)])
            if prompts and width * (len(prompts) + 1) > room:
                break
            started = self._start(group)
            owners.extend([len(prompts)] * started)
            prompts.append(group.prompt)
            if self._deterministic:
                break
        if not prompts:
            return decoded, None
        return decoded, PromptBlock(prompts, np.array(owners), decoded)

    def _join_siblings(self) -> None:
        """Start samples of a group that is running already: they take over its prompt's keys and values.

        Only the last prompt token is taken in again, as any decoded token is, for the logits that follow it.
        """
        if not self._waiting or self._running == self._slots or not self._waiting[0].started:
            return
        group, first = self._waiting[0], self._running
        if group in self._groups[:first]:
            source = self._groups.index(group)
            targets = np.arange(first, first + self._start(group))
            self._decoder.cache.copy_rows(np.full_like(targets, source), targets, len(group.prompt) - 1)

    def _start(self, group: _Waiting) -> int:
        """Put as many of the first waiting group's samples as fit into rows; how many."""
        first, count = self._running, min(group.left, self._slots - self._running)
        rows, samples = slice(first, first + count), slice(group.started, group.started + count)
        self._groups[rows] = [group] * count
        self._sample[rows] = np.arange(samples.start, samples.stop)
        self._seed[rows] = group.seeds[samples]
        self._temperature[rows] = group.task.temperature
        self._limit[rows] = group.task.max_new_tokens
        self._token[rows] = group.prompt[-1]
        self._position[rows] = len(group.prompt) - 1
        self._made[rows] = 0
        self._over[rows] = False
        self._running += count
        group.started += count
        if not group.left:
            self._waiting.popleft()
        return count

    def _record(
        self, tokens: Integers, logprobs: np.ndarray[Any, np.dtype[np.float32]]
    ) -> list[FinishedSample]:
        """Write one token of every row down; what that finishes."""
        count = self._running
        rows, made = np.arange(count), self._made[:count]
        self._ids[rows, made] = tokens
        self._logprobs[rows, made] = logprobs
        self._versions[rows, made] = self._version
        made += 1
        self._position[:count] += 1
        self._token[:count] = tokens
        stopped = self._is_stop[tokens]
        done = (stopped | (made >= self._limit[:count])) & ~self._over[:count]
        finished = [self._finished(int(row), truncated=not stopped[row]) for row in np.flatnonzero(done)]
        if finished:
            self._over[:count] |= done
            self._close_rows()
        return finished

    def _finished(self, row: int, *, truncated: bool) -> FinishedSample:
        group, made = self._groups[row], self._made[row]
        assert group is not None
        return FinishedSample(
            key=group.task.key,
            sample_index=int(self._sample[row]),
            ids=self._ids[row, :made].copy(),
            logprobs=self._logprobs[row, :made].copy(),
            versions=self._versions[row, :made].copy(),
            truncated=truncated,
        )

    def _close_rows(self) -> None:
        """Fill the places of rows that are over with the last ones that are not."""
        over = self._over[: self._running]
        left = int((~over).sum())
        if self._deterministic:
            if left == 0:
                self._empty_from(0)
            return
        holes = np.flatnonzero(over[:left])
        movers = left + np.flatnonzero(~over[left:])
        if len(holes):
            for column in self._columns:
                column[holes] = column[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self._groups[hole] = self._groups[mover]
            self._decoder.cache.copy_rows(movers, holes, int(self._position[holes].max()))
        self._empty_from(left)

    def _empty_from(self, left: int) -> None:
        self._groups[left : self._running] = [None] * (self._running - left)
        self._over[left : self._running] = False
        self._running = left

    def _reset(self) -> None:
        # A cache with nan in it would poison later samples through their masks.
        self._waiting.clear()
        self._empty_from(0)
        self._decoder.cache.clear()
