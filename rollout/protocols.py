"""The seams between the driver and whatever generates: requests, answers, pool, group store, rewards.

The driver knows only these. Production puts Ray workers and a file system behind them, the simulator puts
stand-ins there that need neither torch nor Ray. Everything that crosses a process border is a msgspec
struct of plain values; token arrays are bytes of little-endian 32-bit values, so that packing is exact.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from ..statemachine.events import IssueReason


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of data, after template and filter. `fields` is what the reward function sees."""

    row_index: int  # in the loaded data
    prompt: str  # as the model sees it, template applied
    prompt_ids: list[int]
    fields: dict[str, Any]  # the source's own columns: prompt, answer, ...; plain values


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Generate one attempt of one group."""

    prompt_index: int
    attempt: int
    admission_version: int  # start only with this version or a later one loaded
    row: Row
    seeds: list[int]  # one per sample; from run seed, prompt index and sample index only
    temperature: float  # 0: greedy (evaluation)
    max_new_tokens: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One response. The end token, where it was sampled, is the last id."""

    ids: bytes  # int32 [response]
    logprobs: bytes  # float32 [response]; of the temperature-scaled full distribution
    versions: bytes  # int32 [response]; policy version that made each token
    truncated: bool  # hit max_new_tokens without an end token
    text: str
    reward: float
    parts: dict[str, float]  # the reward's named parts; empty if it is one number


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A finished group: what the store holds and the learner trains on."""

    prompt_index: int
    attempt: int
    row_index: int
    prompt_ids: bytes  # int32 [prompt]
    temperature: float
    samples: list[Sample]


class GroupDone(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: the attempt is finished."""

    worker: int
    group: Group
    seconds: float


class GroupFailed(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: the attempt's work raised, or its worker died under it."""

    worker: int
    prompt_index: int
    attempt: int
    reason: IssueReason  # FAILED or WORKER_LOST
    error: str  # one line; for a reward, names the row


class WorkerLost(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: a worker died or did not confirm in time; the pool has begun to replace it."""

    worker: int
    because: str


Answer = GroupDone | GroupFailed | WorkerLost


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Weights as workers load them: `payload` is a safetensors file, `digest` is over its tensors."""

    version: int
    update: int
    digest: str
    payload: bytes


class RolloutPool(Protocol):
    """Any number of workers. Every submitted attempt is answered exactly once, or its worker is lost."""

    async def start(self) -> None:
        """Bring every worker up, without weights. Raises within a bounded time."""
        ...

    def free_slots(self) -> int:
        """How many more groups could start now; 0 before the first publication is loaded."""
        ...

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Hand requests to workers; never blocks. A newer attempt of a group ends work on an older one."""
        ...

    async def answers(self) -> list[Answer]:
        """All that are there, waiting for one; an empty list says that slots have come free without one."""
        ...

    async def publish(self, weights: Published) -> None:
        """Send weights to every worker under way; those that do not confirm in time are replaced."""
        ...

    def drain(self, nodes: frozenset[str]) -> None:
        """Machines that go away: their workers get nothing new, and are replaced once they are idle."""
        ...

    async def evaluate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Answer held-out rows with the version that is loaded; retried on another worker if one dies."""
        ...

    async def close(self) -> None:
        """End every worker; idempotent, bounded."""
        ...


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """Where one group lies."""

    file: str
    offset: int
    size: int
    digest: str


class GroupStore(Protocol):
    """Group files by fresh names. Only an event makes a file exist; what no event names may be swept."""

    def write(self, name: str, groups: Sequence[Group]) -> list[StoredFile]:
        """Write one new file, durable when this returns. Raises FileExistsError if the name is taken."""
        ...

    def read(self, place: StoredFile) -> Group:
        """One group, digest checked. Raises GroupUnusable (missing or damaged)."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete files; those that are gone already are no error."""
        ...

    def names(self) -> list[str]:
        """Every file there is."""
        ...


RewardValue = float | dict[str, float]
RewardFunction = Callable[[dict[str, Any], str, list[int]], RewardValue | Awaitable[RewardValue]]
"""`(row fields, response text, response ids) -> float or dict of parts` (a dict's reward is their sum)."""
