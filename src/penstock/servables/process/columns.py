"""Rows of values as the bytes of a column, in both directions between the primary and a servable worker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.tensors.codec import bytes_array, decode_elements, encode_elements

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.servables.api.specs import Spec
    from penstock.servables.process import worker_messages_pb2 as pb

__all__ = ["encode_arrays", "encode_rows", "pad_rows", "read_column", "texts_of"]


def encode_arrays(spec: Spec, arrays: Sequence[NDArray[Any]]) -> bytes:
    """Encode the rows of several arrays, which are C-contiguous and have the dtype of ``spec``."""
    if spec.is_bytes:
        return b"".join([encode_elements(array.ravel()) for array in arrays])
    return arrays[0].tobytes() if len(arrays) == 1 else b"".join(cast("Sequence[memoryview]", arrays))


def encode_rows(rows: Sequence[Any], spec: Spec) -> bytes:
    """Encode rows that are arrays of any rank or single values; texts are ``str``."""
    if not spec.is_bytes:
        return b"".join([row.tobytes() for row in rows])
    elements: list[Any] = []
    for row in rows:
        if isinstance(row, np.ndarray):
            elements += row.reshape(-1).tolist()
        else:
            elements.append(row)
    if spec.datatype == "TEXT":
        elements = [element.encode("utf-8", "replace") for element in elements]
    return encode_elements(elements)


def read_column(spec: Spec, column: pb.Column, counts: Sequence[int]) -> list[NDArray[Any]]:
    """Return an array [count, ...] for each part.  Arrays of numbers share the memory of the column.

    Raises ValueError if the column does not fit ``spec`` and ``counts``.
    """
    total = sum(counts)
    data = column.data
    if spec.is_fixed:
        flat = _decode_flat(spec, data, total * _product(spec.shape))
        whole = flat.reshape(total, *spec.shape)
        if len(counts) == 1:
            return [whole]
        ends = [0]
        for count in counts:
            ends.append(ends[-1] + count)
        return [whole[first:end] for first, end in pairwise(ends)]
    return _read_varied_parts(spec, data, counts, column.sizes)


def _decode_flat(spec: Spec, data: bytes, count: int) -> NDArray[Any]:
    """Return the elements of a column as a flat array; raise ValueError for BYTES that are not ``count`` elements."""
    if spec.is_bytes:
        return bytes_array(decode_elements(data, count), (count,))
    return np.frombuffer(data, spec.dtype)


def _read_varied_parts(spec: Spec, data: bytes, counts: Sequence[int], sizes: Sequence[int]) -> list[NDArray[Any]]:
    """Read parts whose rows differ in shape from part to part; ``sizes`` has the shape of a row for each part."""
    rank = len(spec.shape)
    if len(sizes) != rank * len(counts):
        raise ValueError("a column without the sizes of its parts")
    shapes = [(count, *sizes[rank * n : rank * n + rank]) for n, count in enumerate(counts)]
    if not all(spec.fits(shape[1:]) for shape in shapes):
        raise ValueError(f"a column whose rows are not {spec}")
    numbers = [_product(shape) for shape in shapes]
    flat = _decode_flat(spec, data, sum(numbers))
    if len(flat) != sum(numbers):
        raise ValueError("a column whose length differs from that of its parts")
    arrays, first = [], 0
    for shape, number in zip(shapes, numbers, strict=True):
        arrays.append(flat[first : first + number].reshape(shape))
        first += number
    return arrays


def pad_rows(parts: Sequence[NDArray[Any]], num_padding: int) -> NDArray[Any]:
    """Concatenate parts, and repeat the last row ``num_padding`` times."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if num_padding > 0:
        whole = np.concatenate([whole, np.repeat(whole[-1:], num_padding, 0)])
    return whole


def texts_of(array: NDArray[Any]) -> NDArray[Any]:
    """Decode an array of UTF-8 ``bytes`` to one of ``str``; raise UnicodeDecodeError."""
    texts = np.empty(array.shape, object)
    flat = texts.reshape(-1)
    for index, element in enumerate(array.reshape(-1)):
        flat[index] = element.decode()
    return texts


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
