"""Write a folder of ``penstock quantize`` as a compressed-tensors folder, which transformers and vLLM read.

A linear X of w8a8 becomes "int-quantized": ``X.weight`` I8 [rows, cols] and ``X.weight_scale`` F32 [rows, 1], with
activations rounded per token.  One of w8a16 becomes "pack-quantized": ``X.weight_packed`` I32 [rows, cols / 4], whose
bytes have 128 added, ``X.weight_scale``, and ``X.weight_shape`` I64 [2].  Integers and scales stay as they are.  The
output head and an embedding become floats, because readers expect them so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import FLOATS, convert_floats
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.side_files import write_side_files
from penstock.config import show
from penstock.errors import UnsupportedError
from penstock.quant.folder import new_folder
from penstock.quant.mixed_schemes import HEADS, TOKEN_TABLES
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = ["write_compressed"]

_FORMATS: Final = {"w8a8": "int-quantized", "w8a16": "pack-quantized"}
_REASONS: Final = {
    "w4a8": "whose groups have offsets that are no integers",
    "w4a16": "whose groups have offsets that are no integers",
    "w8a8_h32": "whose inputs are rotated",
    "w4a8_h32": "whose inputs are rotated",
}
_WORD_BYTES: Final = 4
_PIECE_VALUES: Final = 1 << 22
_SCALE: Final = "_scale"


def write_compressed(
    checkpoint: Checkpoint, out: Path, side_files: Mapping[str, bytes], progress: Callable[[int, int], None] | None
) -> int:
    """Write the folder ``out``, which must not exist; it appears complete or not at all.  Return the number of tensors.

    ``progress(done, total)`` counts bytes of what is read.  Raises UnsupportedError, which names ``source``, for a
    scheme that compressed-tensors cannot hold.  The folder must have the published names.
    """
    scheme = _scheme_of(checkpoint)
    plan = {name: _is_linear(checkpoint, name) for name in checkpoint.tensors if not name.endswith(f".weight{_SCALE}")}
    dtype = checkpoint.dtype
    entries = [entry for name, linear in plan.items() for entry in _entries(checkpoint, name, linear, scheme, dtype)]
    total, done = sum(checkpoint.tensors[name].num_bytes for name in plan), 0
    with new_folder(out) as folder:
        write_side_files(folder, dict(side_files) | {"config.json": _config(checkpoint, scheme, plan)})
        writer = TensorWriter(folder / "model.safetensors", entries)
        for name, linear in plan.items():
            for tensor, piece in _pieces(checkpoint, name, linear, scheme, dtype):
                writer.add(tensor, piece)
            checkpoint.release(name)
            done += checkpoint.tensors[name].num_bytes
            if progress is not None:
                progress(done, total)
        writer.close()
        Checkpoint.open(folder)
    return len(entries)


def _scheme_of(checkpoint: Checkpoint) -> str:
    """Return the scheme of the folder; UnsupportedError if compressed-tensors cannot hold it."""
    scheme, others = checkpoint.scheme, set((checkpoint.mixed_schemes or {}).values())
    actual = None
    if scheme not in _FORMATS:
        actual = "one that is not quantized" if scheme is None else f"{scheme}, {_REASONS.get(scheme, 'in blocks')}"
    elif mixed := sorted(others - {scheme, *FLOATS}):
        actual = f"one with {', '.join(mixed)} too"
    if scheme is None or actual is not None:
        raise UnsupportedError(
            f"source: expected a folder quantized as {' or '.join(_FORMATS)} for compressed-tensors, got {actual}",
            param="source",
        )
    return scheme


def _is_linear(checkpoint: Checkpoint, name: str) -> bool:
    """Return True for a quantized linear that stays integers: no head, no embedding."""
    layer = ["", *name.removesuffix(".weight").split(".")][-1]
    return checkpoint.is_quantized(name) and name not in HEADS and layer not in TOKEN_TABLES


def _config(checkpoint: Checkpoint, scheme: str, plan: Mapping[str, bool]) -> bytes:
    """Return config.json with the section that compressed-tensors reads."""
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = integers | {"strategy": "channel", "dynamic": False}
    activations = integers | {"strategy": "token", "dynamic": True} if scheme == "w8a8" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    matrices = [name for name, linear in plan.items() if not linear and len(checkpoint.logical_shape(name)) == 2]
    ignored = {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")} | {"lm_head"}
    section = {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": _FORMATS[scheme]}},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }
    return (json.dumps(checkpoint.config.values | {"quantization_config": section}, indent=2) + "\n").encode()


def _entries(checkpoint: Checkpoint, name: str, linear: bool, scheme: str, dtype: str) -> list[TensorEntry]:
    """Return the tensors of the new folder that one of the old becomes."""
    info = checkpoint.tensors[name]
    if not checkpoint.is_quantized(name):
        return [TensorEntry(name, info.dtype.upper(), info.shape)]
    if not linear:
        return [TensorEntry(name, dtype.upper(), info.shape)]
    rows, cols = info.shape
    scales = TensorEntry(f"{name}{_SCALE}", "F32", (rows, 1))
    if scheme == "w8a8":
        return [TensorEntry(name, "I8", (rows, cols)), scales]
    words = TensorEntry(f"{name}_packed", "I32", (rows, -(-cols // _WORD_BYTES)))
    return [words, scales, TensorEntry(f"{name}_shape", "I64", (2,))]


def _pieces(
    checkpoint: Checkpoint, name: str, linear: bool, scheme: str, dtype: str
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the values of the tensors of ``_entries`` in runs of rows, each with the name of its tensor."""
    stored = checkpoint.read(name)
    if not checkpoint.is_quantized(name):
        yield name, stored
        return
    rows, cols = stored.shape
    scales = checkpoint.read(f"{name}{_SCALE}").reshape(rows, 1)
    if not np.isfinite(scales).all():
        raise UnsupportedError(f"tensor {show(name + _SCALE)}: expected finite scales", param=name)
    step = max(1, _PIECE_VALUES // max(cols, 1))
    for start in range(0, rows, step):
        piece = stored[start : start + step]
        if not linear:
            yield name, convert_floats(piece.astype(np.float32) * scales[start : start + step], "f32", dtype)
        elif scheme == "w8a8":
            yield name, piece
        else:
            yield f"{name}_packed", _words(piece)
    if linear:
        yield f"{name}{_SCALE}", scales
    if linear and scheme == "w8a16":
        yield f"{name}_shape", np.array([rows, cols], np.int64)


def _words(integers: NDArray[np.int8]) -> NDArray[np.int32]:
    """Return integers with 128 added, four to a word, the first in the lowest byte."""
    rows, cols = integers.shape
    padded = np.zeros((rows, -(-cols // _WORD_BYTES) * _WORD_BYTES), np.uint8)
    padded[:, :cols] = integers.view(np.uint8) ^ np.uint8(128)
    words: NDArray[np.int32] = padded.view("<i4")
    return words
