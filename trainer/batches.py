"""Batches: the groups of the next update read from the store, and those that cannot be used issued again.

Owns nothing. The invariant: what is handed to the learner has been read whole and its digest checked, and an
update begins only with all of its groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..rollout.protocols import Group
from ..statemachine import events as ev
from ..statemachine.admission import Batch, next_batch
from ..statemachine.errors import GroupUnusable
from ..statemachine.state import RunState
from .parts import Parts
from .recovery import read_groups


@dataclass(frozen=True)
class ReadBatch:
    """A batch, read from the store."""

    update: int
    order: list[tuple[int, int]]  # (prompt_index, attempt), in training order
    stored: list[ev.StoredGroup]
    groups: list[Group]
    seconds: float  # that reading took

    def began(self) -> ev.UpdateBegan:
        """The event by which its update begins."""
        return ev.UpdateBegan(update=self.update, groups=self.order)


class Batches:
    """The batches of one incarnation. `submit`: hands committed attempts to workers."""

    def __init__(self, parts: Parts, submit: Callable[[Sequence[ev.Issue]], None]) -> None:
        self._parts = parts
        self._submit = submit

    async def read(self, batch: Batch) -> ReadBatch | None:
        """The batch's groups, digests checked; damaged ones are issued again, and there is no batch then."""
        started = asyncio.get_running_loop().time()
        order = [(live.prompt_index, live.attempt) for live in batch.groups]
        stored = [(live.file, live.stored) for live in batch.groups if live.stored is not None]
        found = await read_groups(self._parts, stored)
        groups = [group for group in found if isinstance(group, Group)]
        if len(groups) < len(order):
            damaged = [
                key for key, group in zip(order, found, strict=True) if isinstance(group, GroupUnusable)
            ]
            await self.reissue(ev.IssueReason.BAD_FILE, damaged)
            return None
        seconds = asyncio.get_running_loop().time() - started
        return ReadBatch(batch.update, order, [group for _, group in stored], groups, seconds)

    async def read_ahead(self) -> ReadBatch | None:
        """The batch after a publication, if it is certain already and all there."""
        config = self._parts.config
        if config.sync.on_stale == "reissue":
            return None
        decision = next_batch(self._parts.journal.state, config.rollout.max_attempts)
        return await self.read(decision) if isinstance(decision, Batch) else None

    async def reissue(self, reason: ev.IssueReason, attempts: Sequence[tuple[int, int]]) -> None:
        """Issue groups again whose attempt is still the named one, stored or not."""
        issued: list[ev.Issue] = []

        def decide(state: RunState) -> list[ev.Event]:
            for prompt_index, attempt in attempts:
                group = state.live.get(prompt_index)
                if group is not None and group.attempt == attempt:
                    version = (
                        state.policy_version if reason is ev.IssueReason.STALE else group.admission_version
                    )
                    issued.append(ev.Issue(prompt_index, attempt + 1, version))
            return [ev.GroupsReissued(groups=issued, reason=reason)] if issued else []

        if await self._parts.journal.commit(decide):
            self._submit(issued)
