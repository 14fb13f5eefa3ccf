"""Sharded tensors to a checkpoint folder and back, by torch.distributed.checkpoint (DCP).

Owns the memory that snapshots are copied to, one after the other, and what DCP holds while one is under
way. Invariants: a snapshot is of the very moment of the call, whatever training does afterwards; its
collectives run on a group of their own; any number of ranks may load what another number wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from .checkpoints import Checkpoints, ManifestFile


def make_stager(device: torch.device) -> DefaultStager:
    """Where a rank's snapshots are copied to. Fresh memory costs several times the copy itself, so it is kept
    from one snapshot to the next: as much as the rank's weights and optimizer state."""
    on_gpu = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,  # the next optimizer step must not run into the copy
            use_non_blocking_copy=on_gpu,
        )
    )


def begin_snapshot(
    checkpoints: Checkpoints,
    path: str,
    tensors: dict[str, torch.Tensor],
    group: dist.ProcessGroup,
    stager: DefaultStager,
) -> Callable[[], None]:
    """Copy the tensors, then write them in the background. What is returned waits for the files.

    Collective. Shards are DTensors; each rank writes its own. The snapshot before must be written: its memory
    is used again.
    """
    location, local = checkpoints.location(path)
    writer = FileSystemWriter(location) if local else FsspecWriter(location)
    future: Any = async_save(dict(tensors), storage_writer=writer, process_group=group, async_stager=stager)
    assert isinstance(future, Future)

    def wait() -> None:
        future.result()

    return wait


def written_by(checkpoints: Checkpoints, path: str, rank: int) -> list[ManifestFile]:
    """The files that a rank has written, once its snapshot is done: DCP names them after it."""
    own = checkpoints.describe(path, f"__{rank}_")
    return own + checkpoints.describe(path, ".metadata") if rank == 0 else own


def load_snapshot(
    checkpoints: Checkpoints, path: str, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Overwrite these tensors, in place, with what the folder holds. Collective."""
    location, local = checkpoints.location(path)
    reader = FileSystemReader(location) if local else FsspecReader(location)
    load(tensors, storage_reader=reader, process_group=group)
