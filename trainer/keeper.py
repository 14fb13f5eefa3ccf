"""The keeper: checkpoints from snapshot to commit, and the deletion of what nothing will ask for again.

A checkpoint's files get a fresh name and count only once their event is committed; files are deleted only
after an event has retired them; what no event names is swept when a run is taken over. One checkpoint is
under way at a time, and training goes on beside it.
"""

from __future__ import annotations

import asyncio
import re

from ..rollout.protocols import Published
from ..statemachine.crashpoints import crashpoint
from ..statemachine.events import CheckpointCommitted, Event, FilesRetired
from ..statemachine.state import RunState
from .parts import Parts


class Keeper:
    """Checkpoints and retirement of one incarnation."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._under_way: asyncio.Task[None] | None = None
        self._tries = 0
        self.as_recorded = True  # whether the learner holds the bits that the records go on from
        self.seconds_last = 0.0  # what the last checkpoint took, from snapshot to commit

    async def sweep(self) -> None:
        """Delete what no event names. Only right after a take-over, before anything is written.

        Only files of incarnations before this one: a driver that was taken over from, and does not know it
        yet, must not touch what the newer one has written.
        """
        parts, state, incarnation = self._parts, self._parts.journal.state, self._parts.journal.incarnation
        strays = [
            name
            for name in await parts.blocking(parts.store.names)
            if name not in state.files and was_before(name, incarnation)
        ]
        if strays:
            await parts.blocking(parts.store.delete, strays)
        kept = {checkpoint.path for checkpoint in state.checkpoints.values()}
        for path in await parts.blocking(parts.checkpoints.names):
            if path not in kept and was_before(path, incarnation):
                await parts.blocking(parts.checkpoints.delete, path)

    def is_due(self, update: int) -> bool:
        """Whether the config asks for a checkpoint of this update."""
        total = self._parts.journal.state.total
        return update > 0 and (
            update % self._parts.config.checkpoint.every_updates == 0 or update >= total.updates_total
        )

    async def save(self, update: int, served: Published | None) -> None:
        """Take the snapshot of `update`, which the learner now holds; commit in the background.

        `served` is what workers generate with; it is kept in the checkpoint if it is of an older update.
        """
        await self.settle()
        parts, state = self._parts, self._parts.journal.state
        if update in state.checkpoints:
            return
        self._tries += 1
        # The driver's own number: the log that it read may hold the beginning of a newer one already.
        path = f"u{update:06d}-i{parts.journal.incarnation:04d}-{self._tries:03d}"
        # All of it as of now: what is committed while the snapshot is taken is not in it.
        head_seq, head_hash, version = state.seq, state.hash, state.version_at(update)
        as_recorded = self.as_recorded
        older = served if served is not None and served.version > 0 and served.update < update else None
        started = asyncio.get_running_loop().time()
        await parts.learner.save(path, head_seq, head_hash, older)
        self._under_way = asyncio.ensure_future(
            self._commit(path, update, version, head_seq, head_hash, started, as_recorded)
        )

    async def _commit(
        self,
        path: str,
        update: int,
        policy_version: int,
        head_seq: int,
        head_hash: str,
        started: float,
        as_recorded: bool,
    ) -> None:
        saved = await self._parts.learner.saved()
        state = self._parts.journal.state
        total = state.total
        await self._parts.journal.append(
            CheckpointCommitted(
                update=update,
                optimizer_steps=update * total.minibatches * total.passes,
                policy_version=policy_version,
                path=path,
                manifest_digest=saved.manifest_digest,
                weights_digest=saved.weights_digest,
                bytes=saved.bytes,
                head_seq=head_seq,
                head_hash=head_hash,
                as_recorded=as_recorded,
            )
        )
        self.seconds_last = asyncio.get_running_loop().time() - started
        crashpoint("checkpoint.committed")
        await self.retire()

    async def settle(self) -> None:
        """Wait for the checkpoint under way, if there is one. Raises what it raised.

        It goes on if whoever waits is cancelled, and can be waited for again.
        """
        task = self._under_way
        if task is not None:
            await asyncio.wait({task})
            if self._under_way is task:
                self._under_way = None
            task.result()

    def raise_if_failed(self) -> None:
        """Raise what the checkpoint under way has raised so far."""
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()

    def abandon(self) -> None:
        """Forget the checkpoint under way: its learner is gone, its files are swept later."""
        if self._under_way is not None:
            self._under_way.cancel()
            self._under_way = None

    async def retire(self) -> None:
        """Retire by an event, then delete, what every kept checkpoint covers."""
        parts = self._parts
        gone: list[FilesRetired] = []

        def decide(state: RunState) -> list[Event]:
            checkpoints, files = state.retirable(parts.config.checkpoint.keep)
            if not checkpoints and not files:
                return []
            gone.append(FilesRetired(checkpoints=[c.path for c in checkpoints], group_files=files))
            return list(gone)

        await parts.journal.commit(decide)
        for event in gone:
            crashpoint("retire.committed")
            await parts.blocking(parts.store.delete, event.group_files)
            for path in event.checkpoints:
                await parts.blocking(parts.checkpoints.delete, path)
            crashpoint("retire.deleted")


def was_before(name: str, incarnation: int) -> bool:
    """Whether a file or folder, by its name, is of an older incarnation; what is not ours is not."""
    made_by = re.search(r"(?:^g|-i)(\d+)-", name)
    return made_by is not None and int(made_by[1]) < incarnation
