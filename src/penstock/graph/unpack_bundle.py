"""Write the checkpoint folder of a bundle: its weights by their checkpoint names, and the files beside them.

A weight is stored in the type of the bundle's scheme, so the folder has the bytes of the one that was exported if that
had the same type: float weights of f32, f16 and bf16 bundles, and the integers of a folder that ``penstock quantize``
made.  Vectors, which bundles have in float32, get the type in config.json if that keeps each value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import convert_floats, to_float32
from penstock.checkpoint.side_files import SIDE_FILES, write_side_files
from penstock.config import OWN_NAMES, ConfigReader
from penstock.core.layouts import BLOCKS
from penstock.core.metadata import read_metadata
from penstock.core.native import Context, Model, QuantizedRows
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.ir import Graph, Layout, Part, Weight
from penstock.graph.metadata import decode_metadata
from penstock.quant.folder import add_quantized, new_folder, quantized_config, quantized_entries
from penstock.quant.scheme import SCHEMES, Scheme, find_scheme
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = ["unpack_bundle"]

_FLOATS: Final = {
    Layout.ROWS_F32: "f32", Layout.T16_F32: "f32", Layout.ROWS_F16: "f16", Layout.T16_F16: "f16",
    Layout.ROWS_BF16: "bf16", Layout.T16_BF16: "bf16",
}  # fmt: skip
_COMPUTED: Final = ("rotary_emb.inv_freq", "rotary.full.inv_freq", "rotary.sliding.inv_freq", "attention.slopes")
"""The network computes these; no checkpoint needs them."""
_PIECE_VALUES: Final = 1 << 22


def unpack_bundle(path: Path, out: Path) -> None:
    """Write the folder ``out``, which must not exist.

    Raises UnsupportedError for the bundle of a rank, and InvalidFileError for one without config.json.
    """
    with Model.open(path, verify=True) as model, Context() as context:
        graph, _ = decode_metadata(read_metadata(path, model.stamp))
        if "rank" in graph.properties:
            raise UnsupportedError(f"{path}: expected a whole bundle, got that of rank {graph.properties['rank']}")
        sides = {name: bytes(data) for name in SIDE_FILES if (data := model.segment(name)) is not None}
        if "config.json" not in sides:
            raise InvalidFileError(f"{path}: expected the file config.json inside, got none")
        config = ConfigReader.parse(sides["config.json"])
        unpacker = _Unpacker(graph, model, context, config.dtype() or "f32")
        scheme = find_scheme(graph.scheme)
        if scheme.in_blocks:
            raise UnsupportedError(
                f"{path}: expected a scheme that a checkpoint folder can have, got {scheme.name}, the blocks of "
                "a GGUF file. Use that file."
            )
        blocks = next((own.name for own in graph.weights.values() if int(own.layout) in BLOCKS), None)
        if blocks is not None:
            raise UnsupportedError(
                f"{path}: expected weights without blocks, got those of {blocks}. Use the folder that the bundle was "
                "made from.",
                param="path",
            )
        is_foreign = config.foreign_quantization() is not None
        if scheme.quantized and (is_foreign or not config.has("quantization_config")):
            values = {key: value for key, value in config.values.items() if key != "quantization_config"}
            sides["config.json"] = quantized_config(
                values, scheme.name, unpacker.table_dtype, is_mixed=is_foreign, schemes=_tensor_schemes(graph)
            )
        elif OWN_NAMES in graph.properties:  # the folder has the parameters, not the tensors that they came from
            sides["config.json"] = (json.dumps(config.values | {OWN_NAMES: True}, indent=2) + "\n").encode()
        with new_folder(out) as folder:
            write_side_files(folder, sides)
            unpacker.write(folder / "model.safetensors")


class _Unpacker:
    def __init__(self, graph: Graph, model: Model, context: Context, dtype: str) -> None:
        self._graph, self._context = graph, context
        self._data = np.frombuffer(model.segment("weights") or b"", np.uint8)
        tables = {_FLOATS[own.layout] for own in graph.weights.values() if own.rows > 1 and own.layout in _FLOATS}
        self.table_dtype = tables.pop() if len(tables) == 1 else dtype

    def write(self, path: Path) -> None:
        """Write the tensors of all weights."""
        entries: list[TensorEntry] = []
        parts: list[tuple[Weight, Part, str]] = []
        for weight in self._graph.weights.values():
            for part in weight.parts:
                if not part.name.endswith(_COMPUTED):
                    dtype = self._dtype_of(weight, part)
                    parts.append((weight, part, dtype))
                    entries += self._entries(weight, part, dtype)
        writer = TensorWriter(path, entries)
        for weight, part, dtype in parts:
            if weight.layout in _FLOATS:
                for rows in self._float_rows(weight, part):
                    writer.add(part.name, convert_floats(rows, "f32", dtype))
            else:
                for quantized in self._integer_rows(weight, part):
                    add_quantized(writer, part.name, _scheme_of(weight), quantized)
        writer.close()

    def _stored(self, weight: Weight) -> NDArray[np.uint8]:
        return self._data[weight.offset : weight.offset + weight.num_bytes]

    def _dtype_of(self, weight: Weight, part: Part) -> str:
        """Return the type to store a tensor in."""
        own = _FLOATS.get(weight.layout, "")
        if weight.rows > 1 or own != "f32" or self.table_dtype == "f32":
            return own
        for rows in self._float_rows(weight, part):
            try:
                narrow = convert_floats(rows, "f32", self.table_dtype)
            except InvalidArgumentError:
                return own
            if to_float32(narrow, self.table_dtype).tobytes() != rows.tobytes():
                return own
        return self.table_dtype

    def _entries(self, weight: Weight, part: Part, dtype: str) -> list[TensorEntry]:
        if weight.layout not in _FLOATS:
            return quantized_entries(part.name, _scheme_of(weight), part.num_rows, weight.cols)
        return [TensorEntry(part.name, dtype.upper(), _shape(weight, part))]

    def _float_rows(self, weight: Weight, part: Part) -> Iterator[NDArray[np.float32]]:
        if weight.rows == 1:
            size = _shape(weight, part)[0]
            start = part.row_start if len(weight.parts) > 1 else 0
            values = self._context.unpack(weight.layout, 1, weight.cols, 0, 1, self._stored(weight))
            yield values[0, start : start + size]
            return
        for start, count in _runs(weight, part):
            yield self._context.unpack(weight.layout, weight.rows, weight.cols, start, count, self._stored(weight))

    def _integer_rows(self, weight: Weight, part: Part) -> Iterator[QuantizedRows]:
        for start, count in _runs(weight, part):
            stored = self._stored(weight)
            yield self._context.unpack_quantized(weight.layout, weight.rows, weight.cols, start, count, stored)


def _tensor_schemes(graph: Graph) -> dict[str, str]:
    """Return the schemes of the tensors that linears read as integers."""
    linears = [node for node in graph.nodes if "scheme" in node.attrs]
    schemes = {node.inputs[1].name: str(node.attrs["scheme"]) for node in linears}
    return {
        part.name: scheme
        for name, scheme in schemes.items()
        for part in graph.weights[name].parts
        if find_scheme(scheme).quantized
    }


def _runs(weight: Weight, part: Part) -> Iterator[tuple[int, int]]:
    step, end = max(1, _PIECE_VALUES // weight.cols), part.row_start + part.num_rows
    for start in range(part.row_start, end, step):
        yield start, min(step, end - start)


def _shape(weight: Weight, part: Part) -> tuple[int, ...]:
    if weight.rows > 1:
        return (part.num_rows, weight.cols)
    return (weight.cols if len(weight.parts) == 1 else part.num_rows,)


def _scheme_of(weight: Weight) -> Scheme:
    return next(scheme for scheme in SCHEMES.values() if scheme.layout == int(weight.layout))
