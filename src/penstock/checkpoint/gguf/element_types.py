"""The element types of GGUF, and their exact values as float32.

A value is computed in float32 in the order that the format's reference does: the scale of a group first (a product of
scales where there are two), then its product with the integer, then the minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.ops.table import BLOCK_SCHEMES

__all__ = ["ELEMENT_TYPES", "ElementType", "dequantize", "q6_k_values"]

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

_PIECE_VALUES: Final = 1 << 20
_Q6_K: Final = 14
_IQ4_VALUES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
_FP4_VALUES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


@dataclass(frozen=True)
class ElementType:
    """An element type: ``block_len`` values are stored in ``block_bytes`` bytes.

    ``dtype`` is "f32", "f16" or "bf16" for floats and "" for quantized values.  ``values`` turns blocks
    [N, block_bytes] into float32 [N, block_len]; None for a type that Penstock does not read, for which ``instead``
    names the type of file that llama-quantize should make.  ``repacked`` turns blocks [N, block_bytes] into those that
    the core packs, [N, bytes]; None where they are the same.
    """

    name: str
    block_len: int = 1
    block_bytes: int = 1
    dtype: str = ""
    values: Callable[[Bytes], Floats] | None = None
    instead: str = "Q8_0"
    repacked: Callable[[Bytes], Bytes] | None = None

    @property
    def scheme(self) -> str | None:
        """The scheme whose linears compute with the blocks as they are; None if none does."""
        name = self.name.lower()
        return name if name in BLOCK_SCHEMES else None

    @property
    def is_supported(self) -> bool:
        """True if Penstock can read values of this type."""
        return bool(self.dtype) or self.values is not None


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the 16-bit float at byte ``at`` of each block, [N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(data: Bytes) -> NDArray[np.uint8]:
    """Return the low halves of all bytes, then the high halves, along the last axis."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> NDArray[np.uint8]:
    """Return the 32 bits at byte ``at`` as the fifth bits of 32 values, [N, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    integers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (integers.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    integers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * integers.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _pairs_of_bits(data: Bytes) -> NDArray[np.uint8]:
    """Return 2-bit values of bytes [N, 64]: of each 32 bytes the lowest pairs, then the next; [N, 16 groups, 16]."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return ((data.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)).reshape(-1, 16, 16)


