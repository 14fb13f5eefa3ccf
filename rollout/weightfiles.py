"""Which files hold a model folder's weights, and their digest. Without torch; owns nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

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


def _refuse_torn(path: Path, file: BinaryIO) -> None:
    """Refuse a file whose length is not what its header says, as a download that was cut short leaves it.

    The format: eight bytes of the header's length, the header in JSON, the tensors' bytes.
    """
    size = path.stat().st_size
    length = int.from_bytes(file.read(8), "little")
    try:
        header: dict[str, Any] = json.loads(file.read(length)) if length <= size else {}
        said = (
            8
            + length
            + max(
                (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"),
                default=0,
            )
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        said = None
    file.seek(0)
    if said != size:
        what = "no safetensors file" if said is None else f"{size} bytes long where its header says {said}"
        raise ModelRefused(f"{path} is {what}: it is torn; copy the model again", path=str(path.parent))


def weights_digest(folder: str | Path) -> str:
    """xxh3-128 over the bytes of the weight files, in order of name. Raises ModelRefused."""
    hashed = xxhash.xxh3_128()
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                _refuse_torn(path, file)
                while chunk := file.read(_CHUNK_BYTES):
                    hashed.update(chunk)
        except OSError as error:
            raise ModelRefused(f"{path} cannot be read: {error}; copy the model again") from error
    return hashed.hexdigest()
