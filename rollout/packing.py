"""Token arrays as they cross process borders and lie in files: little-endian 32-bit values, exactly."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def pack_i32(values: Iterable[int]) -> bytes:
    """int32 values as bytes."""
    return _little_endian(array("i", values)).tobytes()


def pack_f32(values: Iterable[float]) -> bytes:
    """float32 values as bytes."""
    return _little_endian(array("f", values)).tobytes()


def unpack_i32(packed: bytes) -> list[int]:
    """The int32 values of `pack_i32`."""
    return _little_endian(array("i", packed)).tolist()


def unpack_f32(packed: bytes) -> list[float]:
    """The float32 values of `pack_f32`, widened."""
    return _little_endian(array("f", packed)).tolist()


def _little_endian(values: array[Number]) -> array[Number]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
