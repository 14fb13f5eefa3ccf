"""What a driver is given: the parts behind their protocols, and the two ways it may block.

Production hands it Ray workers, FSDP ranks and files; the simulator hands it stand-ins. The driver and
everything it is made of (feeder, keeper, recovery) see only this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from ..rollout.protocols import GroupRequest, GroupStore, Published, RolloutPool
from ..statemachine.events import Issue
from .config import Config
from .ending import Ending
from .journal import Blocking, Journal
from .protocols import Learner


class Prompts(Protocol):
    """The data in draw order, as requests."""

    def request(self, issue: Issue) -> GroupRequest:
        """The request of one attempt: row and seeds depend on the prompt index alone."""
        ...

    def evaluation(self) -> list[GroupRequest]:
        """One request a held-out row, one sample each."""
        ...


class CheckpointFiles(Protocol):
    """Checkpoint folders by name; only an event makes one exist."""

    def names(self) -> list[str]:
        """Every checkpoint folder there is, committed or not."""
        ...

    def delete(self, path: str) -> None:
        """Delete one; gone already is no error."""
        ...


def unheard(text: str) -> None:
    """Where nobody is told what is being waited for."""


@dataclass(frozen=True)
class Parts:
    """Everything a driver works with."""

    config: Config
    journal: Journal
    pool: RolloutPool
    learner: Learner
    store: GroupStore
    checkpoints: CheckpointFiles
    prompts: Prompts
    initial_weights: Callable[[], Published]  # version 0
    blocking: Blocking  # files; the journal has a thread of its own
    draining: Callable[[], Awaitable[frozenset[str]]]  # machines that the cluster is about to take away
    node: str  # the driver's own machine, by the cluster's name
    ending: Ending  # by when all of it is over, once the run was asked to stop
    waiting: Callable[[str], None] = unheard  # told what is being waited for, where it may take long
