"""Encode a Graph as the metadata of a bundle, the FlatBuffers tables of core/bundle.fbs, and decode it.

Field numbers are positions in the schema.  Every field is written, including defaults, so that the size of the metadata
does not depend on its numbers: the writer reserves the space before it knows the checksums.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from functools import cache

from flatbuffers import number_types as types

from penstock.core.metadata import FlatTable, StoredWeight, stored_weights
from penstock.errors import InvalidArgumentError
from penstock.graph.ir import (
    GENERAL_NETWORK,
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
from penstock.graph.table_writer import Field, TableWriter
from penstock.ops.table import find_op

__all__ = ["decode_metadata", "encode_metadata", "with_segments"]

_KINDS = ("none", "value", "weight", "state")
_IDENTIFIER = b"PSMB"
_DIM = struct.Struct("<i4xqq")
_PAIR = struct.Struct("<ii")
_LONG = struct.Struct("<q")


class _MetadataEncoder:
    def __init__(self, graph: Graph, segments: Sequence[Segment]) -> None:
        self.graph = graph
        self.segments = segments
        self.is_general = graph.kind == GENERAL_NETWORK
        self.writer = TableWriter()
        self.table, self.string, self.offsets, self.ints = (
            self.writer.table, self.writer.string, self.writer.offsets, self.writer.ints)  # fmt: skip
        self.ops = list(dict.fromkeys(node.op for node in graph.nodes))
        self.values = _bases_first(graph)
        self.symbols = {symbol.name: i for i, symbol in enumerate(graph.symbols)}
        self.index = {
            "value": {value.name: i for i, value in enumerate(self.values)},
            "weight": {name: i for i, name in enumerate(graph.weights)},
            "state": {name: i for i, name in enumerate(graph.states)},
            "segment": {segment.name: i for i, segment in enumerate(segments)},
        }

    def find(self, kind: str, name: str) -> int:
        try:
            return self.index[kind][name]
        except KeyError:
            raise InvalidArgumentError(f"graph: expected a {kind} named {name!r}, got none", param="graph") from None

    def dims(self, shape: Sequence[Dim]) -> Field:
        dims = []
        for dim in shape:
            if dim.symbol is not None and dim.symbol not in self.symbols:
                raise InvalidArgumentError(f"graph: expected a declared symbol, got {dim.symbol!r}", param="graph")
            dims.append(_DIM.pack(-1 if dim.symbol is None else self.symbols[dim.symbol], dim.factor, dim.offset))
        return self.writer.vector(b"".join(dims), len(dims), 8)

    def operands(self, operands: Sequence[Operand]) -> Field:
        numbers = [(_KINDS.index(o.kind), 0 if o.kind == "none" else self.find(o.kind, o.name)) for o in operands]
        return self.writer.vector(b"".join(_PAIR.pack(*pair) for pair in numbers), len(numbers))

    def value(self, value: Value) -> int:
        base = -1 if value.base is None else self.find("value", value.base)
        fields: tuple[Field, ...] = (
            self.string(value.name), ("int", value.dtype), self.dims(value.shape), ("int", base),
            ("long", value.offset),
        )  # fmt: skip
        if self.is_general:
            constant = -1 if value.weight is None else self.find("weight", value.weight)
            fields = (*fields, self.string(value.sizes), ("int", constant))
        return self.table(*fields)

    def symbol(self, symbol: Symbol) -> int:
        numbers = (symbol.min, symbol.max, *((symbol.multiple, symbol.example) if self.is_general else ()))
        return self.table(self.string(symbol.name), *(("long", number) for number in numbers))

    def weight(self, weight: Weight) -> int:
        parts = [
            self.table(self.string(part.name), ("long", part.row_start), ("long", part.num_rows))
            for part in weight.parts
        ]
        shape: tuple[Field, ...] = ()
        if self.is_general:
            shape = (self.writer.vector(b"".join(map(_LONG.pack, weight.shape)), len(weight.shape), 8),)
        return self.table(
            self.string(weight.name),
            ("long", weight.rows),
            ("long", weight.cols),
            ("int", weight.layout),
            ("int", self.find("segment", weight.segment)),
            ("long", weight.offset),
            ("long", weight.num_bytes),
            self.offsets(parts),
            *shape,
        )

    def attr(self, name: str, value: AttrValue, is_float: bool) -> int:
        kind = 3 if isinstance(value, str) else 2 if is_float or isinstance(value, float) else 1
        return self.table(
            self.string(name),
            ("int", kind),
            ("long", int(value) if kind == 1 else 0),
            ("double", float(value) if kind == 2 else 0.0),
            self.string(str(value) if kind == 3 else ""),
        )

    def node(self, node: Node) -> int:
        floats = _float_attrs(node.op)
        attrs = self.offsets([self.attr(name, value, name in floats) for name, value in node.attrs.items()])
        outputs = self.ints([self.find("value", name) for name in node.outputs])
        fields = (("int", self.ops.index(node.op)), self.string(node.name), self.operands(node.inputs))
        return self.table(*fields, outputs, attrs)

    def encode(self) -> bytes:
        g = self.graph
        encode_all: Callable[..., Field] = lambda items, make: self.offsets([make(item) for item in items])  # noqa: E731
        states = list(g.states.values())
        fields = (
            self.string(g.network),
            self.string(g.scheme),
            ("int", g.vocab_size),
            ("int", g.context_len),
            encode_all(g.symbols, self.symbol),
            encode_all(self.ops, lambda name: self.table(self.string(name), ("int", find_op(name).version))),
            encode_all(self.values, self.value),
            encode_all(g.weights.values(), self.weight),
            encode_all(states, lambda s: self.table(self.string(s.name), *(("int", n) for n in _state_numbers(s)))),
            encode_all(g.page_groups, lambda window: self.table(("int", window))),
            encode_all(g.nodes, self.node),
            self.ints([self.find("value", name) for name in g.inputs]),
            ("int", -1 if self.is_general else self.find("value", g.output)),
            encode_all(self.segments, self.segment),
            encode_all(g.properties.items(), lambda p: self.table(self.string(p[0]), self.string(p[1]))),
            *self.general_fields(),
        )
        return self.writer.finish(self.table(*fields), _IDENTIFIER)

    def general_fields(self) -> tuple[Field, ...]:
        """Return the fields that only general networks have, so that other metadata keeps its bytes."""
        if not self.is_general:
            return ()
        return ("int", self.graph.kind), self.ints([self.find("value", name) for name in self.graph.outputs])

    def segment(self, segment: Segment) -> int:
        numbers = (("long", segment.offset), ("long", segment.num_bytes), ("uint", segment.crc32))
        return self.table(self.string(segment.name), *numbers)


def _state_numbers(state: State) -> tuple[int, ...]:
    numbers = (state.num_kv_heads, state.head_dim, state.group)
    if state.latent_dim:
        return (*numbers, int(state.recurrent), state.latent_dim)
    return (*numbers, int(state.recurrent)) if state.recurrent else numbers


@cache
def _float_attrs(op: str) -> frozenset[str]:
    """Return the attributes of an op that are floats, even if a caller passed an int."""
    return frozenset(re.findall(r"float (\w+)", find_op(op).schema))


def _bases_first(graph: Graph) -> list[Value]:
    """Return the values in their order, except that every view comes after its base."""
    done: dict[str, Value] = {}
    for value in graph.values.values():
        chain = [value]
        while chain[-1].base is not None and chain[-1].base not in done:
            base = graph.values.get(chain[-1].base)
            if base is None or base in chain:
                raise InvalidArgumentError(
                    f"graph: expected a valid base for the view {value.name!r}, got none", param="graph"
                )
            chain.append(base)
        done.update((item.name, item) for item in reversed(chain))
    return list(done.values())


def encode_metadata(graph: Graph, segments: Sequence[Segment]) -> bytes:
    """Return the metadata bytes.  Equal arguments give equal bytes; other numbers give bytes of the same size."""
    return _MetadataEncoder(graph, segments).encode()


def with_segments(metadata: bytes, segments: Sequence[Segment]) -> bytes:
    """Return the bytes of ``encode_metadata`` for segments with the same names and other numbers, much faster."""
    data = bytearray(metadata)
    rows = FlatTable(metadata, int.from_bytes(metadata[:4], "little")).rows(13)
    for row, segment in zip(rows, segments, strict=True):
        row.replace(data, 1, "<q", segment.offset)
        row.replace(data, 2, "<q", segment.num_bytes)
        row.replace(data, 3, "<I", segment.crc32)
    return bytes(data)


def _decode_value(row: FlatTable, names: Sequence[str], symbols: Sequence[str], weights: Sequence[str]) -> Value:
    members = [(0, types.Int32Flags), (8, types.Int64Flags), (16, types.Int64Flags)]
    shape = tuple(
        Dim(None if symbol < 0 else symbols[symbol], factor, offset)
        for symbol, factor, offset in row.structs(2, 24, members)
    )
    base, weight = row.number(3, otherwise=-1), row.number(6, otherwise=-1)
    return Value(
        row.string(0), DType(row.number(1)), shape, None if base < 0 else names[base], row.long(4), row.string(5),
        None if weight < 0 else weights[weight],
    )  # fmt: skip


def _decode_weight(stored: StoredWeight) -> Weight:
    parts = tuple(Part(*part) for part in stored.parts)
    at = (stored.segment, stored.offset, stored.num_bytes)
    return Weight(stored.name, stored.rows, stored.cols, Layout(stored.layout), parts, *at, stored.shape)


def _decode_attrs(rows: Sequence[FlatTable]) -> dict[str, AttrValue]:
    attrs: dict[str, AttrValue] = {}
    for row in rows:
        kind = row.number(1)
        attrs[row.string(0)] = (
            row.long(2) if kind == 1 else float(row.number(3, types.Float64Flags)) if kind == 2 else row.string(4)
        )
    return attrs


def decode_metadata(data: bytes) -> tuple[Graph, list[Segment]]:
    """Return the graph and the segments of metadata that the core has validated."""
    root = FlatTable(data, int.from_bytes(data[:4], "little"))
    segments = [
        Segment(row.string(0), row.long(1), row.long(2), int(row.number(3, types.Uint32Flags))) for row in root.rows(13)
    ]
    symbols = [Symbol(row.string(0), row.long(1), row.long(2), row.long(3) or 1, row.long(4)) for row in root.rows(4)]
    ops = [row.string(0) for row in root.rows(5)]
    names = [row.string(0) for row in root.rows(6)]
    weights = [_decode_weight(stored) for stored in stored_weights(data)]
    sizes = [symbol.name for symbol in symbols]
    values = [_decode_value(row, names, sizes, [weight.name for weight in weights]) for row in root.rows(6)]
    states = [
        State(r.string(0), r.number(1), r.number(2), r.number(3), bool(r.number(4)), r.number(5)) for r in root.rows(8)
    ]
    tables = {
        "value": names,
        "weight": [weight.name for weight in weights],
        "state": [state.name for state in states],
    }

    def operand(kind: int, index: int) -> Operand:
        return Operand("none") if kind == 0 else Operand(_KINDS[kind], tables[_KINDS[kind]][index])

    pair = [(0, types.Int32Flags), (4, types.Int32Flags)]
    nodes = [
        Node(
            ops[row.number(0)],
            row.string(1),
            [operand(kind, index) for kind, index in row.structs(2, 8, pair)],
            [names[index] for index in row.ints(3)],
            _decode_attrs(row.rows(4)),
        )
        for row in root.rows(10)
    ]
    graph = Graph(
        network=root.string(0),
        scheme=root.string(1),
        vocab_size=root.number(2),
        context_len=root.number(3),
        symbols=symbols,
        values={value.name: value for value in values},
        weights={weight.name: weight for weight in weights},
        states={state.name: state for state in states},
        page_groups=[row.number(0) for row in root.rows(9)],
        nodes=nodes,
        inputs=[names[index] for index in root.ints(11)],
        output="" if root.number(12) < 0 else names[root.number(12)],
        properties={row.string(0): row.string(1) for row in root.rows(14)},
        kind=root.number(15),
        outputs=[names[index] for index in root.ints(16)],
    )
    return graph, segments
