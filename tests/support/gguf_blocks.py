"""Blocks of GGUF for tests: random ones, plain quantizers of the K types, and the demo model as a file of any types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from penstock.checkpoint.gguf.element_types import ELEMENT_TYPES, dequantize
from penstock.core.layouts import BLOCKS
from penstock.quant.scheme import find_scheme

__all__ = [
    "DEMO_FOLDER", "FLOAT_SCALES", "SCALES_AT", "TYPES", "UNWRITABLE", "random_blocks", "values_of", "write_demo",
]  # fmt: skip

DEMO_FOLDER = Path(__file__).parents[2] / "demo/model"
TYPES = {kind.name.lower(): number for number, kind in ELEMENT_TYPES.items() if kind.is_supported}
UNWRITABLE = frozenset(TYPES) - {kind.name.lower() for kind in gguf.GGMLQuantizationType}
"""Types that the gguf package does not know, so that it writes no file with them."""
SCALES_AT = {
    "q8_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "uint4": (0,), "q4_1": (0, 2),
    "q5_0": (0,), "q5_1": (0, 2), "iq4_nl": (0,), "iq4_xs": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q2_0": (0,), "q1_0": (0,),
}  # fmt: skip
FLOAT_SCALES = ("nvfp4", "tq2_0", "tq1_0")
"""The schemes whose blocks begin with a float32."""


def random_blocks(scheme: str, rows: int, cols: int, seed: int = 1) -> np.ndarray:
    """Return random blocks whose scales are small numbers, uint8 [rows, bytes of a row]."""
    rng, layout = np.random.default_rng(seed), BLOCKS[find_scheme(scheme).layout]
    blocks = rng.integers(0, 256, (rows * cols // layout.block_len, layout.block_bytes), dtype=np.uint8)
    if scheme == "mxfp4":
        blocks[:, 0] = rng.integers(118, 126, len(blocks))
    if scheme in FLOAT_SCALES:
        blocks[:, :4] = rng.normal(0, 0.01, (len(blocks), 1)).astype("<f4").view(np.uint8)
    if scheme == "nvfp4":  # one factor of a row
        blocks[:, :4] = blocks[:: cols // 32, :4].repeat(cols // 32, axis=0)
        blocks[:, 4:6] %= 0x7F
    if scheme == "uint4":
        blocks[:, 2] = rng.integers(0, 17, len(blocks))
    for at in SCALES_AT.get(scheme, ()):
        blocks[:, at : at + 2] = rng.normal(0, 0.01, (len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(scheme: str, blocks: np.ndarray) -> np.ndarray:
    """Return the values of blocks [rows, bytes of a row] of a scheme, float32 [rows, cols]."""
    if scheme == "nvfp4":
        return _nvfp4_values(blocks)
    if scheme in FLOAT_SCALES:  # as of the file with a scale of one, times the scale
        own = blocks.reshape(-1, BLOCKS[find_scheme(scheme).layout].block_bytes)
        stored = np.concatenate([own[:, 4:], np.tile(np.array([0x00, 0x3C], np.uint8), (len(own), 1))], axis=1)
        integers = dequantize(ELEMENT_TYPES[TYPES[scheme]], stored.reshape(-1)).reshape(len(own), -1)
        return (integers * np.ascontiguousarray(own[:, :4]).view("<f4")).reshape(len(blocks), -1)
    if scheme != "uint4":
        return dequantize(ELEMENT_TYPES[TYPES[scheme]], blocks.reshape(-1)).reshape(len(blocks), -1)
    parts = blocks.reshape(len(blocks), -1, 19)
    scales = np.ascontiguousarray(parts[..., :2]).view("<f2").astype(np.float32)
    integers = np.concatenate([parts[..., 3:] & 15, parts[..., 3:] >> 4], axis=2).astype(np.int16)
    return (scales * (integers - parts[..., 2:3].astype(np.int16))).reshape(len(blocks), -1)


def _nvfp4_values(blocks: np.ndarray) -> np.ndarray:
    parts = torch.from_numpy(blocks.reshape(-1, 22).copy())
    factor = parts[:, :4].contiguous().view(torch.float32)
    scales = (parts[:, 4:6].contiguous().view(torch.float8_e4m3fn).float() * factor).repeat_interleave(16, dim=1)
    codes = torch.cat([parts[:, 6:] & 15, parts[:, 6:] >> 4], dim=1).long()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes] * scales
    return values.numpy().reshape(len(blocks), -1)


def _half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values [N] rounded to 16-bit floats, and their bytes [N, 2]."""
    halves = values.astype("<f2")
    return halves.astype(np.float32), halves[:, None].view(np.uint8)


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.round(np.divide(a, b, out=np.zeros_like(a), where=b != 0))


