"""The learner as the driver sees it.

One `Learner` is one learner group over all its tries: `start` builds ranks from the log's rows, and after
`LearnerGone` the driver simply starts it again as the next try. Ranks fold the rows they are handed; what
they need to know about position, schedule and config they take from that fold and from nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..rollout.protocols import Group, Published
from ..statemachine.events import CheckpointCommitted, Number, OptimizerStep
from ..statemachine.log import EventRow


class LearnerReady(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks agreed on when they were built."""

    ranks: int
    fingerprint: dict[str, str]  # execution: ranks, device, CPU capability, threads, versions, dtype, ...
    state_digest: str  # of the folded rows


class UpdateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one update did; same on first execution and on redo."""

    update: int
    steps: list[OptimizerStep]
    metrics: dict[str, Number]
    seconds: dict[str, float]


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose files are durable, not yet committed."""

    update: int
    path: str  # relative to the run's storage
    manifest_digest: str
    weights_digest: str
    bytes: int


class Learner(Protocol):
    """Model, optimizer and schedule on any number of ranks. Every method raises LearnerGone when a rank
    died or did not answer within its bound."""

    @property
    def nodes(self) -> frozenset[str]:
        """The machines that its ranks are on, by the cluster's names."""
        ...

    async def start(self, rows: Sequence[EventRow], learner_try: int) -> LearnerReady:
        """Build every rank from the budget event in `rows`; initial weights loaded (update 0)."""
        ...

    async def load(self, checkpoint: CheckpointCommitted) -> None:
        """Load a committed checkpoint on every rank. Raises CheckpointUnusable."""
        ...

    async def update(self, update: int, batch: Sequence[Group], rows: Sequence[EventRow]) -> UpdateResult:
        """Execute one update, for the first time or again. `rows`: what was appended since the last call."""
        ...

    async def gather(self, version: int) -> Published:
        """The current weights, whole, as policy version `version`."""
        ...

    async def save(self, path: str, head_seq: int, head_hash: str, served: Published | None) -> None:
        """Take a snapshot of the current state for the checkpoint at `path`; training may go on after it.

        `served`: the weights of the last publication, kept in the checkpoint when it is taken elsewhere
        than at a publication.
        """
        ...

    async def saved(self) -> SavedCheckpoint:
        """Wait until the snapshot's files are durable and its manifest written."""
        ...

    async def served(self, checkpoint: CheckpointCommitted) -> Published | None:
        """The published weights that the checkpoint keeps. Raises CheckpointUnusable."""
        ...

    async def close(self) -> None:
        """End every rank; idempotent, bounded."""
        ...
