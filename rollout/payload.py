"""Published weights as bytes: the safetensors form, and the digest that both ends work out over it.

Without torch; owns nothing. Invariant: the digest is a function of the tensors alone (name, dtype, shape and
bytes, in order of name), not of how a file orders or pads them, so that whoever holds the tensors and whoever
holds the bytes get the same. Tied weights are one tensor, so they are packed and counted once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 1 << 24
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


class RawTensor(NamedTuple):
    """A tensor as safetensors holds it: dtype by its name there, little-endian row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes


class WeightsDigest:
    """xxh3-128 over tensors that come one at a time, in order of name; holds none of them."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._last = ""

    def add(self, name: str, tensor: RawTensor) -> None:
        """The next tensor. Raises ValueError for one that is out of order."""
        if self._last and name <= self._last:
            raise ValueError(f"{name} does not come after {self._last}: tensors are hashed in order of name")
        self._last = name
        head = json.dumps([name, tensor.dtype, list(tensor.shape)]).encode()
        self._hash.update(len(head).to_bytes(4, "little") + head)
        with memoryview(tensor.data) as view, view.cast("B") as flat:
            for start in range(0, len(flat), _CHUNK_BYTES):
                self._hash.update(flat[start : start + _CHUNK_BYTES])

    def hexdigest(self) -> str:
        """The digest of what was added so far."""
        return self._hash.hexdigest()


def digest_of(tensors: Mapping[str, RawTensor]) -> str:
    """The digest of a set of tensors."""
    digest = WeightsDigest()
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hexdigest()


def digest_of_payload(payload: bytes | memoryview) -> str:
    """The digest of the tensors in a safetensors file. Raises ValueError if it is none."""
    return digest_of(read_tensors(payload))


def pack(tensors: Mapping[str, RawTensor]) -> bytes:
    """A safetensors file of these tensors, in order of name."""
    header: dict[str, object] = {}
    offset = 0
    names = sorted(tensors)
    for name in names:
        tensor = tensors[name]
        size = memoryview(tensor.data).nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *(tensors[name].data for name in names)])


def read_tensors(payload: bytes | memoryview) -> dict[str, RawTensor]:
    """The tensors of a safetensors file, in order of name, as views into it. Raises ValueError."""
    view = memoryview(payload)
    try:
        head_size = int.from_bytes(view[:8], "little")
        header = json.loads(bytes(view[8 : 8 + head_size]))
        data = view[8 + head_size :]
        found = {
            name: _tensor(name, entry, data)
            for name, entry in sorted(header.items())
            if name != "__metadata__"
        }
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{view.nbytes} bytes that are no safetensors file: {error!r}") from error
    return found


def _tensor(name: str, entry: dict[str, object], data: memoryview) -> RawTensor:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in _list(entry["shape"]))
    start, end = (int(offset) for offset in _list(entry["data_offsets"]))
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"{name}: bytes {start}..{end} do not hold a {dtype} of shape {shape}")
    return RawTensor(dtype, shape, data[start:end])


def _list(value: object) -> Iterable[int]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def unpack(payload: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file on the CPU, by name. Loads torch."""
    from safetensors.torch import load

    return load(payload)
