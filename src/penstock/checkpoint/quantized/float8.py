"""FP8 folders: ``quant_method`` "fp8", with a scale for a whole tensor or for each block of 128 x 128 values.

Of a layer X, ``X.weight`` F8_E4M3 [rows, cols] has 8-bit floats (OCP 8-bit Floating Point Specification, E4M3), and
``X.weight_scale_inv`` or ``X.weight_scale`` what they are multiplied by.  The scales of activations, which some folders
have, are not needed: activations are rounded with scales of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.quantized.float8_values import float8_values
from penstock.checkpoint.quantized.matrix import BLOCK_LEN, QuantizedMatrix
from penstock.checkpoint.quantized.stored import FLOAT_SCALES, StoredTensors
from penstock.config import ConfigReader

__all__ = ["ACTIVATION_SCALES", "float8_matrices", "float8_matrix"]

ACTIVATION_SCALES: Final = ("input_scale", "input_zero_point", "activation_scale")
_SCALE_TYPES: Final = (*FLOAT_SCALES, "f8_e8m0")
_NAN: Final = 0x7F


def float8_matrices(section: ConfigReader, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by the names that float checkpoints have; errors as in ``gptq_matrices``."""
    section.one_of("fmt", ("e4m3",), "e4m3")
    section.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = section.int_or_list("weight_block_size", min=1)
    if len(block) not in (0, 2):
        raise section.error("weight_block_size", "null or two numbers", section.values["weight_block_size"])
    return {
        f"{base}.weight": float8_matrix(stored, base, (block[0], block[1]) if block else None)
        for base in stored.bases(".weight", "f8_e4m3")
    }


def float8_matrix(stored: StoredTensors, base: str, block: tuple[int, int] | None) -> QuantizedMatrix:
    """Return the matrix ``base``; ``block`` are the rows and columns that share a scale, None for all."""
    weight = f"{base}.weight"
    scale = next((name for end in ("weight_scale_inv", "weight_scale") if (name := f"{base}.{end}") in stored), None)
    rows, cols = stored.expect(weight, ("f8_e4m3",), rank=2).shape
    scale = scale or f"{base}.weight_scale_inv"
    of_blocks = [(-(-rows // block[0]), -(-cols // block[1]))] if block else []
    stored.expect(scale, _SCALE_TYPES, of_blocks or [(), (1,), (1, 1), (rows, 1), (rows,)])
    own = [name for end in ACTIVATION_SCALES if (name := f"{base}.{end}") in stored]
    return QuantizedMatrix(
        (rows, cols),
        (weight, scale, *own),
        None if cols % BLOCK_LEN or not cols else "q8_0",
        partial(_read, stored, weight, scale, block),
    )


def _read(stored: StoredTensors, weight: str, scale: str, block: tuple[int, int] | None) -> NDArray[np.float32]:
    stored_bytes, scales = stored.read(weight), stored.read_scales(scale)
    if ((stored_bytes & _NAN) == _NAN).any():
        raise stored.error(weight, "values", "numbers", "NaN")
    rows, cols = stored_bytes.shape
    if block is not None:
        scales = np.repeat(scales, block[1], axis=1)[:, :cols]
        scales = np.repeat(scales, block[0], axis=0)[:rows]
    elif scales.size != 1:
        scales = scales.reshape(-1, 1)
    values: NDArray[np.float32] = float8_values()[stored_bytes] * (scales.reshape(()) if scales.size == 1 else scales)
    return values
