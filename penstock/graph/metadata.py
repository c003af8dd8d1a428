"""A Graph as the FlatBuffers metadata of a bundle, and back.

Written by hand over the ``flatbuffers`` runtime, so that neither a build nor a user needs ``flatc``; a test with
Debian's ``flatc`` proves that the bytes match ``core/bundle.fbs``.  Field numbers are positions in that schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flatbuffers
from flatbuffers import number_types as N
from flatbuffers.table import Table

from penstock.errors import InternalError
from penstock.graph.ir import (
    AttrValue,
    Dim,
    DType,
    Graph,
    Layout,
    Node,
    Operand,
    Part,
    Segment,
    State,
    Symbol,
    Value,
    Weight,
)
from penstock.ops.table import find_op

__all__ = ["FILE_IDENTIFIER", "decode", "encode"]

FILE_IDENTIFIER = b"PSMB"
_KINDS = ("none", "value", "weight", "state")
_ATTR_INT, _ATTR_FLOAT, _ATTR_STRING = 1, 2, 3


class _Encoder:
    """One buffer.  Every default is written out, so that the size does not depend on the numbers in it."""

    def __init__(self) -> None:
        self.builder = flatbuffers.Builder(1 << 16)
        self.builder.ForceDefaults(True)

    def text(self, value: str) -> int:
        return int(self.builder.CreateString(value))

    def offsets(self, items: Sequence[int]) -> int:
        self.builder.StartVector(4, len(items), 4)
        for item in reversed(items):
            self.builder.PrependUOffsetTRelative(item)
        return int(self.builder.EndVector())

    def ints(self, items: Sequence[int]) -> int:
        self.builder.StartVector(4, len(items), 4)
        for item in reversed(items):
            self.builder.PrependInt32(item)
        return int(self.builder.EndVector())

    def table(self, *fields: tuple[str, Any]) -> int:
        """A table of (kind, value) fields in schema order; strings and vectors are given as offsets."""
        self.builder.StartObject(len(fields))
        for slot, (kind, value) in enumerate(fields):
            if kind == "offset":
                self.builder.PrependUOffsetTRelativeSlot(slot, value, 0)
            else:
                getattr(self.builder, f"Prepend{kind}Slot")(slot, value, 0)
        return int(self.builder.EndObject())

    def dims(self, shape: Sequence[Dim], symbols: dict[str, int]) -> int:
        self.builder.StartVector(24, len(shape), 8)
        for dim in reversed(shape):
            self.builder.Prep(8, 24)
            self.builder.PrependInt64(dim.offset)
            self.builder.PrependInt64(dim.factor if dim.symbol is not None else 0)
            self.builder.Pad(4)
            self.builder.PrependInt32(-1 if dim.symbol is None else symbols[dim.symbol])
        return int(self.builder.EndVector())

    def operands(self, items: Sequence[tuple[int, int]]) -> int:
        self.builder.StartVector(8, len(items), 4)
        for kind, index in reversed(items):
            self.builder.Prep(4, 8)
            self.builder.PrependInt32(index)
            self.builder.PrependInt32(kind)
        return int(self.builder.EndVector())


def encode(graph: Graph, segments: Sequence[Segment]) -> bytes:
    """The metadata of ``graph`` in a file with ``segments``.  The same input gives the same bytes; the size depends
    on names and counts alone, not on offsets and checksums."""
    e = _Encoder()
    symbols = {symbol.name: index for index, symbol in enumerate(graph.symbols)}
    indices = {
        "value": {name: index for index, name in enumerate(graph.values)},
        "weight": {name: index for index, name in enumerate(graph.weights)},
        "state": {name: index for index, name in enumerate(graph.states)},
    }
    ops = sorted({node.op for node in graph.nodes})
    places = {segment.name: index for index, segment in enumerate(segments)}
    fields = [
        ("offset", e.text(graph.network)),
        ("offset", e.text(graph.scheme)),
        ("Int32", graph.vocab_size),
        ("Int32", graph.context_len),
        ("offset", _each(e, graph.symbols, _encode_symbol)),
        ("offset", _each(e, ops, lambda e, op: e.table(("offset", e.text(op)), ("Int32", find_op(op).version)))),
        ("offset", _each(e, list(graph.values.values()), lambda e, v: _encode_value(e, v, symbols, indices["value"]))),
        ("offset", _each(e, list(graph.weights.values()), lambda e, w: _encode_weight(e, w, places))),
        ("offset", _each(e, list(graph.states.values()), _encode_state)),
        ("offset", _each(e, graph.page_groups, lambda e, window: e.table(("Int32", window)))),
        ("offset", _each(e, graph.nodes, lambda e, node: _encode_node(e, node, ops, indices))),
        ("offset", e.ints([indices["value"][name] for name in graph.inputs])),
        ("Int32", indices["value"][graph.output]),
        ("offset", _each(e, segments, _encode_segment)),
        ("offset", _each(e, sorted(graph.properties.items()), _encode_property)),
    ]
    e.builder.Finish(e.table(*fields), FILE_IDENTIFIER)
    return bytes(e.builder.Output())


def _each(e: _Encoder, items: Sequence[Any], encode_one: Callable[[_Encoder, Any], int]) -> int:
    return e.offsets([encode_one(e, item) for item in items])


def _encode_symbol(e: _Encoder, symbol: Symbol) -> int:
    return e.table(("offset", e.text(symbol.name)), ("Int64", symbol.min), ("Int64", symbol.max))


def _encode_value(e: _Encoder, value: Value, symbols: dict[str, int], values: dict[str, int]) -> int:
    return e.table(
        ("offset", e.text(value.name)),
        ("Int32", int(value.dtype)),
        ("offset", e.dims(value.shape, symbols)),
        ("Int32", -1 if value.base is None else values[value.base]),
        ("Int64", value.offset),
    )


def _encode_weight(e: _Encoder, weight: Weight, segments: dict[str, int]) -> int:
    def encode_part(e: _Encoder, part: Part) -> int:
        return e.table(("offset", e.text(part.name)), ("Int64", part.row_start), ("Int64", part.num_rows))

    return e.table(
        ("offset", e.text(weight.name)),
        ("Int64", weight.rows),
        ("Int64", weight.cols),
        ("Int32", int(weight.layout)),
        ("Int32", segments[weight.segment]),
        ("Int64", weight.offset),
        ("Int64", weight.num_bytes),
        ("offset", _each(e, weight.parts, encode_part)),
    )


def _encode_state(e: _Encoder, state: State) -> int:
    return e.table(
        ("offset", e.text(state.name)),
        ("Int32", state.num_kv_heads),
        ("Int32", state.head_dim),
        ("Int32", state.group),
    )


def _encode_node(e: _Encoder, node: Node, ops: list[str], indices: dict[str, dict[str, int]]) -> int:
    operands = [
        (_KINDS.index(item.kind), 0 if item.kind == "none" else indices[item.kind][item.name]) for item in node.inputs
    ]
    return e.table(
        ("Int32", ops.index(node.op)),
        ("offset", e.text(node.name)),
        ("offset", e.operands(operands)),
        ("offset", e.ints([indices["value"][name] for name in node.outputs])),
        ("offset", _each(e, sorted(node.attrs.items()), _encode_attr)),
    )


def _encode_attr(e: _Encoder, attr: tuple[str, AttrValue]) -> int:
    name, value = attr
    kind = _ATTR_STRING if isinstance(value, str) else _ATTR_FLOAT if isinstance(value, float) else _ATTR_INT
    return e.table(
        ("offset", e.text(name)),
        ("Int32", kind),
        ("Int64", int(value) if kind == _ATTR_INT else 0),
        ("Float64", value if kind == _ATTR_FLOAT else 0.0),
        ("offset", e.text(value if isinstance(value, str) else "")),
    )


def _encode_segment(e: _Encoder, segment: Segment) -> int:
    return e.table(
        ("offset", e.text(segment.name)),
        ("Int64", segment.offset),
        ("Int64", segment.num_bytes),
        ("Uint32", segment.crc32),
    )


def _encode_property(e: _Encoder, item: tuple[str, str]) -> int:
    return e.table(("offset", e.text(item[0])), ("offset", e.text(item[1])))


class _Reader:
    """A table of a buffer that the core has validated."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def _at(self, slot: int) -> int:
        offset = self.table.Offset(4 + 2 * slot)
        return int(self.table.Pos + offset) if offset else 0

    def number(self, slot: int, flags: Any, otherwise: int | float = 0) -> Any:
        at = self._at(slot)
        return self.table.Get(flags, at) if at else otherwise

    def i32(self, slot: int, otherwise: int = 0) -> int:
        return int(self.number(slot, N.Int32Flags, otherwise))

    def i64(self, slot: int) -> int:
        return int(self.number(slot, N.Int64Flags))

    def text(self, slot: int) -> str:
        at = self._at(slot)
        return self.table.String(at).decode() if at else ""

    def vector(self, slot: int) -> tuple[int, int]:
        """Position of the first element, and their number."""
        offset = self.table.Offset(4 + 2 * slot)
        return (int(self.table.Vector(offset)), int(self.table.VectorLen(offset))) if offset else (0, 0)

    def tables(self, slot: int) -> list[_Reader]:
        start, count = self.vector(slot)
        return [_Reader(Table(self.table.Bytes, self.table.Indirect(start + 4 * i))) for i in range(count)]

    def structs(self, slot: int, stride: int, *fields: tuple[int, Any]) -> list[tuple[int, ...]]:
        start, count = self.vector(slot)
        return [
            tuple(int(self.table.Get(flags, start + stride * i + at)) for at, flags in fields) for i in range(count)
        ]

    def ints(self, slot: int) -> list[int]:
        return [item for (item,) in self.structs(slot, 4, (0, N.Int32Flags))]


