"""AWQ folders: ``quant_method`` "awq" of version "gemm", as AutoAWQ writes them.

Of a layer X with [rows, cols]: ``X.qweight`` I32 [cols, rows / 8] has the integers of eight rows in a word,
``X.qzeros`` I32 [groups, rows / 8] the zero points in the same order, and ``X.scales`` F16 [groups, rows] the scales.
A value is scale * (integer - zero).
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from penstock.checkpoint.quantized.matrix import GroupedIntegers, QuantizedMatrix, group_index, integer_scheme
from penstock.checkpoint.quantized.stored import FLOAT_SCALES, StoredTensors, unpack_words
from penstock.config import ConfigReader, show
from penstock.errors import UnsupportedError

__all__ = ["awq_matrices"]

_BITS: Final = 4
_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The row of a word that its lowest four bits have, the next four, and so on."""


def awq_matrices(section: ConfigReader, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by the names that float checkpoints have; errors as in ``gptq_matrices``."""
    bits = section.int("bits" if section.has("bits") else "w_bit")
    group_len = section.int("group_size" if section.has("group_size") else "q_group_size", min=-1)
    if group_len == 0:
        raise section.error("group_size", "-1 or a positive number", 0)
    for key, expected, actual in (
        ("bits", _BITS, bits),
        ("version", "gemm", section.str("version", "gemm").lower()),
        ("zero_point", True, section.bool("zero_point", True)),
    ):
        if actual != expected:
            raise UnsupportedError(f"{section.file}: {key}: expected {show(expected)}, got {show(actual)}", param=key)
    return {f"{base}.weight": _matrix(group_len, stored, base) for base in stored.bases(".qweight")}


def _matrix(group_len: int, stored: StoredTensors, base: str) -> QuantizedMatrix:
    weight, zeros, scales = (f"{base}.{end}" for end in ("qweight", "qzeros", "scales"))
    cols, num_words = stored.expect(weight, ("i32",), rank=2).shape
    num_groups = -(-cols // group_len) if group_len > 0 else 1
    stored.expect(zeros, ("i32",), [(num_groups, num_words)])
    stored.expect(scales, FLOAT_SCALES, [(num_groups, num_words * 8)])
    scheme = integer_scheme(cols, group_index(cols, group_len), _BITS, has_zero_points=True)
    return QuantizedMatrix(
        (num_words * 8, cols), (weight, zeros, scales), scheme, partial(_read, group_len, stored, base)
    )


def _read(group_len: int, stored: StoredTensors, base: str) -> GroupedIntegers:
    integers = unpack_words(stored.read(f"{base}.qweight"), _BITS, _ORDER).T.astype(np.int16)
    zeros = unpack_words(stored.read(f"{base}.qzeros"), _BITS, _ORDER).T
    group_of = group_index(integers.shape[1], group_len)
    integers -= zeros[:, group_of]
    scales = np.ascontiguousarray(stored.read_scales(f"{base}.scales").T)
    return GroupedIntegers(np.ascontiguousarray(integers), scales, group_of)
