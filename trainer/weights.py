"""Weights between learner, workers and files: what version 0 is, and torch tensors as raw ones.

Owns nothing. Invariant: a published version is every parameter of the model in fp32 by the name transformers
gives it, tied weights once. `initial_weights` makes version 0 from the model folder alone, without torch, and
it equals, byte for byte, what the learner gathers before its first update.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..rollout.architecture import read_architecture
from ..rollout.payload import (
    RawTensor,
    WeightsDigest,
    digest_of,
    digest_of_payload,
    pack,
    read_tensors,
    unpack,
)
from ..rollout.protocols import Published
from ..rollout.weightfiles import weight_files, weights_digest
from ..statemachine.errors import ModelRefused

if TYPE_CHECKING:
    import torch

__all__ = [
    "RawTensor",
    "WeightsDigest",
    "digest_of",
    "digest_of_folder",
    "digest_of_payload",
    "initial_weights",
    "pack",
    "raw",
    "read_tensors",
    "unpack",
]

digest_of_folder = weights_digest
"""Digest of a model folder's weight files as they lie there, in whatever dtype: names what a run began with.

It is over files, not tensors, and so is no version's digest.
"""


def initial_weights(folder: str | Path) -> Published:
    """Policy version 0: a model folder's weights in fp32. Raises ModelRefused."""
    shapes = read_architecture(folder).parameter_shapes()
    tensors: dict[str, RawTensor] = {}
    for path in weight_files(folder):
        for name, tensor in _read_file(path).items():
            if name in shapes:  # a tied output matrix or a buffer that was saved as well is left out
                tensors[name] = _as_float32(path, name, tensor)
    for name, shape in shapes.items():
        found = tensors.get(name)
        if found is None or found.shape != shape:
            has = f"with shape {list(found.shape)}" if found else "not at all"
            raise ModelRefused(
                f"{folder} has {name} {has}, its config.json asks for {list(shape)}: save the model again "
                "with save_pretrained",
                path=str(folder),
                tensor=name,
            )
    return Published(version=0, update=0, digest=digest_of(tensors), payload=pack(tensors))


def raw(tensor: torch.Tensor) -> RawTensor:
    """A float32 tensor as bytes; a view where it lies contiguous on the CPU."""
    array = tensor.detach().to("cpu").contiguous().numpy()
    if array.dtype != np.float32:
        raise TypeError(f"published weights are float32, not {array.dtype}")
    return RawTensor("F32", tuple(array.shape), array.reshape(-1).data.cast("B"))


def _read_file(path: Path) -> dict[str, RawTensor]:
    try:
        with path.open("rb") as file:
            # The mapping lives as long as views into it do.
            return read_tensors(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError) as error:
        raise ModelRefused(
            f"{path} cannot be read as safetensors ({error}): save the model again with save_pretrained",
            path=str(path),
        ) from error


def _as_float32(path: Path, name: str, tensor: RawTensor) -> RawTensor:
    data = tensor.data
    if tensor.dtype == "F32":
        return tensor
    if tensor.dtype == "BF16":
        array = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif tensor.dtype in ("F16", "F64"):
        array = np.frombuffer(data, "<f2" if tensor.dtype == "F16" else "<f8").astype("<f4")
    else:
        raise ModelRefused(
            f"{path}: {name} is of type {tensor.dtype}, a trainable weight is a float: use the model's plain "
            "weights",
            path=str(path),
            tensor=name,
        )
    return RawTensor("F32", tensor.shape, np.ascontiguousarray(array).data.cast("B"))
