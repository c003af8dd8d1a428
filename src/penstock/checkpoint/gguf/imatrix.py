"""Importance matrices of llama.cpp: the sums of the squares of each linear's inputs, by the names of GGUF.

A file is GGUF with ``NAME.in_sum2`` and ``NAME.counts`` for each weight (since 2025-07), or the older binary form:
https://github.com/ggml-org/llama.cpp/blob/master/tools/imatrix/imatrix.cpp.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.architectures.architecture import TOP_NAMES, Architecture
from penstock.checkpoint.gguf.architectures.table import architecture_of
from penstock.checkpoint.gguf.reader import read_header
from penstock.checkpoint.gguf.writer import GgufEntry, GgufWriter
from penstock.checkpoint.side_files import read_small_file
from penstock.config import show
from penstock.errors import FileAccessError, InvalidFileError, UnsupportedError
from penstock.quant.input_statistics import InputStatistics, WeightInputs

__all__ = ["is_imatrix", "read_imatrix", "write_imatrix"]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_BYTES: Final = 1 << 30
_MAX_NAME: Final = 256
_BLOCK: Final = re.compile(r"blk\.(\d{1,4})\.(.+)\.weight", re.ASCII)
_EXPERT: Final = re.compile(r"(\.experts\.)(\d+)(\.)", re.ASCII)
_PARTS: Final = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
"""Tensors of several weights with the same inputs."""
Rows = tuple[NDArray[np.float64], NDArray[np.int64]]
"""The statistics of a weight: sums of squares [matrices, columns] and the number of rows of each matrix."""


def is_imatrix(path: Path) -> bool:
    """Return True for a file that its suffix or its first bytes show to be an importance matrix."""
    if path.suffix.lower() in (".dat", ".imatrix"):
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def read_imatrix(path: Path, model_type: str) -> InputStatistics:
    """Return the statistics of a file, by the names of tensors in a checkpoint of this family.

    Raises FileAccessError, InvalidFileError for a damaged file or one without a weight of the family, and
    UnsupportedError for a family without names in GGUF.
    """
    architecture = _architecture(model_type)
    data = read_small_file(path, _MAX_BYTES)
    stored = _read_gguf(data, path) if data[:4] == b"GGUF" else _read_binary(data, path)
    weights: dict[str, WeightInputs] = {}
    for name, (sums, counts) in stored.items():
        if not np.isfinite(sums).all() or (sums < 0).any():
            raise InvalidFileError(f"{path}: {show(name)}: expected finite sums of squares, got others")
        for own in _own_names(architecture, name):
            for matrix in range(len(sums)):  # of experts
                weights[own.replace("{}", str(matrix))] = WeightInputs(sums[matrix], int(counts[matrix]))
    if not weights:
        raise InvalidFileError(f"{path}: expected weights of {show(model_type)}, such as blk.0.attn_q.weight, got none")
    tokens = max(inputs.count for inputs in weights.values())
    return InputStatistics(weights, tokens, hashlib.sha256(data).hexdigest(), path.name)


def _architecture(model_type: str) -> Architecture:
    entry = architecture_of(model_type)
    if entry is None:
        raise UnsupportedError(
            f"model_type: expected a family that GGUF has names for, got {show(model_type)}", param="model_type"
        )
    return entry[1]


def _own_names(architecture: Architecture, name: str) -> list[str]:
    """Return the names in a checkpoint of the weights that a tensor of a GGUF file has the columns of."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        top = TOP_NAMES.get(name.removesuffix(".weight"))
        return [] if top is None else [f"{top}.weight"]
    layer, part = match.groups()
    parts = (part,) if part in architecture.layer_names else _PARTS.get(part, ())
    modules = [architecture.layer_names[own] for own in parts if own in architecture.layer_names]
    return [f"{architecture.layers}.{layer}.{module}.weight" for module in modules]


