"""Which files hold a model folder's weights, and their digest. Without torch; owns nothing."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from ..statemachine.errors import ModelRefused

_CHUNK_BYTES = 1 << 24


def weight_files(folder: str | Path) -> list[Path]:
    """The one safetensors file, or the shards that its index names, by name. Raises ModelRefused."""
    folder = Path(folder)
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ModelRefused(
            f"{folder} has neither model.safetensors nor its index: save the model with save_pretrained, "
            "which writes safetensors",
            path=str(folder),
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelRefused(
            f"{index} is no index of weights ({error!r}): save the model again with save_pretrained",
            path=str(folder),
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelRefused(
            f"{index} names {missing[0]}, which is not in the folder: copy the whole model", path=str(folder)
        )
    return [folder / name for name in names]


def weights_digest(folder: str | Path) -> str:
    """xxh3-128 over the bytes of the weight files, in order of name. Raises ModelRefused."""
    hashed = xxhash.xxh3_128()
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    hashed.update(chunk)
        except OSError as error:
            raise ModelRefused(f"{path} cannot be read: {error}; copy the model again") from error
    return hashed.hexdigest()
