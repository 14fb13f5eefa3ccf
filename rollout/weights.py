"""Published weights as bytes, and their digest: the same functions where they are made and where they arrive.

Owns nothing. Invariants: packing and unpacking change no bit; the digest depends on names, types, shapes and
values alone, so it is the same for tensors in memory, for a packed payload and on any device.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from ..statemachine.errors import RunFailedError

_CHUNK_BYTES = 1 << 24
_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """xxh3-128 over the tensors by name; of tied weights, hand in one."""
    hashed = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        hashed.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(data), _CHUNK_BYTES):
            hashed.update(data[start : start + _CHUNK_BYTES])
    return hashed.hexdigest()


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The tensors as one safetensors file."""
    from safetensors.torch import save

    return save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})


def unpack_tensors(payload: Any) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file in memory, as views of it: only to be read, and nothing is copied.

    Raises RunFailedError for bytes that are no such file.
    """
    data = memoryview(payload).cast("B")
    try:
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(bytes(data[8 : 8 + size]))
        return {
            name: _view(data, 8 + size, entry) for name, entry in header.items() if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RunFailedError(f"published weights are no safetensors file: {error!r}") from error


def _view(data: memoryview, offset: int, entry: dict[str, Any]) -> torch.Tensor:
    start, end = entry["data_offsets"]
    kind = _TYPES[entry["dtype"]]
    if start == end:
        return torch.empty(entry["shape"], dtype=kind)
    count = (end - start) // kind.itemsize
    return torch.frombuffer(data, dtype=kind, count=count, offset=offset + start).reshape(entry["shape"])
