"""A world on real files: the log in SQLite, groups and checkpoints in the run's folder; still without torch.

A driver comes in through the very door of `surefoot train`: `trainer.run` looks at the log, refuses what is
not whole, and claims the run. Only workers and learner are stand-ins; the learner writes real checkpoint
folders, with manifest, digests and the weights that are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.rollout.data import LoadedData
from surefoot.rollout.payload import RawTensor, digest_of, pack
from surefoot.rollout.protocols import Published, Row
from surefoot.rollout.store import FsspecGroupStore
from surefoot.statemachine.crashpoints import crashpoint
from surefoot.statemachine.events import CheckpointCommitted
from surefoot.statemachine.log import EventRow, RunHead
from surefoot.trainer.checkpoints import Checkpoints, Manifest
from surefoot.trainer.config import Config
from surefoot.trainer.places import Place
from surefoot.trainer.plan import Prepared
from surefoot.trainer.protocols import LearnerReady, SavedCheckpoint
from surefoot.trainer.run import _claim, _outcome_if_over

from .hands import touch
from .standins import StandInLearner, hashed
from .world import World, budget_of

SHARD = "weights.shard"


def published(version: int, update: int, weights: str) -> Published:
    """Weights as workers are sent them."""
    tensors = {"w": RawTensor("U8", (len(weights),), weights.encode())}
    return Published(version=version, update=update, digest=digest_of(tensors), payload=pack(tensors))


def prepared(config: Config, data_len: int) -> Prepared:
    """A config as `prepare` would give it, of rows that are numbers, without a model folder."""
    rows = [Row(row_index=index, prompt=str(index), prompt_ids=[1], fields={}) for index in range(data_len)]
    nothing: Any = None  # what only real workers and plans look at
    return Prepared(
        config=config,
        tokenizer=nothing,
        architecture=nothing,
        reward=nothing,
        data=LoadedData(rows=rows, filtered=0, digest="d"),
        eval_data=None,
        budget=budget_of(config, data_len),
        digests={"data": "d"},
        objects={},
        warnings=[],
    )


class FolderLearner(StandInLearner):
    """The stand-in whose checkpoints are real folders."""

    world: FileWorld

    async def start(self, rows: Sequence[EventRow], learner_try: int) -> LearnerReady:
        self.folders = Checkpoints(self.world.storage)
        return await super().start(rows, learner_try)

    async def gather(self, version: int) -> Published:
        self._check_alive()
        return published(version, self.update_held, self.weights)

    async def load(self, checkpoint: CheckpointCommitted) -> None:
        self._check_alive()
        self.folders.verify(checkpoint.path, self.folders.manifest(checkpoint).files)
        self.weights = self.world.checkpoint_file(checkpoint.path, SHARD).read_text()
        self.update_held = checkpoint.update

    async def save(self, path: str, head_seq: int, head_hash: str, served: Published | None) -> None:
        self._check_alive()
        self.folders.make_folder(path)
        self._taken = (path, self.weights, self.update_held, head_seq, head_hash, served)

    async def saved(self) -> SavedCheckpoint:
        path, weights, update, head_seq, head_hash, served = self._taken
        await asyncio.sleep(0.5)
        self._check_alive()
        touch()
        self.folders._files.write_new(f"checkpoints/{path}/{SHARD}", weights.encode())
        files, kept = self.folders.describe(path, ""), None
        if served is not None:
            kept, file = self.folders.add_served(path, served)
            files.append(file)
        crashpoint("checkpoint.files")
        manifest = Manifest(
            update=update,
            optimizer_steps=update,
            head_seq=head_seq,
            head_hash=head_hash,
            weights_digest=hashed(weights),
            ranks=1,
            served=kept,
            files=files,
        )
        digest, size = self.folders.add_manifest(path, manifest)
        crashpoint("checkpoint.manifest")
        return SavedCheckpoint(
            update=update, path=path, manifest_digest=digest, weights_digest=hashed(weights), bytes=size
        )

    async def served(self, checkpoint: CheckpointCommitted) -> Published | None:
        return self.folders.served(checkpoint)


class FileWorld(World):
    """A run in `runs_dir`."""

    def __init__(self, runs_dir: Path, config: Config | None = None, data_len: int = 16) -> None:
        super().__init__(config, data_len)
        self.place = Place(self.run_id, runs_dir)
        self.storage = self.place.storage_url(self.config)
        self.prepared = prepared(self.config, data_len)

    def claim(self, **options: Any) -> RunHead:
        """As `Run.start` does it, asking for the run: its last driver was of this very process."""
        _outcome_if_over(self.place, self.prepared, take_over=True)
        accept_divergence = options.get("accept_divergence", False)
        log, head = _claim(self.place, self.prepared, take_over=True, accept_divergence=accept_divergence)
        self.log.close()
        self.log = log
        self.lives += 1
        return head

    def store(self) -> FsspecGroupStore:
        return FsspecGroupStore(self.storage)

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.storage)

    def new_learner(self) -> FolderLearner:
        return FolderLearner(self)

    def initial_weights(self) -> Published:
        return published(0, 0, hashed("initial"))

    def group_file(self, name: str) -> Path:
        """Where a group file lies."""
        return self.place.folder / "groups" / name

    def checkpoint_file(self, path: str, name: str) -> Path:
        """Where a file of a checkpoint lies."""
        return self.place.folder / "checkpoints" / path / name
