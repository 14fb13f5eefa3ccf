"""A run's weights as a model folder that transformers' from_pretrained loads.

Owns the folder it writes: it appears whole or not at all. The weights are those of a committed checkpoint,
checked against the digest that its event holds, or of the starting model for update 0. They are written as
they are trained, in float32. Torch is imported only once it is known that there is something to export.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..statemachine.errors import CheckpointUnusable, UserMistake
from ..statemachine.events import CheckpointCommitted
from ..statemachine.state import RunState, fold
from .checkpoints import Checkpoints
from .config import Config
from .places import Place

if TYPE_CHECKING:
    import torch

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def export(place: Place, folder: Path, update: int | None = None) -> str:
    """Write the weights after `update` (the last checkpoint's unless given); one line that says what.

    Raises UserMistake (no such checkpoint, a folder that is there already) and CheckpointUnusable.
    """
    if folder.exists():
        raise UserMistake(f"{folder} is there already: name a folder that is not, so that nothing is lost")
    with place.reading() as log:
        state = fold(log.read(place.run))
    config = Config.from_resolved(state.config)
    if update == 0:
        from .weights import initial_weights, unpack

        tensors, said = unpack(initial_weights(config.model.path).payload), "the starting weights"
    else:
        committed = _chosen(state, update)
        where = place.storage_url(config)
        try:
            tensors = read_weights(Checkpoints(where), committed)
        except CheckpointUnusable as error:
            kept = ", ".join(map(str, state.checkpoints))
            raise CheckpointUnusable(
                f"{error} in {where}: put it back, or name another --update (kept are the checkpoints of: "
                f"{kept}; 0 is the starting weights)",
                path=committed.path,
            ) from error
        said = f"the weights after update {committed.update}"
    _write(folder, Path(config.model.path), tensors)
    return f"{folder}: {said} of run {place.run}"


def read_weights(checkpoints: Checkpoints, committed: CheckpointCommitted) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint by the name transformers gives it. Raises CheckpointUnusable."""
    checkpoints.verify(committed.path, checkpoints.manifest(committed).files)
    import torch
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    from .weights import digest_of, raw

    location, local = checkpoints.location(committed.path)
    reader = FileSystemReader(location) if local else FsspecReader(location)
    found: dict[str, Any] = reader.read_metadata().state_dict_metadata
    stored = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if name.startswith("weights.")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for
        load(stored, storage_reader=reader, no_dist=True)
    tensors = {name.removeprefix("weights."): tensor for name, tensor in stored.items()}
    digest = digest_of({name: raw(tensor) for name, tensor in tensors.items()})
    if digest != committed.weights_digest:
        raise CheckpointUnusable(
            f"checkpoint {committed.path} loads to weights {digest}, not {committed.weights_digest}",
            path=committed.path,
        )
    return tensors


def _chosen(state: RunState, update: int | None) -> CheckpointCommitted:
    kept = ", ".join(str(number) for number in state.checkpoints) or "none"
    if update is None:
        latest = state.latest_checkpoint()
        if latest is None:
            raise UserMistake(
                "the run has no committed checkpoint yet; --update 0 exports its starting weights"
            )
        return latest
    if update not in state.checkpoints:
        raise UserMistake(
            f"--update {update}: no checkpoint of it is kept (kept are those of updates: {kept}); name "
            "one of them, or 0 for the starting weights"
        )
    return state.checkpoints[update]


def _write(folder: Path, model: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        for path in model.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copy(path, fresh / path.name)
        config = json.loads((fresh / "config.json").read_text(encoding="utf-8"))
        # From_pretrained would otherwise round the weights to the type that the starting model was saved in.
        config.pop("torch_dtype", None)
        config["dtype"] = "float32"
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "model.safetensors").chmod(0o644)  # safetensors makes it 0600
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
