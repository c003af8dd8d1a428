"""NVFP4 folders of ModelOpt, and the same weights of compressed-tensors: 4-bit floats with a scale for 16 values.

Of a layer X with [rows, cols], ModelOpt (``quant_algo`` "NVFP4") has ``X.weight`` U8 [rows, cols / 2], two E2M1 values
a byte, the first in the low half; ``X.weight_scale`` F8_E4M3 [rows, cols / 16]; and ``X.weight_scale_2``, a float of
the tensor.  compressed-tensors ("nvfp4-pack-quantized") calls them ``X.weight_packed``, ``X.weight_scale`` and
``X.weight_global_scale``, which divides.  A value is (scale of the tensor * scale of its 16) * float.

A ModelOpt folder of ``quant_algo`` "MIXED_PRECISION" has layers in 8-bit floats, too.  Scales of activations are not
needed: activations are rounded to 8 bits with scales of their own, whatever the folder rounds them to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np

from penstock.checkpoint.quantized.float8 import ACTIVATION_SCALES, float8_matrix
from penstock.checkpoint.quantized.matrix import BLOCK_LEN, Float4Groups, QuantizedMatrix
from penstock.checkpoint.quantized.stored import FLOAT_SCALES, StoredTensors
from penstock.config import ConfigReader, show
from penstock.errors import UnsupportedError

__all__ = ["modelopt_matrices", "packed_float4_matrix"]

_GROUP_LEN: Final = 16
_SCALE_BITS: Final = 0x7F  # without a sign; all of them are NaN
_LEAST_NORMAL: Final = float(np.finfo(np.float32).tiny)
"""Kernels may take smaller numbers for 0."""
_LARGEST_FACTOR: Final = float(np.finfo(np.float32).max) / (448 * 6)
"""With a larger one, the largest value is infinite."""
_MODELOPT_FORMS: Final = ("NVFP4", "FP8")


def modelopt_matrices(section: ConfigReader, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by the names that float checkpoints have; errors as in ``gptq_matrices``."""
    section.one_of("quant_algo", ("NVFP4", "MIXED_PRECISION"))
    layers = section.object("quantized_layers")
    for name, layer in layers.values.items() if layers is not None else ():
        form = layer.get("quant_algo") if isinstance(layer, Mapping) else None
        if form not in _MODELOPT_FORMS:
            raise UnsupportedError(
                f"{section.file}: quantized_layers: {show(name)}: quant_algo: expected one of "
                f"{', '.join(_MODELOPT_FORMS)}, got {show(form)}",
                param="quant_algo",
            )
    group_len = section.int("group_size", _GROUP_LEN)
    if group_len != _GROUP_LEN:
        raise UnsupportedError(
            f"{section.file}: group_size: expected {_GROUP_LEN}, got {show(group_len)}", param="group_size"
        )
    matrices = {
        f"{base}.weight": _matrix(stored, base, f"{base}.weight", f"{base}.weight_scale_2", is_divisor=False)
        for base in stored.bases(".weight", "u8")
    }
    for base in stored.bases(".weight", "f8_e4m3"):
        matrices[f"{base}.weight"] = float8_matrix(stored, base, None)
    return matrices


def packed_float4_matrix(stored: StoredTensors, base: str) -> QuantizedMatrix:
    """Return the matrix ``base`` of a folder of compressed-tensors."""
    return _matrix(stored, base, f"{base}.weight_packed", f"{base}.weight_global_scale", is_divisor=True)


def _matrix(stored: StoredTensors, base: str, weight: str, tensor_scale: str, *, is_divisor: bool) -> QuantizedMatrix:
    rows, num_bytes = stored.expect(weight, ("u8",), rank=2).shape
    cols, scale = 2 * num_bytes, f"{base}.weight_scale"
    if cols % _GROUP_LEN or not cols:
        raise stored.error(weight, "shape", f"rows of a multiple of {_GROUP_LEN // 2} bytes", [rows, num_bytes])
    stored.expect(scale, ("f8_e4m3",), [(rows, cols // _GROUP_LEN)])
    stored.expect(tensor_scale, FLOAT_SCALES, [(), (1,), (1, 1)])
    ends = (*ACTIVATION_SCALES, "input_global_scale")
    own = [name for end in ends if (name := f"{base}.{end}") in stored]
    scheme = None if cols % BLOCK_LEN else "nvfp4"
    read = partial(_read, stored, weight, scale, tensor_scale, is_divisor)
    return QuantizedMatrix((rows, cols), (weight, scale, tensor_scale, *own), scheme, read)


def _read(stored: StoredTensors, weight: str, scale: str, tensor_scale: str, is_divisor: bool) -> Float4Groups:
    scales = stored.read(scale)
    if scales.size and int(scales.max()) >= _SCALE_BITS:
        raise stored.error(scale, "values", "numbers without a sign", "a negative number or NaN")
    own = np.float32(stored.read_scales(tensor_scale).reshape(())[()])
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.float32(1 / own) if is_divisor else own
    if not np.isfinite(own) or not abs(factor) <= _LARGEST_FACTOR or 0 < abs(factor) < _LEAST_NORMAL:
        least, most = (1 / _LARGEST_FACTOR, 1 / _LEAST_NORMAL) if is_divisor else (_LEAST_NORMAL, _LARGEST_FACTOR)
        zero = "" if is_divisor else "0 or "
        raise stored.error(tensor_scale, "values", f"{zero}a number from {least:.3g} to {most:.3g}", str(own))
    return Float4Groups(stored.read(weight), scales, factor)