def _packed_scales(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    """Return the 12 bytes of eight 6-bit scales and minimums, each [N, 8]."""
    low = [a[:, :4] | a[:, 4:] >> 4 << 6 for a in (scales, minimums)]
    return np.concatenate([*low, (scales[:, 4:] & 15) | minimums[:, 4:] << 4], axis=1).astype(np.uint8)


def _quantize_with_minimums(values: np.ndarray, num_bits: int) -> np.ndarray:
    groups = values.reshape(-1, 8, 32)
    minimum = np.maximum(-groups.min(axis=2), 0)
    scale = (groups.max(axis=2) + minimum) / (2**num_bits - 1)
    d, d_bytes = _half(scale.max(axis=1) / 63)
    dmin, dmin_bytes = _half(minimum.max(axis=1) / 63)
    scales = _ratio(scale, d[:, None] + 0 * scale).astype(np.uint8)
    minimums = _ratio(minimum, dmin[:, None] + 0 * minimum).astype(np.uint8)
    offset = (dmin[:, None] * minimums)[:, :, None]
    step = (d[:, None] * scales)[:, :, None]
    q = np.clip(_ratio(groups + offset, step + 0 * groups), 0, 2**num_bits - 1).astype(np.uint8)
    nibbles = (q[:, 0::2] & 15 | (q[:, 1::2] & 15) << 4).reshape(len(q), 128)
    fifth = [np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)] if num_bits == 5 else []
    return np.concatenate([d_bytes, dmin_bytes, _packed_scales(scales, minimums), *fifth, nibbles], axis=1)


