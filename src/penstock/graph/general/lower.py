"""Turn a draft into the graph of a bundle and its packed weights, and write the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core import native
from penstock.errors import UnsupportedError
from penstock.graph.bundle import BundleWriter
from penstock.graph.general.draft import Draft, DraftCall, Tensor
from penstock.graph.general.examples import example_sizes
from penstock.graph.general.passes import optimise
from penstock.graph.general.sizes import as_text, symbols_of
from penstock.graph.ir import GENERAL_NETWORK, DType, Graph, Layout, Node, Operand, Symbol, Value, Weight
from penstock.ops.schema import Argument, parse_arguments
from penstock.ops.table import find_op

__all__ = ["Lowered", "lower", "write_network"]

_CONSTANT_LAYOUTS: Final = {
    DType.F32: Layout.ROWS_F32, DType.F16: Layout.ROWS_F16, DType.I32: Layout.ROWS_I32, DType.I64: Layout.ROWS_I64,
    DType.I8: Layout.ROWS_I8, DType.U8: Layout.ROWS_U8, DType.BOOL: Layout.ROWS_BOOL,
}  # fmt: skip
_TILE_ROWS: Final = 16


class Lowered:
    """A graph, and the arrays of its weights: row-major, as they are packed."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.arrays: dict[str, NDArray[Any]] = {}

    def packed(self, context: native.Context) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Yield the name and the bytes of each weight, in the order of the file."""
        for name, weight in self.graph.weights.items():
            array = self.arrays[name]
            size = native.layout_bytes(weight.layout, weight.rows, weight.cols)
            if weight.layout < Layout.T16_F32:
                plain = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # no copy: it may be a mapped file
                if plain.size == size:
                    yield name, plain
                    continue
                memory = np.zeros(size, np.uint8)
                memory[: plain.size] = plain
            else:
                memory = np.zeros(size, np.uint8)
                source = np.ascontiguousarray(array, np.float32)
                rows, cols = weight.rows, weight.cols
                context.pack(weight.layout, rows, cols, 0, rows, int(DType.F32), source, memory)
            yield name, memory


def write_network(
    draft: Draft, path: str | os.PathLike[str], *, properties: Mapping[str, str] | None = None, optimised: bool = True,
    winograd: bool = True,
) -> Graph:  # fmt: skip
    """Write the bundle of a draft, which is rewritten by passes unless ``optimised`` is False, and return its graph.

    ``winograd``: as ``optimise`` takes it.

    The file appears complete or not at all.  Raises UnsupportedError for what the format has no place for.
    """
    if optimised:
        optimise(draft, winograd=winograd)
    lowered = lower(draft, properties)
    with native.Context() as context, BundleWriter(path, lowered.graph, durable=False) as writer:
        for name, data in lowered.packed(context):
            writer.add_weight(name, data)
    return lowered.graph


def lower(draft: Draft, properties: Mapping[str, str] | None = None) -> Lowered:
    """Return the graph of a draft, which is not changed, and the arrays of its weights."""
    return _Lowering(draft, {**draft.properties, **(properties or {})}).run()


class _Lowering:
    def __init__(self, draft: Draft, properties: dict[str, str]) -> None:
        self.draft = draft
        self.graph = Graph(draft.name, "f32", 0, 0, kind=GENERAL_NETWORK, properties=properties)
        self.lowered = Lowered(self.graph)
        self.names: dict[int, str] = {}  # of values, by the id of their tensor
        self.weights: dict[tuple[int, str], str] = {}  # by the id of the tensor and its use

    def run(self) -> Lowered:
        self.draft.materialised_outputs()
        self._declare_symbols()
        for tensor in self.draft.inputs:
            self._declare(tensor, tensor.name)
            self.graph.inputs.append(tensor.name)
        for call in self.draft.calls:
            self._add_node(call)
        self._declare_outputs()
        return self.lowered

    def _declare_symbols(self) -> None:
        examples = example_sizes(self.draft)
        for item in self.draft.symbols():
            self.graph.symbols.append(Symbol(item.name, item.min, item.max, example=examples[item.name]))

    def _declare(self, tensor: Tensor, name: str) -> str:
        sizes = ",".join(as_text(size) for size in tensor.shape)
        self.graph.values[name] = Value(name, tensor.dtype, (), sizes=sizes)
        self.names[id(tensor)] = name
        return name

    def _declare_outputs(self) -> None:
        """Give outputs the names that users know.  One that is an input, a constant or another output is copied."""
        seen: set[int] = set()
        kept = {id(tensor) for tensor in self.draft.inputs}
        for name, tensor in zip(self.draft.output_names, self.draft.outputs, strict=True):
            if tensor.value is not None or id(tensor) in seen or id(tensor) in kept:
                out = Tensor(self.draft.free_name(f"{name}.copy"), tensor.dtype, tensor.shape)
                self._add_node(DraftCall("permute", name, [tensor], [out], {"order": tuple(range(tensor.rank))}))
                tensor = out
            seen.add(id(tensor))
            self._rename(tensor, name)
            self.graph.outputs.append(name)

    def _rename(self, tensor: Tensor, name: str) -> None:
        old = self.names[id(tensor)]
        if old == name:
            return
        if name in self.graph.values:
            self._rename_value(name, self.draft.free_name(f"{name}.inner"))
        self._rename_value(old, name)
        self.names[id(tensor)] = name

    def _rename_value(self, old: str, new: str) -> None:
        if old in self.graph.inputs:
            raise UnsupportedError(f"{old}: expected other names for outputs than for inputs")
        value = self.graph.values.pop(old)
        value.name = new
        self.graph.values[new] = value
        for node in self.graph.nodes:
            node.outputs = [new if name == old else name for name in node.outputs]
            node.inputs = [Operand("value", new) if o.kind == "value" and o.name == old else o for o in node.inputs]
        self.names = {key: new if name == old else name for key, name in self.names.items()}

    def _add_node(self, call: DraftCall) -> None:
        arguments = parse_arguments(find_op(call.op).schema)
        operands = [a for a in arguments if not a.is_attr]
        tensors = [*call.inputs, *[None] * (len(operands) - len(call.inputs))]
        inputs = [self._operand(call, a, tensor) for a, tensor in zip(operands, tensors, strict=True)]
        outputs = [self._declare(tensor, tensor.name) for tensor in call.outputs]
        attrs = {a.name: _stored_attr(a, call.attrs[a.name]) for a in arguments if a.is_attr}
        self.graph.nodes.append(Node(call.op, call.name[:500], inputs, outputs, attrs))

    def _operand(self, call: DraftCall, argument: Argument, tensor: Tensor | None) -> Operand:
        if tensor is None:
            return Operand("none")
        if argument.kind == "weight":
            return Operand("weight", self._weight(call, argument.name, tensor))
        if tensor.value is not None:
            return Operand("value", self._constant(tensor))
        return Operand("value", self.names[id(tensor)])

    def _constant(self, tensor: Tensor) -> str:
        if id(tensor) not in self.names:
            array = np.asarray(tensor.value, order="C")  # ascontiguousarray would give a scalar a dimension
            shape = tuple(int(n) for n in array.shape)
            weight = Weight(tensor.name, 1, max(array.size, 1), _CONSTANT_LAYOUTS[tensor.dtype], (), shape=shape)
            self._store(weight, array)
            self.graph.values[tensor.name] = Value(tensor.name, tensor.dtype, (), weight=tensor.name)
            self.names[id(tensor)] = tensor.name
        return self.names[id(tensor)]

    def _weight(self, call: DraftCall, use: str, tensor: Tensor) -> str:
        if tensor.value is None:
            raise UnsupportedError(f"{call.name} ({call.op}): expected a constant {use}, got one that is computed")
        layout, array = _laid_out(call, use, np.asarray(tensor.value, np.float32))
        key = (id(tensor), f"{layout.name} {array.shape}")
        if key not in self.weights:
            name = tensor.name
            while name in self.graph.weights:
                name = self.draft.free_name(f"{tensor.name}.packed")
            self._store(Weight(name, array.shape[0], array.shape[1], layout, ()), array)
            self.weights[key] = name
        return self.weights[key]

    def _store(self, weight: Weight, array: NDArray[Any]) -> None:
        self.graph.weights[weight.name] = weight
        self.lowered.arrays[weight.name] = array


def _stored_attr(argument: Argument, value: Any) -> Any:
    if argument.kind == "int[]":
        return ",".join(as_text(size if not isinstance(size, (bool, np.integer)) else int(size)) for size in value)
    if argument.kind == "bool":
        return int(value)
    if argument.kind == "float":
        return float(value)
    return value


def _laid_out(call: DraftCall, use: str, array: NDArray[np.float32]) -> tuple[Layout, NDArray[np.float32]]:
    """Return the layout of a weight of ``call``, and the array as rows."""
    if use == "weight" and call.op == "linear":
        return Layout.T16_F32, array
    if use == "weight" and call.op in ("conv", "conv_transpose"):
        return _conv_rows(call, array)
    if use == "weight" and call.op == "conv_winograd":
        return Layout.T16_F32, array.reshape(len(array), -1)
    if call.op in ("lstm", "gru"):
        return _gate_rows(call, use, array)
    if "::" in call.op:
        return Layout.ROWS_F32, np.atleast_2d(array)
    return Layout.ROWS_F32, array.reshape(1, -1)


def _conv_rows(call: DraftCall, array: NDArray[np.float32]) -> tuple[Layout, NDArray[np.float32]]:
    """Take [outputs, kernel height, kernel width, channels of a group]; docs of the table give the layouts."""
    outputs, groups = array.shape[0], int(call.attrs["groups"])
    channels = call.argument(0).shape[-1]
    if groups == 1:
        return Layout.T16_F32, array.reshape(outputs, -1)
    if groups == outputs == channels:
        return Layout.ROWS_F32, np.ascontiguousarray(array.reshape(outputs, -1).T)
    rows = outputs // groups
    padded = -(-rows // _TILE_ROWS) * _TILE_ROWS
    result = np.zeros((groups, padded, array[0].size), np.float32)
    result[:, :rows] = array.reshape(groups, rows, -1)
    return Layout.T16_F32, result.reshape(groups * padded, -1)


def _gate_rows(call: DraftCall, use: str, array: NDArray[np.float32]) -> tuple[Layout, NDArray[np.float32]]:
    """Take ONNX's [directions, gates * hidden, columns], or its bias [directions, 2 * gates * hidden].

    The rows of each gate are padded to whole tiles.  A bias has two rows: that of ``w`` and that of ``r``.
    """
    hidden = int(call.attrs["hidden"])
    matrix = array.reshape(-1, hidden, array.shape[-1] if use != "bias" else 1)
    result = np.zeros((len(matrix), -(-hidden // _TILE_ROWS) * _TILE_ROWS, matrix.shape[2]), np.float32)
    result[:, :hidden] = matrix
    if use != "bias":
        return Layout.T16_F32, result.reshape(-1, result.shape[2])
    halves = result.reshape(array.shape[0], 2, -1).swapaxes(0, 1)
    return Layout.ROWS_F32, np.ascontiguousarray(halves.reshape(2, -1))


def unbound_sizes(draft: Draft) -> list[str]:
    """Return the names of sizes that calls use and no input has."""
    known = set(draft.symbols())
    unbound: dict[str, None] = {}
    for call in draft.calls:
        for value in call.attrs.values():
            for size in value if isinstance(value, tuple) else ():
                unbound.update((item.name, None) for item in symbols_of(size) if item not in known)
    return list(unbound)