def decode(buffer: bytes) -> tuple[Graph, list[Segment]]:
    """The inverse of ``encode``.  ``buffer`` must have passed the core's validation."""
    position = flatbuffers.encode.Get(N.UOffsetTFlags.packer_type, buffer, 0)
    root = _Reader(Table(bytearray(buffer), position))
    segments = [Segment(s.text(0), s.i64(1), s.i64(2), int(s.number(3, N.Uint32Flags))) for s in root.tables(13)]
    graph = Graph(root.text(0), root.text(1), root.i32(2), root.i32(3))
    graph.symbols = [Symbol(s.text(0), s.i64(1), s.i64(2)) for s in root.tables(4)]
    ops = [op.text(0) for op in root.tables(5)]
    value_names = [value.text(0) for value in root.tables(6)]
    for item in root.tables(6):
        value = _decode_value(item, graph.symbols, value_names)
        graph.values[value.name] = value
    for item in root.tables(7):
        weight = _decode_weight(item, segments)
        graph.weights[weight.name] = weight
    for item in root.tables(8):
        graph.states[item.text(0)] = State(item.text(0), item.i32(1), item.i32(2), item.i32(3))
    graph.page_groups = [item.i32(0) for item in root.tables(9)]
    names = {"value": value_names, "weight": list(graph.weights), "state": list(graph.states)}
    graph.nodes = [_decode_node(item, ops, names) for item in root.tables(10)]
    graph.inputs = [value_names[index] for index in root.ints(11)]
    graph.output = value_names[root.i32(12)]
    graph.properties = {item.text(0): item.text(1) for item in root.tables(14)}
    return graph, segments