def _quantize_q6_k(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 16, 16)
    scale = np.abs(groups).max(axis=2) / 31
    d, d_bytes = _half(scale.max(axis=1) / 127)
    scales = _ratio(scale, d[:, None] + 0 * scale).astype(np.int8)
    step = (d[:, None] * scales)[:, :, None]
    q = (np.clip(_ratio(groups, step + 0 * groups), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([q[:, :, 0:2] & 15 | (q[:, :, 2:4] & 15) << 4], axis=2).reshape(len(q), 128)
    high = np.bitwise_or.reduce((q >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2).reshape(len(q), 64)
    return np.concatenate([low, high, scales.view(np.uint8), d_bytes], axis=1)


_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _nibbles_of_iq4(values: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return the nearest entries of groups [N, 32] for steps [N, 1], as bytes [N, 16]."""
    scaled = np.divide(values, step, out=np.zeros_like(values), where=step != 0)
    entries = np.abs(scaled[..., None] - _IQ4_VALUES).argmin(axis=-1).astype(np.uint8)
    return entries[:, :16] | entries[:, 16:] << 4


def _quantize_iq4_nl(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 32)
    d, d_bytes = _half(np.abs(groups).max(axis=1) / 113)
    return np.concatenate([d_bytes, _nibbles_of_iq4(groups, d[:, None])], axis=1)


def _quantize_iq4_xs(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 8, 32)
    scale = np.abs(groups).max(axis=2) / 113
    d, d_bytes = _half(scale.max(axis=1) / 31)
    scales = _ratio(scale, d[:, None] + 0 * scale).astype(np.uint8) + 32
    step = d[:, None] * (scales.astype(np.float32) - 32)
    nibbles = _nibbles_of_iq4(groups.reshape(-1, 32), step.reshape(-1, 1)).reshape(-1, 128)
    high = np.bitwise_or.reduce((scales >> 4).astype("<u2") << np.arange(0, 16, 2, dtype="<u2"), axis=1)
    low = (scales[:, 0::2] & 15) | (scales[:, 1::2] & 15) << 4
    return np.concatenate([d_bytes, high.astype("<u2")[:, None].view(np.uint8), low, nibbles], axis=1)


def _packed_pairs(q: np.ndarray) -> np.ndarray:
    """Return the low two bits of values [N, 256]: of each 32 bytes the lowest pairs, then the next; [N, 64]."""
    pairs = (q & 3).reshape(-1, 2, 4, 32)
    return np.bitwise_or.reduce(pairs << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2).reshape(len(q), 64)


def _quantize_q2_k(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 16, 16)
    minimum = np.maximum(-groups.min(axis=2), 0)
    scale = (groups.max(axis=2) + minimum) / 3
    (d, d_bytes), (dmin, dmin_bytes) = _half(scale.max(axis=1) / 15), _half(minimum.max(axis=1) / 15)
    scales = _ratio(scale, d[:, None] + 0 * scale).astype(np.uint8)
    minimums = _ratio(minimum, dmin[:, None] + 0 * minimum).astype(np.uint8)
    step, offset = (d[:, None] * scales)[:, :, None], (dmin[:, None] * minimums)[:, :, None]
    q = np.clip(_ratio(groups + offset, step + 0 * groups), 0, 3).astype(np.uint8).reshape(-1, 256)
    return np.concatenate([scales | minimums << 4, _packed_pairs(q), d_bytes, dmin_bytes], axis=1)


def _quantize_q3_k(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 16, 16)
    scale = np.abs(groups).max(axis=2) / 3
    d, d_bytes = _half(scale.max(axis=1) / 31)
    scales = _ratio(scale, d[:, None] + 0 * scale).astype(np.uint8) + 32
    step = (d[:, None] * (scales.astype(np.float32) - 32))[:, :, None]
    q = (np.clip(_ratio(groups, step + 0 * groups), -4, 3) + 4).astype(np.uint8).reshape(-1, 256)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    third = np.bitwise_or.reduce((q >> 2).reshape(-1, 8, 32) << shifts, axis=1)
    high = (scales >> 4).reshape(-1, 4, 4)
    packed = [(scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4,
              np.bitwise_or.reduce(high << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=1)]  # fmt: skip
    return np.concatenate([third, _packed_pairs(q), *packed, d_bytes], axis=1)


def _quantize_q2_0(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 64)
    d, d_bytes = _half(np.abs(groups).max(axis=1))
    codes = (np.clip(_ratio(groups, d[:, None] + 0 * groups), -1, 2) + 1).astype(np.uint8).reshape(-1, 16, 4)
    return np.concatenate([d_bytes, np.bitwise_or.reduce(codes << np.array([0, 2, 4, 6], np.uint8), axis=2)], axis=1)


def _quantize_q1_0(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 128)
    return np.concatenate(
        [_half(np.abs(groups).mean(axis=1))[1], np.packbits(groups >= 0, axis=1, bitorder="little")], axis=1
    )


_QUANTIZERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "q4_k": lambda values: _quantize_with_minimums(values, 4),
    "q5_k": lambda values: _quantize_with_minimums(values, 5),
    "q6_k": _quantize_q6_k,
    "iq4_nl": _quantize_iq4_nl,
    "iq4_xs": _quantize_iq4_xs,
    "q2_k": _quantize_q2_k,
    "q3_k": _quantize_q3_k,
    "q2_0": _quantize_q2_0,
    "q1_0": _quantize_q1_0,
}


def quantized(values: np.ndarray, name: str) -> np.ndarray:
    """Return the blocks of a float32 matrix: a plain rounding where the gguf package has none."""
    if name in _QUANTIZERS:
        return _QUANTIZERS[name](values).reshape(len(values), -1)
    return gguf.quantize(values, gguf.GGMLQuantizationType(TYPES[name]))


def _in_pairs(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows as llama.cpp's converter stores them: adjacent pairs instead of halves."""
    shape = (num_heads, 2, len(array) // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(array.reshape(shape).swapaxes(1, 2)).reshape(array.shape)


def write_demo(path: Path, type_of: Callable[[str], str]) -> None:
    """Write the demo model with the gguf package; ``type_of`` has the type of a matrix by its name in the file."""
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for key, tensor in load_file(DEMO_FOLDER / "model.safetensors").items():
        array = tensor.to(torch.float32).numpy()
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            array = _in_pairs(array, heads if "q_proj" in key else kv_heads)
        name = str(names.get_name(key, (".weight",)))
        kind = type_of(name) if array.ndim == 2 else "f32"
        if kind != "f32":
            array = quantized(array, kind)
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType(TYPES[kind]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