def _q2_k(blocks: Bytes) -> Floats:
    scales, integers = blocks[:, :16], _pairs_of_bits(blocks[:, 16:80])
    scale = _half(blocks, 80) * (scales & 15).astype(np.float32)
    minimum = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    return (scale[:, :, None] * integers.astype(np.float32) - minimum[:, :, None]).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    high, packed = blocks[:, :32], blocks[:, 96:108]
    low_bits = _nibbles(packed[:, :8])
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    high_bits = ((packed[:, None, 8:] >> shifts) & 3).reshape(-1, 16)
    scales = (low_bits | (high_bits << 4)).astype(np.float32) - 32
    third = ((high[:, None, :] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1).reshape(-1, 16, 16)
    integers = _pairs_of_bits(blocks[:, 32:96]).astype(np.float32) - np.where(third == 0, 4, 0).astype(np.float32)
    scale = _half(blocks, 108) * scales
    return (scale[:, :, None] * integers).reshape(-1, 256)


def _sub_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Return the eight 6-bit scales and minimums of a Q4_K or Q5_K block from their 12 bytes, each [N, 8]."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 2) & 48)], axis=1)
    minimums = np.concatenate([second & 63, (rest >> 4) | ((second >> 2) & 48)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _scaled_with_minimums(blocks: Bytes, integers: NDArray[np.uint8]) -> Floats:
    """Return the values of Q4_K and Q5_K: integers [N, 8, 32] with the block's scales and minimums."""
    scales, minimums = _sub_scales(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    return (scale[:, :, None] * integers.astype(np.float32) - minimum[:, :, None]).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled_with_minimums(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & np.uint8(1)
    return _scaled_with_minimums(blocks, low | (high << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    integers = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scale = _half(blocks, 208) * scales
    return (scale[:, :, None] * integers).reshape(-1, 256)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _IQ4_VALUES[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16).reshape(1, 8)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = (low | ((high & 3) << 4).astype(np.uint8)).astype(np.float32) - 32
    scale = _half(blocks, 0) * scales
    return (scale[:, :, None] * _IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]).reshape(-1, 256)


def _mxfp4(blocks: Bytes) -> Floats:
    # The table has twice the values of E2M1, so the exponent has one less than its bias of 127.
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return scale * _FP4_VALUES[_nibbles(blocks[:, 1:])]


def _ternary(data: Bytes, digits: int) -> NDArray[np.uint8]:
    """Return the ``digits`` values 0 to 2 of each of the bytes [N, M]: the first of all bytes, then the second."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:digits, None]
    values = (data[:, None, :] * powers).astype(np.uint16) * 3 >> 8
    return values.astype(np.uint8).reshape(len(data), -1)


def _tq1_0(blocks: Bytes) -> Floats:
    parts = [_ternary(blocks[:, :32], 5), _ternary(blocks[:, 32:48], 5), _ternary(blocks[:, 48:52], 4)]
    return _half(blocks, 52) * (np.concatenate(parts, axis=1).astype(np.float32) - 1)


def _tq2_0(blocks: Bytes) -> Floats:
    return _half(blocks, 64) * (_pairs_of_bits(blocks[:, :64]).reshape(-1, 256).astype(np.float32) - 1)


def _scale_first(blocks: Bytes) -> Bytes:
    """Return blocks that end with a 16-bit float with the same as float32 before the rest."""
    return np.concatenate([_half(blocks, blocks.shape[1] - 2).astype("<f4").view(np.uint8), blocks[:, :-2]], axis=1)


def _q2_0(blocks: Bytes) -> Floats:
    integers = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    return _half(blocks, 0) * (integers.reshape(-1, 64).astype(np.float32) - 1)


def _q1_0(blocks: Bytes) -> Floats:
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return _half(blocks, 0) * (2 * bits.astype(np.float32) - 1)


ELEMENT_TYPES: Final = {
    0: ElementType("F32", 1, 4, "f32"),
    1: ElementType("F16", 1, 2, "f16"),
    2: ElementType("Q4_0", 32, 18, values=_q4_0),
    3: ElementType("Q4_1", 32, 20, values=_q4_1),
    6: ElementType("Q5_0", 32, 22, values=_q5_0),
    7: ElementType("Q5_1", 32, 24, values=_q5_1),
    8: ElementType("Q8_0", 32, 34, values=_q8_0),
    9: ElementType("Q8_1"),
    10: ElementType("Q2_K", 256, 84, values=_q2_k),
    11: ElementType("Q3_K", 256, 110, values=_q3_k),
    12: ElementType("Q4_K", 256, 144, values=_q4_k),
    13: ElementType("Q5_K", 256, 176, values=_q5_k),
    14: ElementType("Q6_K", 256, 210, values=_q6_k),
    15: ElementType("Q8_K"),
    16: ElementType("IQ2_XXS", instead="Q2_K"),
    17: ElementType("IQ2_XS", instead="Q2_K"),
    18: ElementType("IQ3_XXS", instead="Q3_K_M"),
    19: ElementType("IQ1_S", instead="Q2_K"),
    20: ElementType("IQ4_NL", 32, 18, values=_iq4_nl),
    21: ElementType("IQ3_S", instead="Q3_K_M"),
    22: ElementType("IQ2_S", instead="Q2_K"),
    23: ElementType("IQ4_XS", 256, 136, values=_iq4_xs),
    24: ElementType("I8"),
    25: ElementType("I16"),
    26: ElementType("I32"),
    27: ElementType("I64"),
    28: ElementType("F64"),
    29: ElementType("IQ1_M", instead="Q2_K"),
    30: ElementType("BF16", 1, 2, "bf16"),
    31: ElementType("Q4_0_4_4", instead="Q4_0"),
    32: ElementType("Q4_0_4_8", instead="Q4_0"),
    33: ElementType("Q4_0_8_8", instead="Q4_0"),
    34: ElementType("TQ1_0", 256, 54, values=_tq1_0, repacked=_scale_first),
    35: ElementType("TQ2_0", 256, 66, values=_tq2_0, repacked=_scale_first),
    36: ElementType("IQ4_NL_4_4", instead="IQ4_NL"),
    37: ElementType("IQ4_NL_4_8", instead="IQ4_NL"),
    38: ElementType("IQ4_NL_8_8", instead="IQ4_NL"),
    39: ElementType("MXFP4", 32, 17, values=_mxfp4),
    40: ElementType("NVFP4", instead="Q4_K_M"),
    41: ElementType("Q1_0", 128, 18, values=_q1_0),
    42: ElementType("Q2_0", 64, 18, values=_q2_0),
}
"""The element types by their number in the file."""


def dequantize(kind: ElementType, data: Bytes) -> Floats:
    """Return the values of ``data``, whole blocks of a quantized type, as float32 [number of values].

    Raises ValueError for a type without values.
    """
    if kind.values is None:
        raise ValueError(f"{kind.name} has no float values")
    blocks = data.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_len), np.float32)
    step = _PIECE_VALUES // kind.block_len
    with np.errstate(all="ignore"):  # a damaged scale may be infinite; the packer refuses the values
        for begin in range(0, len(blocks), step):
            out[begin : begin + step] = kind.values(blocks[begin : begin + step])
    return out.reshape(-1)


def q6_k_values(rows: Bytes) -> Floats:
    """Return the values of rows of blocks of Q6_K, uint8 [rows, bytes of a row], as float32 [rows, columns]."""
    return dequantize(ELEMENT_TYPES[_Q6_K], rows).reshape(len(rows), -1)
