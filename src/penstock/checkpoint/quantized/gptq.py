"""GPTQ folders: ``quant_method`` "gptq", as AutoGPTQ and GPTQModel write them.

Of a layer X with [rows, cols]: ``X.qweight`` I32 [cols * bits / 32, rows] has integers of several columns in a word,
``X.qzeros`` I32 [groups, rows * bits / 32] the zero points, ``X.scales`` F16 [groups, rows] the scales, and ``X.g_idx``
I32 [cols] the group of each column.  A value is scale * (integer - zero).  With the checkpoint_format "gptq" the
stored zero points are less by 1; with "gptq_v2" they are as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.quantized.matrix import GroupedIntegers, QuantizedMatrix, group_index, integer_scheme
from penstock.checkpoint.quantized.stored import FLOAT_SCALES, StoredTensors, unpack_words
from penstock.config import ConfigReader, show
from penstock.errors import UnsupportedError

__all__ = ["gptq_matrices"]

_FORMATS: Final = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class _Format:
    bits: int
    group_len: int
    is_symmetric: bool
    checkpoint_format: str

    @property
    def group_of_word(self) -> int:
        """The number of integers in a word."""
        return 32 // self.bits


def _refusal(section: ConfigReader, key: str, expected: str, actual: object) -> UnsupportedError:
    return UnsupportedError(f"{section.file}: {key}: expected {expected}, got {show(actual)}", param=key)


def _read_format(section: ConfigReader) -> _Format:
    bits = section.int("bits")
    if bits not in (4, 8):
        raise _refusal(section, "bits", "4 or 8", bits)
    group_len = section.int("group_size", min=-1)
    if group_len == 0:
        raise section.error("group_size", "-1 or a positive number", 0)
    if section.bool("is_marlin_format", False):
        raise _refusal(section, "is_marlin_format", "false", True)
    if (pack_dtype := section.str("pack_dtype", "int32")) not in ("int32", "torch.int32"):
        raise _refusal(section, "pack_dtype", "int32", pack_dtype)
    rules = section.object("dynamic")
    for rule in rules.values if rules is not None else ():
        if not rule.startswith("-:"):
            raise _refusal(section, "dynamic", "only rules that begin with -:", rule)
    return _Format(bits, group_len, section.bool("sym", True), section.one_of("checkpoint_format", _FORMATS, "gptq"))


def gptq_matrices(section: ConfigReader, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by the names that float checkpoints have.

    Raises UnsupportedError, which names the key, for a setting of ``section`` that Penstock does not read, and
    InvalidFileError, which names the tensor, for one that is missing or has another type or shape.
    """
    form = _read_format(section)
    return {f"{base}.weight": _matrix(form, stored, base) for base in stored.bases(".qweight")}


def _matrix(form: _Format, stored: StoredTensors, base: str) -> QuantizedMatrix:
    weight, zeros, scales, index = (f"{base}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx"))
    packed_cols, rows = stored.expect(weight, ("i32",), rank=2).shape
    cols = packed_cols * form.group_of_word
    num_groups = -(-cols // form.group_len) if form.group_len > 0 else 1
    if rows % form.group_of_word:
        raise stored.error(weight, "shape", f"rows in multiples of {form.group_of_word}", [packed_cols, rows])
    stored.expect(zeros, ("i32",), [(num_groups, rows // form.group_of_word)])
    stored.expect(scales, FLOAT_SCALES, [(num_groups, rows)])
    tensors = [weight, zeros, scales]
    group_of = group_index(cols, form.group_len)
    if index in stored:
        stored.expect(index, ("i32",), [(cols,)])
        tensors.append(index)
        group_of = stored.read(index).astype(np.int64)
        if cols and group_of.max() >= num_groups:  # a negative index is a large number here
            raise stored.error(index, "values", f"groups from 0 to {num_groups - 1}", int(group_of.max()))
    scheme = integer_scheme(cols, group_of, form.bits, has_zero_points=not form.is_symmetric)
    return QuantizedMatrix((rows, cols), tuple(tensors), scheme, partial(_read, form, stored, base, group_of))


def _read(form: _Format, stored: StoredTensors, base: str, group_of: NDArray[np.int64]) -> GroupedIntegers:
    words = stored.read(f"{base}.qweight")
    zeros = _zeros(form, stored, f"{base}.qzeros").T
    integers = unpack_words(np.ascontiguousarray(words.T), form.bits).astype(np.int16)
    integers -= zeros[:, :1] if form.is_symmetric else zeros[:, group_of]
    return GroupedIntegers(integers, np.ascontiguousarray(stored.read_scales(f"{base}.scales").T), group_of)


def _zeros(form: _Format, stored: StoredTensors, name: str) -> NDArray[np.int16]:
    """Return the zero points [groups, rows].

    Writers disagree about the name of the format, so symmetric zero points tell by their value which one it is.  A
    zero point of 0 does not fit the format "gptq", and writers disagree about its bits: it is refused.
    """
    zeros = unpack_words(stored.read(name), form.bits).astype(np.int16)
    middle, largest = 1 << (form.bits - 1), (1 << form.bits) - 1
    if form.is_symmetric:
        if zeros.size and (zeros[0, 0] not in (middle - 1, middle) or (zeros != zeros[0, 0]).any()):
            expected = f"{middle - 1} or {middle} in each place, because sym is true"
            raise stored.error(name, "values", expected, sorted({int(value) for value in np.unique(zeros)[:8]}))
        return np.full_like(zeros, middle)
    if form.checkpoint_format == "gptq_v2":
        return zeros
    if (zeros == largest).any():
        raise stored.error(name, "values", f"at most {largest - 1} in a checkpoint_format of gptq", largest)
    return zeros + np.int16(1)
