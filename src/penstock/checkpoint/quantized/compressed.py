"""compressed-tensors folders, as llm-compressor writes them: packed integers, 8-bit integers and 8-bit floats.

Of a layer X with [rows, cols], "pack-quantized": ``X.weight_packed`` I32 [rows, cols * bits / 32], whose integers have
half of their range added, ``X.weight_scale`` [rows, groups], ``X.weight_shape`` [2], and for asymmetric ones
``X.weight_zero_point`` I32 [rows * bits / 32, groups], packed along rows.  "int-quantized": ``X.weight`` I8 [rows,
cols] with ``X.weight_scale`` and an I8 ``X.weight_zero_point``.  "float-quantized": ``X.weight`` F8_E4M3.
"nvfp4-pack-quantized": ``X.weight_packed`` U8.  A value is scale * (integer - zero).  The types and shapes of the
tensors, not ``config_groups``, tell the form of a layer.  Symmetric 8-bit integers with one scale for a row stay as
they are: ``w8a8`` if ``config_groups`` says that inputs are rounded per token, ``w8a16`` if they are not rounded.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.quantized.float4 import packed_float4_matrix
from penstock.checkpoint.quantized.float8 import ACTIVATION_SCALES, float8_matrix
from penstock.checkpoint.quantized.matrix import GroupedIntegers, QuantizedMatrix, group_index, integer_scheme
from penstock.checkpoint.quantized.stored import FLOAT_SCALES, StoredTensors, unpack_words
from penstock.config import ConfigReader, show
from penstock.errors import UnsupportedError

__all__ = ["compressed_matrices"]

_FORMATS: Final = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    "mixed-precision",
)
_STRATEGIES: Final = ("tensor", "channel", "group", "block")
_FLOAT4_STRATEGY: Final = "tensor_group"
"""4-bit floats have scales of groups, and one of the tensor."""
_MAX_ROWS: Final = 1 << 31
_LOG: Final = logging.getLogger("penstock.checkpoint")


def _refusal(section: ConfigReader, key: str, expected: str, actual: object) -> UnsupportedError:
    return UnsupportedError(f"{section.file}: {key}: expected {expected}, got {show(actual)}", param=key)


def compressed_matrices(section: ConfigReader, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by the names that float checkpoints have; errors as in ``gptq_matrices``."""
    section.one_of("format", _FORMATS)
    section.one_of("quantization_status", ("compressed",), "compressed")
    if section.values.get("transform_config"):
        raise _refusal(section, "transform_config", "null", section.values["transform_config"])
    if section.values.get("kv_cache_scheme"):
        _LOG.warning(
            "penstock: %s: kv_cache_scheme is not used: --kv-cache chooses the type of the cache", section.file
        )
    sparsity = section.object("sparsity_config")
    if sparsity is not None and sparsity.values:
        sparsity.one_of("format", ("dense",))
    groups = _read_groups(section)
    matrices = {f"{base}.weight": _packed(stored, base, groups) for base in stored.bases(".weight_packed", "i32")}
    for base in stored.bases(".weight_packed", "u8"):
        matrices[f"{base}.weight"] = packed_float4_matrix(stored, base)
    for base in stored.bases(".weight", "i8"):
        matrices[f"{base}.weight"] = _integers(stored, base, groups)
    for base in stored.bases(".weight", "f8_e4m3"):
        matrices[f"{base}.weight"] = float8_matrix(stored, base, groups.blocks)
    return matrices


class _Groups(NamedTuple):
    """The settings of all groups: the numbers of bits, the blocks of 8-bit floats if they have scales by block, and the
    scheme of 8-bit integers with a scale for each row, None if groups differ in it."""

    bits: set[int]
    blocks: tuple[int, int] | None
    row_scheme: str | None