def _decode_value(item: _Reader, symbols: list[Symbol], names: list[str]) -> Value:
    shape = tuple(
        Dim(None if symbol < 0 else symbols[symbol].name, factor, offset)
        for symbol, factor, offset in item.structs(2, 24, (0, N.Int32Flags), (8, N.Int64Flags), (16, N.Int64Flags))
    )
    base = item.i32(3, -1)
    return Value(item.text(0), DType(item.i32(1)), shape, None if base < 0 else names[base], item.i64(4))


def _decode_weight(item: _Reader, segments: list[Segment]) -> Weight:
    parts = tuple(Part(p.text(0), p.i64(1), p.i64(2)) for p in item.tables(7))
    segment = segments[item.i32(4)].name
    return Weight(item.text(0), item.i64(1), item.i64(2), Layout(item.i32(3)), parts, segment, item.i64(5), item.i64(6))


def _decode_node(item: _Reader, ops: list[str], names: dict[str, list[str]]) -> Node:
    def operand(kind: int, index: int) -> Operand:
        return Operand("none") if kind == 0 else Operand(_KINDS[kind], names[_KINDS[kind]][index])

    def attr(a: _Reader) -> AttrValue:
        match a.i32(1):
            case 1:
                return a.i64(2)
            case 2:
                return float(a.number(3, N.Float64Flags, 0.0))
            case 3:
                return a.text(4)
            case kind:
                raise InternalError(f"metadata: attribute {a.text(0)} has type {kind}")

    inputs = [operand(kind, index) for kind, index in item.structs(2, 8, (0, N.Int32Flags), (4, N.Int32Flags))]
    outputs = [names["value"][index] for index in item.ints(3)]
    return Node(ops[item.i32(0)], item.text(1), inputs, outputs, {a.text(0): attr(a) for a in item.tables(4)})
