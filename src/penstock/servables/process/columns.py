"""Rows of values as bytes, at both ends of a stream: numbers in their own form, bytes behind their lengths."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.servables.api.specs import Spec
    from penstock.servables.process import stages_pb2 as pb

__all__ = ["encode_bytes", "joined", "read_column"]

_LENGTH: Final = struct.Struct("<I")


def encode_bytes(elements: Iterable[bytes]) -> bytes:
    """Each element behind its length."""
    out: list[bytes] = []
    for one in elements:
        out += (_LENGTH.pack(len(one)), one)
    return b"".join(out)


def _decode_bytes(data: bytes, count: int) -> NDArray[Any]:
    """So many elements; ValueError when the bytes are not just those."""
    found = np.empty(count, object)
    position = 0
    for index in range(count):
        if len(data) - position < _LENGTH.size:
            raise ValueError("the bytes of a column end early")
        (size,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size + size
        if position > len(data):
            raise ValueError("the bytes of a column end early")
        found[index] = data[position - size : position]
    if position != len(data):
        raise ValueError("a column has bytes behind its last element")
    return found


def joined(spec: Spec, arrays: Sequence[NDArray[Any]]) -> bytes:
    """The rows of several arrays, C-contiguous and of the spec's dtype, one after the other."""
    if spec.is_bytes:
        return b"".join([encode_bytes(one.ravel()) for one in arrays])
    return arrays[0].tobytes() if len(arrays) == 1 else b"".join(cast("Sequence[memoryview]", arrays))


def read_column(spec: Spec, column: pb.Column, counts: Sequence[int]) -> list[NDArray[Any]]:
    """An array [count, ...] of each part, over the column's own bytes; ValueError for one that does not fit."""
    total = sum(counts)
    data = column.data
    if spec.is_fixed:
        flat = _decode_bytes(data, total * _product(spec.shape)) if spec.is_bytes else np.frombuffer(data, spec.dtype)
        whole = flat.reshape(total, *spec.shape)
        if len(counts) == 1:
            return [whole]
        ends = [0]
        for count in counts:
            ends.append(ends[-1] + count)
        return [whole[first:end] for first, end in pairwise(ends)]
    return _parts(spec, data, counts, column.sizes)


def _parts(spec: Spec, data: bytes, counts: Sequence[int], sizes: Sequence[int]) -> list[NDArray[Any]]:
    rank = len(spec.shape)
    if len(sizes) != rank * len(counts):
        raise ValueError("a column without the sizes of its parts")
    shapes = [(count, *sizes[rank * n : rank * n + rank]) for n, count in enumerate(counts)]
    if not all(spec.fits(shape[1:]) for shape in shapes):
        raise ValueError(f"a column whose rows are not {spec}")
    numbers = [_product(shape) for shape in shapes]
    flat = _decode_bytes(data, sum(numbers)) if spec.is_bytes else np.frombuffer(data, spec.dtype)
    if len(flat) != sum(numbers):
        raise ValueError("a column of another length than its parts have")
    found, first = [], 0
    for shape, number in zip(shapes, numbers, strict=True):
        found.append(flat[first : first + number].reshape(shape))
        first += number
    return found


def _product(shape: Sequence[int]) -> int:
    found = 1
    for one in shape:
        found *= one
    return found