def _read_gguf(data: bytes, path: Path) -> dict[str, Rows]:
    header = read_header(memoryview(data), str(path))
    kind = header.metadata.get("general.type")
    if kind != "imatrix":
        raise InvalidFileError(f"{path}: general.type: expected imatrix, got {show(str(kind))}", param="calibration")
    stored: dict[str, Rows] = {}
    for name, tensor in header.tensors.items():
        if not name.endswith(_SUMS):
            continue
        own = name.removesuffix(_SUMS)
        counted = header.tensors.get(own + _COUNTS)
        if counted is None or tensor.kind.name != "F32" or counted.kind.name != "F32":
            raise InvalidFileError(f"{path}: {show(own)}: expected float32 tensors {_SUMS} and {_COUNTS}")
        sums = np.frombuffer(data, "<f4", tensor.num_bytes // 4, tensor.offset).astype(np.float64)
        counts = np.frombuffer(data, "<f4", counted.num_bytes // 4, counted.offset)
        if not len(counts) or len(sums) % len(counts) or not np.isfinite(counts).all():
            raise InvalidFileError(f"{path}: {show(own)}: expected as many counts as matrices, got {len(counts)}")
        stored[own] = sums.reshape(len(counts), -1), np.maximum(np.rint(counts), 0).astype(np.int64)
    return stored


def _read_binary(data: bytes, path: Path) -> dict[str, Rows]:
    """Read the older form: the values are sums over calls, so that value / calls is the mean."""
    at = 0

    def take(num_bytes: int) -> bytes:
        nonlocal at
        if num_bytes < 0 or at + num_bytes > len(data):
            raise InvalidFileError(f"{path}: expected an importance matrix of llama.cpp, got other data at byte {at}")
        at += num_bytes
        return data[at - num_bytes : at]

    def integer() -> int:
        return int(struct.unpack("<i", take(4))[0])

    stored: dict[str, Rows] = {}
    for _ in range(integer()):
        length = integer()
        name = take(length if length <= _MAX_NAME else -1).decode("utf-8", "replace")
        calls, num_values = integer(), integer()
        values = np.frombuffer(take(4 * num_values), "<f4").astype(np.float64)
        stored[name] = values[None], np.array([max(calls, 1)])
    return stored


def write_imatrix(path: Path, statistics: InputStatistics, model_type: str) -> int:
    """Write statistics as GGUF, for llama.cpp's tools; returns the number of weights that GGUF has names for.

    Raises FileAccessError if the file exists or cannot be written.
    """
    stored = _gguf_rows(_architecture(model_type), statistics.weights | statistics.heads)
    metadata: dict[str, Any] = {
        "general.type": "imatrix",
        "imatrix.datasets": [statistics.source],
        "imatrix.chunk_count": 1,
        "imatrix.chunk_size": statistics.num_tokens,
    }
    entries, arrays = [], []
    for name, (sums, counts) in stored.items():
        entries += [GgufEntry(name + _SUMS, "f32", sums.shape), GgufEntry(name + _COUNTS, "f32", (len(counts), 1))]
        arrays += [sums.astype(np.float32), counts.astype(np.float32)[:, None]]
    try:
        writer = GgufWriter(path, metadata, entries)
        for array in arrays:
            writer.add(array)
        writer.close()
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror}") from None
    return len(stored)


def _gguf_rows(architecture: Architecture, weights: Mapping[str, WeightInputs]) -> dict[str, Rows]:
    parts = {module: part for part, module in architecture.layer_names.items()}
    tops = {f"{own}.weight": f"{name}.weight" for name, own in TOP_NAMES.items()}
    rows: dict[str, list[WeightInputs]] = {}
    for own, inputs in weights.items():
        prefix = f"{architecture.layers}."
        layer, _, module = own.removeprefix(prefix).removesuffix(".weight").partition(".")
        part = parts.get(_EXPERT.sub(r"\1{}\3", module))
        if own.startswith(prefix) and part is not None and (inputs.squares.any() or _EXPERT.search(module)):
            rows.setdefault(f"blk.{layer}.{part}.weight", []).append(inputs)
        elif own in tops and inputs.squares.any():  # the head, or the embedding that is tied to it
            rows[tops[own]] = [inputs]
    return {
        name: (np.stack([stat.squares for stat in stats]), np.array([stat.count for stat in stats]))
        for name, stats in rows.items()
    }