def _read_groups(section: ConfigReader) -> _Groups:
    groups = section.object("config_groups")
    bits: set[int] = set()
    row_schemes: set[str | None] = set()
    blocks: set[tuple[int, int] | None] = set()
    for name in groups.values if groups is not None else ():
        group = groups.object(name) if groups is not None else None
        weights = group.object("weights") if group is not None else None
        if group is None or weights is None:
            raise section.error("config_groups", f"weights in {show(name)}", None)
        group.one_of("format", _FORMATS, "pack-quantized")
        number = weights.int("num_bits")
        if number not in (4, 8):
            raise _refusal(weights, "num_bits", "4 or 8", number)
        is_float = weights.one_of("type", ("int", "float"), "int") == "float"
        is_float4 = is_float and number == 4
        strategy = weights.one_of("strategy", (_FLOAT4_STRATEGY,) if is_float4 else _STRATEGIES)
        if group.object("output_activations") is not None:
            raise _refusal(group, "output_activations", "null", group.values["output_activations"])
        bits.add(number)
        if not is_float and number == 8:
            row_schemes.add(_row_scheme(group))
        if strategy == "block":
            block = weights.int_or_list("block_structure", min=1)
            if not is_float or len(block) != 2:
                raise _refusal(weights, "block_structure", "a block size [rows, columns] for fp8", list(block))
            blocks.add((block[0], block[1]))
        elif is_float and not is_float4:
            blocks.add(None)
    if not bits or len(blocks) > 1:  # 4-bit floats have no blocks
        raise section.error("config_groups", "groups with one block_structure", section.values.get("config_groups"))
    row_scheme = row_schemes.pop() if len(row_schemes) == 1 else None
    return _Groups(bits, blocks.pop() if blocks else None, row_scheme)


def _row_scheme(group: ConfigReader) -> str | None:
    """Return the scheme of 8-bit integers with a scale for each row, as the activations tell; None if it has none.

    Raises UnsupportedError for 8-bit activations whose scales are not those of their tokens, or that have a zero point.
    """
    inputs = group.object("input_activations")
    if inputs is None:
        return "w8a16"
    if inputs.one_of("type", ("int", "float"), "int") != "int" or inputs.int("num_bits") != 8:
        return None
    dynamic = inputs.values.get("dynamic", False)
    if dynamic is not True:
        raise _refusal(inputs, "dynamic", "true for activations, whose scale is computed for each token", dynamic)
    if not inputs.bool("symmetric", True):
        raise _refusal(inputs, "symmetric", "true for activations, which are rounded without a zero point", False)
    strategy = inputs.values.get("strategy")
    if strategy != "token":
        raise _refusal(inputs, "strategy", "token for activations", strategy)
    return "w8a8"


def _scale_groups(stored: StoredTensors, base: str, rows: int, cols: int) -> int:
    """Return the number of groups of a row after checking the scales."""
    name = f"{base}.weight_scale"
    shape = stored.expect(name, FLOAT_SCALES).shape
    groups = shape[1] if len(shape) == 2 and shape[0] == rows else 1
    if shape not in ((), (1,), (1, 1), (rows,), (rows, groups)) or not groups or cols % groups:
        raise stored.error(name, "shape", f"[{rows}, 1], or [{rows}, groups] of equal length", list(shape))
    return groups


def _companions(stored: StoredTensors, base: str) -> list[str]:
    return [name for end in ("weight_g_idx", *ACTIVATION_SCALES) if (name := f"{base}.{end}") in stored]


