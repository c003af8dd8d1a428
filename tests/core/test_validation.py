"""Bundles made by a hostile hand: each rule of the validator refuses its own, naming the field."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock.graph.metadata as metadata
from penstock.core.native import Model, crc32, layout_bytes
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.graph.bundle import BundleWriter
from penstock.graph.ir import Dim, DType, Graph, Layout, Node, Operand, Part, Segment, Symbol, Value
from penstock.ops.table import Op
from tests.support.errors import raises
from tests.support.tiny_graph import B, P, R, T, c, tiny_graph, value, write_bundle

Patch = Callable[[Graph], None]


def node(graph: Graph, op: str, which: int = 0) -> Node:
    return [n for n in graph.nodes if n.op == op][which]


def attr(op: str, name: str, new: float | str) -> Patch:
    return lambda g: node(g, op).attrs.__setitem__(name, new)


def attrs(op: str, **new: float | str) -> Patch:
    return lambda g: node(g, op).attrs.update(new)


def output_of(op: str, new: str) -> Patch:
    return lambda g: node(g, op).outputs.__setitem__(0, new)


def all_states(**changes: object) -> Patch:
    return lambda g: g.states.update({k: dataclasses.replace(s, **changes) for k, s in g.states.items()})


def drop_attr(op: str, name: str) -> Patch:
    return lambda g: node(g, op).attrs.__delitem__(name)


def operand(op: str, at: int, new: Operand) -> Patch:
    return lambda g: node(g, op).inputs.__setitem__(at, new)


def shape(name: str, *dims: Dim) -> Patch:
    return lambda g: setattr(g.values[name], "shape", dims)


def field(name: str, new: object) -> Patch:
    return lambda g: setattr(g, name, new)


def of_value(name: str, **changes: object) -> Patch:
    return lambda g: g.values.__setitem__(name, dataclasses.replace(g.values[name], **changes))


def of_state(**changes: object) -> Patch:
    return lambda g: g.states.update({k: dataclasses.replace(s, **changes) for k, s in list(g.states.items())[:1]})


def swap_nodes(graph: Graph) -> None:
    graph.nodes[0], graph.nodes[2] = graph.nodes[2], graph.nodes[0]


def repeat_node(graph: Graph) -> None:
    graph.nodes.insert(1, graph.nodes[0])


def symbols(*new: Symbol) -> Patch:
    return field("symbols", list(new))


GOOD = (Symbol("T", 1, 64), Symbol("B", 1, 8), Symbol("P", 1, 8), Symbol("R", 0, 64))


def twice(graph: Graph) -> None:
    graph.symbols = [*GOOD[:2], GOOD[3], Symbol("T", 1, 9)]
    graph.values["page_tables"].shape = (c(1), B, B)


QKV = "layers.0.attn.qkv"


def indices_apart(graph: Graph) -> None:
    """Positions that are every fifth of some numbers."""
    some = {"of": (DType.F32, (T, c(5)), None), "ids": (DType.I32, (T, c(5)), None), "best": (DType.I32, (T,), "ids")}
    some["turned"] = (DType.F32, (T, c(8)), None)
    for name, (dtype, dims, base) in some.items():
        graph.values[name] = Value(name, dtype, dims, base)
    topk = Node("topk", "few", [value("hidden")], ["of", "ids"], {"k": 5})
    inputs = [value("best"), Operand("weight", "inv_freq")]
    again = Node("rotary_embedding", "again", inputs, ["turned"], {"scaling": 1.0})
    graph.nodes[1:1] = [topk, again]


RULES: dict[str, tuple[Patch, str, str]] = {
    "control_characte": (field("network", "tiny\x9b2J"), "metadata.network", "expected printable UTF-8"),
    "vocab_size": (field("vocab_size", 0), "metadata.vocab_size", "expected 1 to"),
    "context_len": (field("context_len", 1 << 25), "metadata.context_len", "expected 1 to"),
    "symbol_twice": (twice, "symbols[3].name", "T is declared twice"),
    "symbol_max": (symbols(Symbol("T", 1, 1 << 40), *GOOD[1:]), "symbols[0]", "expected min 0 or 1 and max"),
    "symbol_min": (symbols(Symbol("T", 2, 64), *GOOD[1:]), "symbols[0]", "expected min 0 or 1 and max"),
    "window": (field("page_groups", [-1]), "page_groups[0].window", "expected 0 to"),
    "input_shape": (shape("positions", R), "inputs[1]", r"expected i32 \[T\], got i32 \[R\]"),
    "input_tables": (shape("page_tables", c(2), B, P), "inputs[3]", r"expected i32 \[1, B, P\]"),
    "input_twice": (lambda g: g.inputs.__setitem__(1, "token_ids"), "inputs[1]", "value 0 is an input already"),
    "output_shape": (field("output", "hidden"), "metadata.output", r"expected f32 \[R, 101\], or.*got f32 \[T, 32\]"),
    "value_dtype": (of_value("hidden", dtype=DType.F16), "values[5].dtype", "expected f32 or i32, got f16"),
    "value_rank": (shape("hidden"), "values[5].shape", "expected 1 to 4 dims, got none"),
    "value_symbol_inside": (shape("hidden", T, T), "values[5].shape[1]", "expected a constant"),
    "value_zero": (shape("hidden", T, c(0)), "values[5].shape[1]", "expected a constant of at least 1"),
    "value_negative": (shape("hidden", T, c(-4)), "values[5].shape[1]", "expected a size from 0"),
    "value_facto": (shape("hidden", Dim("T", -1), c(32)), "values[5].shape[0]", "expected a factor from 1"),
    "value_huge": (shape("hidden", T, c(1 << 31), c(1 << 31)), "values[5].shape", "expected rows of at most"),
    "value_offset": (of_value("hidden", offset=1), "values[5].offset", "expected 0 without a base"),
    "view_rows": (shape(f"{QKV[:-4]}.q", R, c(4), c(8)), "values[9].shape", "expected as many rows as its base"),
    "view_end": (of_value(f"{QKV[:-4]}.v", offset=49), "values[11].offset", "expected 16 elements within the 64"),
    "view_before": (of_value(f"{QKV[:-4]}.v", offset=-1), "values[11].offset", "expected 16 elements within the 64"),
    "view_dtype": (of_value(f"{QKV[:-4]}.v", dtype=DType.I32), "values[11].dtype", "expected f32, that of its base"),
    "inferred_shape": (shape("hidden", T, c(33)), "outputs[0]", r"inferred f32 \[T, 32\], the file says f32 \[T, 33\]"),
    "inferred_rows": (shape("hidden", R, c(32)), "outputs[0]", r"nodes\[0\] .*outputs\[0\]: inferred f32 \[T, 32\]"),
    "used_before": (swap_nodes, "inputs[0]", r"nodes\[0\] .*is used before it is defined"),
    "defined_twice": (repeat_node, "outputs[0]", r"nodes\[1\] .*outputs\[0\]: value 5 \(hidden\) is defined twice"),
    "output_view": (output_of("silu_mul", "layers.0.mlp.gate"), "outputs[0]", "expected .* its own, got the view"),
    "num_inputs": (lambda g: node(g, "rms_norm").inputs.pop(), "inputs", "expected 2 for .*got 1"),
    "num_outputs": (lambda g: node(g, "rms_norm").outputs.pop(), "outputs", "expected 1, got 0"),
    "kind": (operand("rms_norm", 1, value("hidden")), "weight", "expected a weight, got a value"),
    "required": (operand("rms_norm", 1, Operand("none")), "weight", "expected a weight, got nothing"),
    "attr_missing": (drop_attr("rms_norm", "eps"), "eps", "the attribute is missing"),
    "attr_unknown": (attr("rms_norm", "extra", 1), "extra", "not an attribute of rms_norm"),
    "attr_type": (attr("embedding", "dim", "32"), "dim", "expected an attribute of type int, got type string"),
    "attr_nan": (attr("rms_norm", "eps", math.nan), "eps", "expected a finite number, got nan"),
    "attr_overflow": (attr("attention", "scale", 1e300), "scale", r"expected a finite number, got 1e\+300"),
    "attr_bool": (attr("rope", "interleaved", 2), "interleaved", "expected 0 or 1, got 2"),
    "eps": (attr("rms_norm", "eps", -1.0), "eps", "expected 0 to 1, got -1"),
    "softcap": (attr("attention", "softcap", -1.0), "softcap", "expected 0 or more"),
    "attention_window": (attr("attention", "window", -1), "window", "expected 0 to"),
    "group_range": (attr("attention", "group", 1), "group", "expected less than the 1 page tables, got 1"),
    "embedding_dim": (attr("embedding", "dim", 31), "dim", "expected the weight's 32 columns, got 31"),
    "embedding_ids": (operand("embedding", 0, value("request_starts")), "ids", "expected token ids or positions"),
    "embedding_rows": (field("vocab_size", 102), "ids", r"nodes\[0\] .*ids: expected .* that the weight's 101 rows"),
    "out_features": (attr("linear", "out_features", 63), "out_features", "expected the weight's 64 rows, got 63"),
    "linear_x": (operand("linear", 0, value("cos_sin")), "x", r"expected rows of 32, .* got f32 \[T, 8\]"),
    "linear_layout": (attr("linear", "scheme", "w8a8"), "weight", "expected layout t16_i8 for scheme w8a8"),
    "bias": (operand("linear", 2, Operand("weight", "inv_freq")), "bias", r"expected a rows_f32 weight \[1, 64\]"),
    "norm_weight": (operand("rms_norm", 1, Operand("weight", "inv_freq")), "weight", r"rows_f32 .*\[1, 32\]"),
    "residual": (operand("add_rms_norm", 1, value("cos_sin")), "residual", "expected f32 .* as x has"),
    "rope_rank": (operand("rope", 0, value("hidden")), "x", "expected f32 with 3 to 3 dims"),
    "rope_table": (operand("rope", 1, value("hidden")), "cos_sin", "expected the rows of x"),
    "positions_copy": (operand("attention", 2, value("token_ids")), "positions", "expected the graph's input, value 1"),
    "gather_rows": (operand("gather_rows", 1, value("positions")), "rows", "expected indices below the number of rows"),
    "indices_apart": (indices_apart, "inputs[0]", "expected contiguous indices, got some 5 apart"),
    "kv_heads": (of_state(num_kv_heads=0), "states[0].num_kv_heads", "expected 1 to"),
    "head_dim": (of_state(head_dim=1 << 20), "states[0].head_dim", "expected 1 to"),
    "latent_dim": (of_state(num_kv_heads=1, latent_dim=8), "states[0].latent_dim", r".* less than head_dim \(8\)"),
    "latent_heads": (of_state(latent_dim=4), "states[0].latent_dim", ".* 0 with 2 heads, got 4"),
    "latent_state": (all_states(num_kv_heads=1, latent_dim=4), "state", "expected pages of keys and values"),
    "state_group": (of_state(group=5), "states[0].group", "expected less than 1, got 5"),
    "states_diffe": (of_state(head_dim=4), "states[1]", r"expected 2 heads of 4 as states\[0\]"),
    "state_recurrent": (of_state(recurrent=2), "states[0].recurrent", "expected 0 or 1, got 2"),
    "states_recurrent": (of_state(recurrent=True), "states[1].recurrent", r"expected 1, as states\[0\]"),
    "state_of_keys": (all_states(recurrent=True), "state", "expected keys and values, got a recurrent state"),
    "states_heads": (all_states(num_kv_heads=3), "k", r"expected the state's 3 heads, got f32 \[T, 2, 8\]"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_hostile_graph_is_refused_by_field(rule: str, tmp_path: Path) -> None:
    patch, param, message = RULES[rule]
    path = write_bundle(tmp_path / "x.psm", tiny_graph(), patch=patch)
    with raises(InvalidFileError, param=param, match=message) as caught:
        Model.open(path)
    assert str(caught.value).startswith(f"{path}: ")


UNSUPPORTED: dict[str, tuple[Patch, str]] = {
    "scheme": (attr("linear", "scheme", "w2a2"), 'scheme: "w2a2" is not a linear scheme'),
}


@pytest.mark.parametrize("rule", UNSUPPORTED)
def test_newer_formats_are_refused_by_name(rule: str, tmp_path: Path) -> None:
    patch, message = UNSUPPORTED[rule]
    with raises(UnsupportedError, param="scheme", match=message):
        Model.open(write_bundle(tmp_path / "x.psm", tiny_graph(), patch=patch))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Op("rms_norm", 2, "", 0), "rms_norm .* version 1, .* version 2"),
        (None, "no op rms_morn"),
    ],
)
def test_newer_and_unknown_ops_are_refused_by_name(
    op: Op | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = metadata.find_op
    if op is not None:
        monkeypatch.setattr(metadata, "find_op", lambda name: op if name == op.name else find(name))
    path = write_bundle(tmp_path / "x.psm", tiny_graph(), patch=lambda _: None)
    if op is None:
        rewrite(path, lambda data: data.replace(b"rms_norm\0", b"rms_morn\0"))
    with raises(UnsupportedError, param="ops[2]", match=message):
        Model.open(path)


def test_a_window_wider_than_its_page_group_is_refused(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "x.psm", tiny_graph(windows=(32,)), patch=attr("attention", "window", 33))
    with raises(InvalidFileError, param="window"):
        Model.open(path)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the metadata and mends its checksum."""
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data, 24)[0]
    new = change(data[64 : 64 + size])
    assert len(new) == size
    header = bytearray(data[:64])
    struct.pack_into("<I", header, 32, crc32(new))
    path.write_bytes(bytes(header) + new + data[64 + size :])


