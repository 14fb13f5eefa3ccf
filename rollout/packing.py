"""Token arrays as they cross process borders and lie in files: little-endian 32-bit values, exactly."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack_i32(values: Iterable[int]) -> bytes:
    """int32 values as bytes."""
    return _bytes(array("i", values))


def pack_f32(values: Iterable[float]) -> bytes:
    """float32 values as bytes."""
    return _bytes(array("f", values))


def unpack_i32(packed: bytes) -> list[int]:
    """The int32 values of `pack_i32`."""
    return _values("i", packed).tolist()


def unpack_f32(packed: bytes) -> list[float]:
    """The float32 values of `pack_f32`, widened."""
    return _values("f", packed).tolist()


def _bytes(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _values(kind: str, packed: bytes) -> array[int] | array[float]:
    values = array(kind)
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
