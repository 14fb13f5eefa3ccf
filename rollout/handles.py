"""The seam between the pool and worker processes: what a pool may ask of one, and how it hears of its death.

Owns nothing. Production puts Ray actors behind it (`rayworkers`), tests put what does as it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..statemachine.errors import SurefootError
from .protocols import Group, GroupRequest, Published


class WorkerGone(SurefootError):
    """The worker's process is dead, or of no use any more."""

    code = "worker_gone"


class WorkRaised(SurefootError):
    """The work raised; the worker lives. `cause` is what it raised. Facts: none that survive pickling."""

    code = "work_raised"

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class Staged(Protocol):
    """Published weights, at a place from where workers fetch them."""

    @property
    def version(self) -> int: ...
    @property
    def size(self) -> int: ...  # bytes


class WorkerHandle(Protocol):
    """One worker process. Every method raises WorkerGone, and WorkRaised where it says so."""

    @property
    def node(self) -> str:
        """The cluster's name for its machine; empty until it is ready, or where there is none."""
        ...

    async def ready(self) -> None:
        """Wait until it can load weights. Raises WorkRaised."""
        ...

    async def load(self, staged: Any) -> None:
        """Load weights, digest checked. Raises WorkRaised."""
        ...

    async def generate(self, request: GroupRequest) -> Group | None:
        """None if it was aborted. Raises WorkRaised."""
        ...

    async def evaluate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Raises WorkRaised."""
        ...

    def abort(self, prompt_index: int, attempt: int) -> None:
        """End the work on an attempt; does not wait, never raises."""
        ...

    async def gone(self) -> str:
        """Wait until the process has ended; why it has."""
        ...

    async def kill(self) -> None:
        """End the process; bounded, idempotent, never raises."""
        ...


class WorkerSource(Protocol):
    """Where workers come from."""

    async def spawn(self, index: int) -> WorkerHandle:
        """Begin a new worker process; does not wait for it."""
        ...

    async def stage(self, weights: Published) -> Staged:
        """Put weights where every worker can fetch them; the last ones stay there."""
        ...

    async def close(self) -> None:
        """End every process that was ever spawned; bounded, idempotent."""
        ...