def of_weight(name: str, **changes: object) -> Callable[[Graph, list[Segment]], None]:
    return lambda g, _: g.weights.__setitem__(name, dataclasses.replace(g.weights[name], **changes))


def of_segment(index: int, **changes: object) -> Callable[[Graph, list[Segment]], None]:
    return lambda _, segments: segments.__setitem__(index, dataclasses.replace(segments[index], **changes))


FIRST = "embed.weight"
STORAGE: dict[str, tuple[Callable[[Graph, list[Segment]], None], str, str]] = {
    "rows_zero": (of_weight(FIRST, rows=0), "rows", r"weights\[0\] \(embed.weight\): rows: expected 1 to"),
    "rows_huge": (of_weight(FIRST, rows=1 << 62), "rows", r"weights\[0\] .*rows: expected 1 to"),
    "product": (of_weight(FIRST, rows=1 << 31, cols=1 << 31), "weights[0]", "rows x cols"),
    "bytes": (of_weight(FIRST, num_bytes=64), "weights[0].bytes", r"expected 12928 for rows_f32 \[101, 32\], got 64"),
    "layout": (of_weight(FIRST, layout=Layout.T16_F32), "weights[0].bytes", "expected 14336 for t16_f32"),
    "unaligned": (of_weight(FIRST, offset=32), "weights[0].offset", "expected a multiple of 64, got 32"),
    "negative": (of_weight(FIRST, offset=-64), "weights[0].offset", "expected a multiple of 64, got -64"),
    "outside": (of_weight(FIRST, offset=1 << 40), "weights[0].offset", "expected a range within the segment's"),
    "wrapping": (of_weight(FIRST, offset=(1 << 63) - 64), "weights[0].offset", "expected a range within"),
    "overlap": (of_weight("inv_freq", offset=0), "weights", "overlaps"),
    "parts_gap": (of_weight(FIRST, parts=(Part("a", 1, 100),)), "weights[0].parts[0]", "expected rows from 0"),
    "parts_short": (of_weight(FIRST, parts=(Part("a", 0, 100),)), "weights[0].parts", "expected 101 rows in all"),
    "parts_long": (of_weight(FIRST, parts=(Part("a", 0, 102),)), "weights[0].parts[0]", "expected .* within 101"),
    "part_twice": (of_weight(FIRST, parts=(Part("inv_freq", 0, 101),)), "weights.parts[1].name", "inv_freq is used"),
    "segment_unaligned": (of_segment(0, offset=4097), "segments[0].offset", "expected a multiple of 4096"),
    "segment_on_metadata": (of_segment(0, offset=0), "segments[0].offset", r"expected at least \d+"),
    "segment_overlap": (of_segment(1, offset=12288), "segments[1].offset", r"expected at least \d+"),
    "segment_outside": (of_segment(1, num_bytes=1 << 40), "segments[1].bytes", "expected a range within the file's"),
    "segment_short": (of_segment(1, num_bytes=1), "segments", "expected the last to end with the file"),
    "segment_negative": (of_segment(1, num_bytes=-1), "segments[1].bytes", "expected a range within"),
}  # fmt: skip