def _group_of(stored: StoredTensors, base: str, cols: int, groups: int) -> NDArray[np.int64]:
    name = f"{base}.weight_g_idx"
    if name in stored:
        stored.expect(name, ("i32", "i64"), [(cols,)])
        index = stored.read(name).astype(np.int64)
        if cols and ((index == -1) | (index == 0xFFFFFFFF)).all():  # a writer without act-order
            return group_index(cols, cols // groups)
        if cols and not 0 <= index.min() <= index.max() < groups:
            raise stored.error(name, "values", f"groups from 0 to {groups - 1}", int(index.max()))
        return index
    return group_index(cols, max(cols // groups, 1))


def _packed(stored: StoredTensors, base: str, of_groups: _Groups) -> QuantizedMatrix:
    weight, zero, shape = (f"{base}.{end}" for end in ("weight_packed", "weight_zero_point", "weight_shape"))
    found_rows, num_words = stored.expect(weight, ("i32",), rank=2).shape
    stored.expect(shape, ("i64", "i32"), [(2,)])
    rows, cols = (int(size) for size in stored.read(shape))
    fitting = [bits for bits in sorted(of_groups.bits) if -(-cols * bits // 32) == num_words]
    if rows != found_rows or not 0 < cols < _MAX_ROWS or not fitting:
        raise stored.error(shape, "values", f"those of words [{found_rows}, {num_words}]", [rows, cols])
    bits, groups = fitting[0], _scale_groups(stored, base, rows, cols)
    tensors = [weight, f"{base}.weight_scale", shape, *_companions(stored, base)]
    if zero in stored:
        stored.expect(zero, ("i32",), [(-(-rows * bits // 32), groups)])
        tensors.append(zero)
    group_of = _group_of(stored, base, cols, groups)
    has_rows = bits == 8 and groups == 1 and zero not in stored
    scheme = of_groups.row_scheme if has_rows else None
    scheme = scheme or integer_scheme(cols, group_of, bits, has_zero_points=zero in stored)
    return QuantizedMatrix((rows, cols), tuple(tensors), scheme, partial(_read_packed, stored, base, bits, group_of))


def _read_packed(stored: StoredTensors, base: str, bits: int, group_of: NDArray[np.int64]) -> GroupedIntegers:
    zero, cols = f"{base}.weight_zero_point", len(group_of)
    integers = unpack_words(stored.read(f"{base}.weight_packed"), bits)[:, :cols].astype(np.int16)
    if zero in stored:
        zeros = unpack_words(np.ascontiguousarray(stored.read(zero).T), bits).T[: len(integers)]
        integers -= zeros[:, group_of]
    else:
        integers -= np.int16(1 << (bits - 1))
    return GroupedIntegers(integers, _scales(stored, base, len(integers)), group_of)


def _integers(stored: StoredTensors, base: str, of_groups: _Groups) -> QuantizedMatrix:
    weight, zero = f"{base}.weight", f"{base}.weight_zero_point"
    rows, cols = stored.expect(weight, ("i8",), rank=2).shape
    groups = _scale_groups(stored, base, rows, cols)
    tensors = [weight, f"{base}.weight_scale", *_companions(stored, base)]
    if zero in stored:
        stored.expect(zero, ("i8",), [stored.expect(f"{base}.weight_scale", FLOAT_SCALES).shape])
        tensors.append(zero)
    group_of = _group_of(stored, base, cols, groups)
    scheme = of_groups.row_scheme if groups == 1 and zero not in stored else None
    scheme = scheme or integer_scheme(cols, group_of, 8, has_zero_points=zero in stored)
    return QuantizedMatrix((rows, cols), tuple(tensors), scheme, partial(_read_integers, stored, base, group_of))


def _read_integers(stored: StoredTensors, base: str, group_of: NDArray[np.int64]) -> GroupedIntegers:
    zero, integers = f"{base}.weight_zero_point", stored.read(f"{base}.weight").astype(np.int16)
    if zero in stored:
        zeros = stored.read(zero).astype(np.int16)
        integers -= zeros.reshape(-1, 1) if zeros.ndim < 2 or zeros.shape[1] == 1 else zeros[:, group_of]
    return GroupedIntegers(integers, _scales(stored, base, len(integers)), group_of)


def _scales(stored: StoredTensors, base: str, rows: int) -> NDArray[np.float32]:
    """Return the scales [rows, groups]."""
    scales = stored.read_scales(f"{base}.weight_scale")
    scales = scales if scales.ndim == 2 else scales.reshape(-1, 1)
    return np.broadcast_to(scales, (rows, scales.shape[1]))
