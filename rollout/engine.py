"""The inference engine: groups in, finished samples out, one token of every running sample a step.

`Engine` is the seam, and a worker knows nothing else of what generates; an engine on other software has only
to keep it. Owns nothing. Invariants that every engine holds: each sample that was added is returned exactly
once or was aborted; a token's log-probability and version are those of the weights that sampled it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """One prompt, to be answered once per seed."""

    key: Hashable  # comes back with every sample
    prompt_ids: Sequence[int]
    seeds: Sequence[int]  # any integers
    temperature: float  # 0: the most likely token, always
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSample:
    """One response. The end token, where it was sampled, is the last id."""

    key: Hashable
    sample_index: int  # place among the task's seeds
    ids: np.ndarray[Any, np.dtype[np.int32]]  # [response]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]  # [response]; of the temperature-scaled distribution
    versions: np.ndarray[Any, np.dtype[np.int32]]  # [response]; policy version that made each token
    truncated: bool  # hit max_new_tokens without an end token


class Engine(Protocol):
    """What generates. All calls come from one thread and return; none waits for another process."""

    @property
    def version(self) -> int:
        """Policy version of the weights that are loaded; -1 before the first."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Swap weights, by transformers' names, between two steps.

        What is under way goes on, and keeps the keys and values that it has cached. Raises ModelRefused if
        the weights do not fit, and keeps the old ones.
        """
        ...

    def add(self, task: GroupTask) -> None:
        """Take a group in. Its samples start as places become free, first come first served.

        Raises ValueError for a task that could never run.
        """
        ...

    def step(self) -> list[FinishedSample]:
        """One token for every running sample; those that are done. Nothing to do: an empty list.

        Raises RunFailedError, and forgets all that was under way, if the logits are not finite.
        """
        ...

    def abort(self, keys: Collection[Hashable]) -> None:
        """Forget these groups, waiting or running; none of their samples is returned any more."""
        ...

    def active_samples(self) -> int:
        """Samples added and not yet returned."""
        ...

    def free_samples(self) -> int:
        """How many more samples could start at the next step."""
        ...


def generate_batch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[Sequence[int]],
    temperature: float,
    max_new_tokens: int,
) -> list[list[FinishedSample]]:
    """Answer every prompt once per seed of its own; samples in the order of prompts and seeds.

    The engine must be idle. More samples than it has slots are fine.
    """
    for index, (prompt, own_seeds) in enumerate(zip(prompts, seeds, strict=True)):
        engine.add(
            GroupTask(
                key=index,
                prompt_ids=prompt,
                seeds=own_seeds,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
            )
        )
    found: dict[tuple[Hashable, int], FinishedSample] = {}
    while engine.active_samples():
        for sample in engine.step():
            found[sample.key, sample.sample_index] = sample
    return [[found[index, sample] for sample in range(len(own))] for index, own in enumerate(seeds)]
