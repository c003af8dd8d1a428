"""The codec of tensors: arrays to bytes and back, for every datatype, and bytes that do not fit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.tensors import DTYPES
from penstock.tensors.codec import (
    bfloat16_to_float32,
    bytes_array,
    decode_array,
    decode_elements,
    encode_array,
    encode_elements,
    float32_to_bfloat16,
)


@pytest.mark.parametrize("datatype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 4), (50, 2)])
def test_round_trip(datatype: str, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    if datatype == "BYTES":
        array = bytes_array([b"x" * (n % 5) for n in range(count)], shape)
    else:
        array = (np.arange(count) % 2).astype(DTYPES[datatype]).reshape(shape)
    raw = encode_array(datatype, array)
    decoded = decode_array(datatype, shape, count, raw)
    assert (decoded.shape, decoded.dtype) == (shape, DTYPES[datatype])
    assert decoded.tolist() == array.tolist()
    assert decode_array(datatype, shape, count, memoryview(raw)).tolist() == array.tolist()


def test_layout_of_bytes_and_numbers() -> None:
    assert encode_elements([b"ab", b""]) == b"\x02\0\0\0ab\0\0\0\0"
    assert encode_array("INT16", np.array([[1, 2]], ">i2")) == b"\x01\0\x02\0"
    assert not decode_array("FP32", (1,), 1, bytes(4)).flags.writeable


@pytest.mark.parametrize(
    ("raw", "count", "message"),
    [
        (b"\0" * 7, 2, "2 elements by its shape, but only 7 bytes"),
        (b"\x02\0\0\0a", 1, "ends inside element 0 of 1"),
        (b"\x04\0\0\0abcd\0", 2, "ends inside element 1 of 2"),
        (b"\xff\xff\xff\xff", 1, "ends inside element 0 of 1"),
        (b"\0\0\0\0\0", 1, "1 bytes after its 1 elements"),
        (b"\0", 0, "1 bytes after its 0 elements"),
    ],
)
def test_bytes_that_do_not_fit(raw: bytes, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_elements(raw, count)


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"8 bytes .* 7"):
        decode_array("FP32", (2,), 2, bytes(7))


def test_bfloat16_rounds_to_nearest_even() -> None:
    numbers = np.array([1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    bits = float32_to_bfloat16(numbers)
    assert bits.dtype == np.uint16
    assert bfloat16_to_float32(bits).tolist() == [1.0, -2.5, 1.0, 1 + 2**-6, 1 + 2**-7]
