"""Turn convolutions and linears of a stored network into those of int8.

A convolution takes and gives int8 of a fixed scale for each tensor, so a chain of them stays int8 in memory.  Ops that
only move numbers, and maximum pools, keep the scale.  At a border to other ops a ``requantize`` node converts.  A
linear takes float32, whose rows it rounds by their own largest number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from penstock.core.native import Context, layout_bytes
from penstock.graph.general.passes.winograd import kernels_of
from penstock.graph.ir import DType, Graph, Layout, Node, Operand, Value, Weight
from penstock.networks.int8.ranges import Range
from penstock.networks.int8.stored import Bytes, StoredNetwork

__all__ = ["Int8Weights", "candidates", "is_conv", "observed_values", "rewrite"]

_MOVES: Final = ("max_pool", "concat", "reshape", "permute", "slice")
"""Ops that give numbers of their inputs as they are."""
_X, _WEIGHT, _RESIDUAL = 0, 1, 3
_MAX_COLUMNS: Final = {"conv": 1 << 16, "linear": 1 << 17}
_CHANNEL_STEP: Final = 4
_WINOGRAD_PLACES: Final = 16
_WINOGRAD_WINDOW: Final[dict[str, int | float | str]] = {
    "kernel": "3,3",
    "strides": "1,1",
    "dilations": "1,1",
    "groups": 1,
}


def is_conv(node: Node) -> bool:
    """Return True for a convolution."""
    return node.op in ("conv", "conv_winograd")


def candidates(graph: Graph) -> list[Node]:
    """Return the nodes that have an int8 form, in order."""
    return [node for node in graph.nodes if _has_form(graph, node)]


def _has_form(graph: Graph, node: Node) -> bool:
    if not (is_conv(node) or node.op == "linear") or graph.values[node.inputs[_X].name].weight is not None:
        return False
    weight = graph.weights[node.inputs[_WEIGHT].name]
    if node.op == "linear":
        return weight.layout == Layout.T16_F32 and weight.cols <= _MAX_COLUMNS["linear"]
    if weight.layout == Layout.ROWS_F32:
        return True
    if node.op == "conv_winograd":
        channels, taps = weight.cols // _WINOGRAD_PLACES, 9
    else:
        taps = int(np.prod([int(size) for size in str(node.attrs["kernel"]).split(",")]))
        channels = weight.cols // taps
    return channels % _CHANNEL_STEP == 0 and taps * channels <= _MAX_COLUMNS["conv"]


def observed_values(graph: Graph, nodes: list[Node]) -> list[str]:
    """Return the values whose ranges convolutions among ``nodes`` need, without constants."""
    wanted = {name: None for node in nodes if is_conv(node) for name in _values_of(node)}
    count = 0
    while count != len(wanted):  # what moves numbers of theirs, through any number of nodes
        count = len(wanted)
        for node in graph.nodes:
            if node.op in _MOVES and any(name in wanted for name in _values_of(node)):
                wanted.update(dict.fromkeys(_values_of(node)))
    values = graph.values
    return [name for name in wanted if values[name].dtype == DType.F32 and values[name].weight is None]


def _values_of(node: Node) -> list[str]:
    return [*(operand.name for operand in node.inputs if operand.kind == "value"), *node.outputs]


@dataclass
class Int8Weights:
    """Weights in t16_i8, by the names of the float32 ones: each is rounded once."""

    network: StoredNetwork
    context: Context
    packed: dict[str, tuple[int, Bytes]] = field(default_factory=dict)

    def get(self, name: str, op: str) -> tuple[int, Bytes]:
        """Return the columns and the bytes of the weight of an ``op``: int8 with a scale for each row."""
        if name not in self.packed:
            weight = self.network.graph.weights[name]
            rows = np.ascontiguousarray(self.network.rows(self.context, weight))
            if op == "conv_winograd":
                rows = kernels_of(rows.reshape(weight.rows, 4, 4, -1)).reshape(weight.rows, -1)
            cols = rows.shape[1]
            memory = np.zeros(layout_bytes(Layout.T16_I8, weight.rows, cols), np.uint8)
            self.context.pack(Layout.T16_I8, weight.rows, cols, 0, weight.rows, int(DType.F32), rows, memory)
            self.packed[name] = cols, memory
        return self.packed[name]


def rewrite(weights: Int8Weights, chosen: set[str], ranges: dict[str, Range], method: str) -> StoredNetwork:
    """Return the network in which the nodes that give the values ``chosen`` compute in int8."""
    return _Rewrite(weights, chosen, ranges, method).run()


class _Rewrite:
    def __init__(self, weights: Int8Weights, chosen: set[str], ranges: dict[str, Range], method: str) -> None:
        self.weights, self.source, self.method = weights, weights.network, method
        self.graph = self.source.graph.copy()
        self.result = StoredNetwork(self.graph, dict(self.source.weights), dict(self.source.segments))
        self.chosen = {name for node in self.graph.nodes for name in node.outputs if name in chosen}
        self.producers = {name: node for node in self.graph.nodes for name in node.outputs}
        self.int8 = self._int8_values()
        self.group = self._groups()
        self.ranges = self._merged(ranges)
        self.scales = {name: own.scale(method) for name, own in self.ranges.items()}
        self.nodes: list[Node] = []
        self.int8_weights: dict[str, str] = {}
        self.converted: dict[tuple[str, DType], str] = {}

    def run(self) -> StoredNetwork:
        for node in self.source.graph.copy().nodes:
            if self._is_int8_conv(node):
                self._add_conv(node)
            elif node.op == "linear" and self._is_chosen(node):
                node.inputs = self._float_inputs(node)
                self.nodes.append(self._linear(node))
            elif self._is_int8_move(node):
                self._add_move(node)
            else:
                node.inputs = self._float_inputs(node)
                self.nodes.append(node)
        self.graph.nodes = self.nodes
        return self.result

    # Which values are int8.

    def _is_chosen(self, node: Node) -> bool:
        return node.outputs[0] in self.chosen

    def _is_int8_conv(self, node: Node) -> bool:
        return is_conv(node) and self._is_chosen(node)

    def _is_int8_move(self, node: Node) -> bool:
        return node.op in _MOVES and node.outputs[0] in self.int8

    def _int8_values(self) -> set[str]:
        """Return the values that int8 convolutions give, directly or moved, and that another one reads."""
        able: set[str] = set()
        for node in self.graph.nodes:
            moved = [o.name for o in node.inputs if o.kind == "value"]
            if self._is_int8_conv(node) or (node.op in _MOVES and moved and all(name in able for name in moved)):
                able.update(name for name in node.outputs if name not in self.graph.outputs)
        wanted: set[str] = set()
        for node in reversed(self.graph.nodes):
            moves = node.op in _MOVES and node.outputs[0] in wanted and node.outputs[0] in able
            if self._is_int8_conv(node) or moves:
                wanted.update(o.name for o in node.inputs if o.kind == "value")
        return able & wanted

    def _groups(self) -> dict[str, str]:
        """Return, for each int8 value, one that stands for all that share its scale."""
        group = {name: name for name in self.int8}
        for node in self.graph.nodes:
            if not self._is_int8_move(node):
                continue
            own = group[node.outputs[0]]
            for operand in node.inputs:
                if operand.kind == "value":
                    other = group[operand.name]
                    group = {name: own if root == other else root for name, root in group.items()}
        return group

    def _merged(self, ranges: dict[str, Range]) -> dict[str, Range]:
        merged: dict[str, Range] = {}
        for name, root in self.group.items():
            if root not in merged:
                merged[root] = Range()
            merged[root].merge(ranges[name])
        return {**ranges, **{name: merged[root] for name, root in self.group.items()}}

    def _type_of(self, name: str) -> DType:
        return DType.I8 if self.ranges[name].is_signed else DType.U8

    # Nodes.

    def _add_conv(self, node: Node) -> None:
        x, residual = node.inputs[_X].name, node.inputs[_RESIDUAL]
        inputs = list(node.inputs)
        inputs[_X] = Operand("value", self._as_int8(x))
        weight = self.graph.weights.get(inputs[_WEIGHT].name) or self.source.graph.weights[inputs[_WEIGHT].name]
        if weight.layout != Layout.ROWS_F32:
            inputs[_WEIGHT] = Operand("weight", self._int8_weight(weight, node.op))
        attrs = dict(node.attrs)
        if node.op == "conv_winograd":
            attrs |= _WINOGRAD_WINDOW
        attrs["x_scale"], attrs["residual_scale"], attrs["y_scale"] = self.scales[x], 0.0, 0.0
        if residual.kind == "value" and residual.name in self.int8:
            attrs["residual_scale"] = self.scales[residual.name]
        (out,) = node.outputs
        attrs["dtype"] = DType.F32.name.lower()
        if out in self.int8:
            attrs["y_scale"], attrs["dtype"] = self.scales[out], self._type_of(out).name.lower()
            self.graph.values[out].dtype = self._type_of(out)
        self.nodes.append(Node("conv_int8", node.name, inputs, [out], attrs))

    def _linear(self, node: Node) -> Node:
        inputs = list(node.inputs)
        inputs[_WEIGHT] = Operand("weight", self._int8_weight(self.source.graph.weights[inputs[_WEIGHT].name], node.op))
        return Node("linear", node.name, inputs, node.outputs, {**node.attrs, "scheme": "w8a8"})

    def _add_move(self, node: Node) -> None:
        for name in node.outputs:
            self.graph.values[name].dtype = self._type_of(name)
        self.nodes.append(node)

    def _int8_weight(self, weight: Weight, op: str) -> str:
        """Return the name of a weight in int8; the first use adds it."""
        if weight.name not in self.int8_weights:
            name = _free_name(f"{weight.name}.int8", self.graph.weights)
            cols, self.result.weights[name] = self.weights.get(weight.name, op)
            self.graph.weights[name] = Weight(name, weight.rows, cols, Layout.T16_I8, ())
            self.int8_weights[weight.name] = name
        return self.int8_weights[weight.name]

    # Conversions.

    def _as_int8(self, name: str) -> str:
        return name if name in self.int8 else self._convert(name, self._type_of(name), self.scales[name])

    def _float_inputs(self, node: Node) -> list[Operand]:
        def as_float(operand: Operand) -> Operand:
            if operand.kind != "value" or operand.name not in self.int8:
                return operand
            return Operand("value", self._convert(operand.name, DType.F32, self.scales[operand.name]))

        return [as_float(operand) for operand in node.inputs]

    def _convert(self, name: str, dtype: DType, scale: float) -> str:
        """Return the value ``name`` in another type; the first use adds the node."""
        key = (name, dtype)
        if key not in self.converted:
            made = _free_name(f"{name}.{dtype.name.lower()}", self.graph.values)
            self.graph.values[made] = Value(made, dtype, (), sizes=self.graph.values[name].sizes)
            self._add_requantize(name, made, dtype, scale)
            self.converted[key] = made
        return self.converted[key]

    def _add_requantize(self, name: str, made: str, dtype: DType, scale: float) -> None:
        to_float = dtype == DType.F32
        attrs = {"x_scale": scale if to_float else 0.0, "y_scale": 0.0 if to_float else scale}
        operand = [Operand("value", name)]
        self.nodes.append(Node("requantize", name, operand, [made], {**attrs, "dtype": dtype.name.lower()}))


def _free_name(name: str, used: Collection[str]) -> str:
    while name in used:
        name += "_"
    return name
