"""BitNet folders: ``quant_method`` "bitnet", ternary weights with one scale for a matrix, as transformers writes them.

Of a layer X with [rows, cols], ``X.weight`` U8 [rows / 4, cols] has four values less -1 a byte, those of rows that are
rows / 4 apart, the first in the lowest bits.  ``X.weight_scale`` [1] multiplies them if ``linear_class`` is
"autobitlinear", and divides them if it is "bitlinear".  With ``quantization_mode`` "online" the folder has floats,
which transformers rounds in every step: to the nearest of -1, 0 and 1 times the mean magnitude of the matrix.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from penstock.checkpoint.float_types import to_float32
from penstock.checkpoint.quantized.matrix import TERNARY_BLOCK_LEN, QuantizedMatrix, TernaryIntegers
from penstock.checkpoint.quantized.stored import FLOAT_SCALES, StoredTensors
from penstock.config import ConfigReader, show
from penstock.errors import UnsupportedError

__all__ = ["bitnet_matrices"]

_VALUES_PER_BYTE: Final = 4
_LEAST_MEAN: Final = np.float32(1e-5)
_FLOAT_PARTS: Final = ("embed", "lm_head", "norm")
"""Parts of the names of matrices that are never ternary."""


def bitnet_matrices(section: ConfigReader, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by the names that float checkpoints have; errors as in ``gptq_matrices``."""
    linear_class = section.one_of("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    mode = section.one_of("quantization_mode", ("offline", "online"), "offline")
    if section.bool("use_rms_norm", False):
        raise UnsupportedError(f"{section.file}: use_rms_norm: expected false, got {show(True)}", param="use_rms_norm")
    if mode == "online" and linear_class == "autobitlinear":
        excluded = (*_FLOAT_PARTS, *(section.text_list("modules_to_not_convert") or ()))
        return {
            f"{base}.weight": _online(stored, base)
            for base in stored.bases(".weight")
            if len(stored.expect(f"{base}.weight", FLOAT_SCALES).shape) == 2
            and not any(part in base for part in excluded)
        }
    is_divisor = linear_class == "bitlinear"
    return {f"{base}.weight": _packed(stored, base, is_divisor) for base in stored.bases(".weight", "u8")}


def _scheme(cols: int) -> str | None:
    return None if cols % TERNARY_BLOCK_LEN or not cols else "tq2_0"


def _packed(stored: StoredTensors, base: str, is_divisor: bool) -> QuantizedMatrix:
    weight, scale = f"{base}.weight", f"{base}.weight_scale"
    quarter, cols = stored.expect(weight, ("u8",), rank=2).shape
    stored.expect(scale, FLOAT_SCALES, [(), (1,)])
    read = partial(_read_packed, stored, weight, scale, is_divisor)
    return QuantizedMatrix((_VALUES_PER_BYTE * quarter, cols), (weight, scale), _scheme(cols), read)


def _read_packed(stored: StoredTensors, weight: str, scale: str, is_divisor: bool) -> TernaryIntegers:
    packed, factor = stored.read(weight), stored.read_scales(scale).reshape(())
    if not np.isfinite(factor) or (is_divisor and factor == 0):
        raise stored.error(scale, "values", "a finite number", str(factor))
    codes = (packed[None] >> np.array([0, 2, 4, 6], np.uint8)[:, None, None]) & np.uint8(3)
    return TernaryIntegers(codes.reshape(-1, packed.shape[1]), np.float32(1 / factor if is_divisor else factor))


def _online(stored: StoredTensors, base: str) -> QuantizedMatrix:
    weight = f"{base}.weight"
    rows, cols = stored.expect(weight, FLOAT_SCALES, rank=2).shape
    return QuantizedMatrix((rows, cols), (weight,), _scheme(cols), partial(_read_online, stored, weight))


def _read_online(stored: StoredTensors, weight: str) -> TernaryIntegers:
    values = to_float32(stored.read(weight), stored.file(weight).tensors[weight].dtype)
    mean = np.maximum(np.abs(values).mean(dtype=np.float64).astype(np.float32), _LEAST_MEAN)
    scale = np.float32(1) / mean
    if not np.isfinite(scale):
        raise stored.error(weight, "values", "finite numbers", str(mean))
    codes = np.clip(np.rint(values * scale), -1, 1).astype(np.int8) + np.int8(1)
    return TernaryIntegers(codes.view(np.uint8), np.float32(1) / scale)