@pytest.mark.parametrize("rule", STORAGE)
def test_hostile_storage_is_refused_by_field(rule: str, tmp_path: Path) -> None:
    change, param, message = STORAGE[rule]

    path = tmp_path / "x.psm"
    write_bundle(path, tiny_graph())
    graph, segments = metadata.decode_metadata(path.read_bytes()[64:])
    change(graph, segments)
    store(path, graph, segments)
    with raises(InvalidFileError, param=param, match=message):
        Model.open(path)


def store(path: Path, graph: Graph, segments: list[Segment]) -> None:
    """Replaces the metadata, which may change its size as long as the first segment stays where it is."""
    data = path.read_bytes()
    first = -(-(64 + struct.unpack_from("<Q", data, 24)[0]) // 4096) * 4096
    new = metadata.encode_metadata(graph, segments)
    assert 64 + len(new) <= first
    header = bytearray(data[:64])
    struct.pack_into("<Q", header, 24, len(new))
    struct.pack_into("<I", header, 32, crc32(new))
    path.write_bytes((bytes(header) + new).ljust(first, b"\0") + data[first:])


def test_unknown_layout_is_refused_by_name(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "x.psm", tiny_graph())
    graph, segments = metadata.decode_metadata(path.read_bytes()[64:])
    graph.weights[FIRST].layout = 99  # type: ignore[assignment]
    store(path, graph, segments)
    with raises(UnsupportedError, param="layout", match=r"weights\[0\] \(embed.weight\): layout: 99"):
        Model.open(path)


def test_layouts_of_older_versions_say_what_to_do(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "x.psm", tiny_graph())
    data = path.read_bytes()
    for number, bits in ((19, 8), (20, 4)):
        path.write_bytes(data)
        graph, segments = metadata.decode_metadata(path.read_bytes()[64:])
        graph.weights[FIRST].layout = number  # type: ignore[assignment]
        store(path, graph, segments)
        message = rf"\(embed.weight\): layout: {number} .*older version .*{bits}-bit"
        with raises(UnsupportedError, param="layout", match=message):
            Model.open(path)


def test_linear_that_int32_cannot_sum_is_refused(tmp_path: Path) -> None:
    wide = 131072 + 32
    graph = tiny_graph("w8a8", num_layers=0)
    graph.values["wide"] = dataclasses.replace(graph.values["hidden"], name="wide", shape=(T, c(wide)))
    graph.weights[FIRST] = dataclasses.replace(graph.weights[FIRST], cols=wide)
    embed = graph.nodes[0]
    embed.outputs, embed.attrs["dim"] = ["wide"], wide
    weight = dataclasses.replace(graph.weights["lm_head.weight"], name="w", cols=wide, parts=())
    graph.weights["w"] = weight
    graph.values["y"] = dataclasses.replace(graph.values["hidden"], name="y", shape=(T, c(101)))
    inputs = [value("wide"), Operand("weight", "w"), Operand("none")]
    graph.nodes.insert(1, Node("linear", "wide", inputs, ["y"], {"out_features": 101, "scheme": "w8a8"}))
    writer = BundleWriter(tmp_path / "x.psm", graph)
    for name, w in graph.weights.items():
        writer.add_weight(name, bytes(layout_bytes(w.layout, w.rows, w.cols)))
    with raises(UnsupportedError, param="weight", match=r"w8a8 .* 131072 columns, got 131104"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_all_reduce_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over ranks depend on their number, so the op left the table."""
    monkeypatch.setattr("penstock.graph.metadata.find_op", lambda name: Op(name, 1, "(Tensor x) -> Tensor", 0.0))

    def split(graph: Graph) -> None:
        graph.values["total"] = dataclasses.replace(graph.values["last"], name="total")
        head = next(i for i, node in enumerate(graph.nodes) if node.name == "lm_head")
        graph.nodes[head].inputs[0] = Operand("value", "total")
        graph.nodes.insert(head, Node("all_reduce", "ranks", [Operand("value", "last")], ["total"], {}))

    path = write_bundle(tmp_path / "ranks.psm", tiny_graph(), patch=split)
    with raises(UnsupportedError, param="ops[10]", match=r"ops\[\d+\]: all_reduce"):
        Model.open(path)
    graph = tiny_graph()
    split(graph)
    with raises(UnsupportedError, match="all_reduce"):
        write_bundle(tmp_path / "written.psm", graph)  # the writer has the core open what it wrote
    assert sorted(tmp_path.iterdir()) == [path]
