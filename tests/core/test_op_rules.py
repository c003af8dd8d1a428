"""What each op demands of its operands, as hostile bundles break it; and graphs that are odd but sound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import POISON, Context, CoreProgram, Model, cpu_levels
from penstock.errors import InvalidFileError
from penstock.graph.ir import Dim, DType, Graph, Layout, Node, Operand, Value
from tests.support.core_steps import OPTIONS, batch
from tests.support.tiny_graph import HEAD_DIM, HIDDEN, T, c, tiny_graph, value, weight, write_bundle

Patch = Callable[[Graph], None]
LEVELS = [name for name, runnable in cpu_levels() if runnable]
ATTENTION = "layers.0.attn"


def at(op: str, slot: int, new: Operand) -> Patch:
    return lambda g: next(n for n in g.nodes if n.op == op).inputs.__setitem__(slot, new)


def three_heads(graph: Graph) -> None:
    for name in (f"{ATTENTION}.q", f"{ATTENTION}.q.rope", f"{ATTENTION}.out", f"{ATTENTION}.flat"):
        value = graph.values[name]
        shape = (T, c(3), c(HEAD_DIM)) if len(value.shape) == 3 else (T, c(3 * HEAD_DIM))
        graph.values[name] = dataclasses.replace(value, shape=shape)


def wide_frequencies(graph: Graph) -> None:
    graph.weights["inv_freq"] = dataclasses.replace(graph.weights["inv_freq"], cols=513)


def integer_table(graph: Graph) -> None:
    table = graph.weights["embed.weight"]
    graph.weights["embed.weight"] = dataclasses.replace(table, layout=Layout.ROWS_I32, rows=102, parts=())


def add(graph: Graph, name: str, dtype: DType, shape: tuple[Dim, ...], base: str | None = None) -> None:
    graph.values[name] = Value(name, dtype, shape, base)


def ids_by_view(graph: Graph) -> None:
    add(graph, "ids", DType.I32, (T,), "request_starts")
    graph.values["ids"] = dataclasses.replace(graph.values["ids"], shape=(Dim("B", 1, 1),))
    graph.nodes[0].inputs[0] = value("ids")


def view_of_tables(graph: Graph) -> None:
    add(graph, "tables", DType.I32, (c(1),), "page_tables")


def gelu(approximate: str) -> Patch:
    def change(graph: Graph) -> None:
        add(graph, "g", DType.F32, (T, c(HIDDEN)))
        graph.nodes.insert(1, Node("gelu", "g", [value("hidden")], ["g"], {"approximate": approximate}))

    return change


def scaled(op: str, attr: str, number: float) -> Patch:
    def change(graph: Graph) -> None:
        add(graph, "s", DType.F32, (T, c(HIDDEN)))
        graph.nodes.insert(1, Node(op, "s", [value("hidden")], ["s"], {attr: number}))

    return change


def sinks(name: str | None) -> Patch:
    def change(graph: Graph) -> None:
        node = next(node for node in graph.nodes if node.op == "attention")
        node.op = "sink_attention"
        node.inputs = [*node.inputs, Operand("none") if name is None else weight(name)]

    return change


def relative(bias: str | None = None, keys: str = "all", prefix: str | None = None, **attrs: float) -> Patch:
    def change(graph: Graph) -> None:
        node = next(node for node in graph.nodes if node.op == "attention")
        node.op = "relative_attention"
        operands = [Operand("none"), weight(bias) if bias else Operand("none")]
        node.inputs = [*node.inputs, *operands, value(prefix) if prefix else Operand("none")]
        node.attrs = {**node.attrs, "keys": keys, **attrs}

    return change


def disentangled(c2p: int | None = 4, p2c: int | None = 4, columns: int = 3, **attrs: float) -> Patch:
    """The heads of the scores by distance; None: without them.  ``columns`` are those of the table of buckets."""

    def change(graph: Graph) -> None:
        node = next(node for node in graph.nodes if node.op == "attention")
        node.op = "disentangled_attention"
        operands = []
        for name, heads in (("c2p", c2p), ("p2c", p2c)):
            if heads is not None:
                add(graph, name, DType.F32, (T, c(heads), c(HIDDEN // heads)), "hidden")
            operands.append(Operand("none") if heads is None else value(name))
        graph.weights["buckets"] = dataclasses.replace(
            graph.weights["inv_freq"], name="buckets", cols=columns, parts=()
        )
        node.inputs = [*node.inputs[:5], *operands, weight("buckets")]
        node.attrs = {**node.attrs, "causal": False, **attrs}

    return change


def clamped(columns: int, limit: float) -> Patch:
    def change(graph: Graph) -> None:
        add(graph, "s", DType.F32, (T, c(columns // 2)))
        add(graph, "pairs", DType.F32, (T, c(columns)), "hidden")
        graph.nodes.insert(1, Node("clamped_swiglu", "s", [value("pairs")], ["s"], {"alpha": 1.0, "limit": limit}))

    return change


def channels(name: str) -> Patch:
    def change(graph: Graph) -> None:
        add(graph, "s", DType.F32, (T, c(HIDDEN)))
        graph.nodes.insert(1, Node("scale_channels", "s", [value("hidden"), weight(name)], ["s"], {}))

    return change


def matched(target: str, floor: float) -> Patch:
    def change(graph: Graph) -> None:
        add(graph, "s", DType.F32, (T, c(HIDDEN)))
        add(graph, "half", DType.F32, (T, c(HIDDEN // 2)), "hidden")
        graph.nodes.insert(1, Node("match_rms", "s", [value("hidden"), value(target)], ["s"], {"floor": floor}))

    return change


def topk(k: int) -> Patch:
    def change(graph: Graph) -> None:
        add(graph, "v", DType.F32, (T, c(max(k, 1))))
        add(graph, "i", DType.I32, (T, c(max(k, 1))))
        graph.nodes.insert(1, Node("topk", "top", [value("hidden")], ["v", "i"], {"k": k}))

    return change


def ids_beyond_the_table(graph: Graph) -> None:
    """The best of 128 columns is no row of a table of 101."""
    add(graph, "best", DType.I32, (T,))
    add(graph, "again", DType.F32, (T, c(HIDDEN)))
    up = next(i for i, n in enumerate(graph.nodes) if n.op == "linear" and n.outputs == ["layers.0.mlp.gate_up.y"])
    graph.weights["layers.0.mlp.gate_up.weight"].rows = 128
    graph.weights["layers.0.mlp.gate_up.weight"].parts = ()
    graph.nodes[up].attrs["out_features"] = 128
    graph.values["layers.0.mlp.gate_up.y"].shape = (T, c(128))
    graph.nodes.insert(up + 1, Node("argmax", "best", [value("layers.0.mlp.gate_up.y")], ["best"], {}))
    operands = [value("best"), weight("embed.weight")]
    graph.nodes.insert(up + 2, Node("embedding", "again", operands, ["again"], {"dim": HIDDEN}))


RULES: dict[str, tuple[Patch, str]] = {
    "heads": (three_heads, "q: expected a multiple of the state's 2 heads, got 3 heads"),
    "frequencies": (wide_frequencies, "inv_freq: expected up to 512 columns, got 513"),
    "table": (integer_table, "weight: expected a layout of numbers, got rows_i32"),
    "ids_view": (ids_by_view, "ids: expected token ids or positions"),
    "ids_beyond": (ids_beyond_the_table, "ids: expected .* that the weight's 101 rows cover"),
    "tables_view": (view_of_tables, "the page tables have no views|expected as many rows as its base"),
    "values": (at("kv_append", 1, value("hidden")), "v: expected f32 .* as k has"),
    "keys": (at("kv_append", 0, value("cos_sin")), "k: expected the state's 2 heads"),
    "alibi": (at("attention", 5, weight("first.weight")), r"alibi: expected a rows_f32 weight \[1, 4\]"),
    "gelu": (gelu("exact"), 'approximate: expected "none" or "tanh", got "exact"'),
    "scale": (scaled("scale", "factor", 1e39), "factor: expected a finite number, got 1e\\+39"),
    "softcap": (scaled("softcap", "cap", -1.0), "cap: expected a normal float32 above 0, got -1"),
    "clamp": (scaled("clamp", "limit", 0.0), "limit: expected a normal float32 above 0, got 0"),
    "sinks": (sinks("first.weight"), r"sinks: expected a rows_f32 weight \[1, 4\]"),
    "no_sinks": (sinks(None), "sinks: expected a weight, got nothing"),
    "bias": (relative("first.weight"), r"bias: expected a rows_f32 weight \[4, an odd number\]"),
    "keys_without_prefix": (relative(keys="prefix"), 'keys: expected "all" without a prefix, got "prefix"'),
    "keys_of_prefix": (relative(prefix="positions"), 'keys: expected "prefix", "rest" or "span", got "all"'),
    "prefix_rows": (relative(keys="rest", prefix="request_starts"), "prefix: expected a number for each row of q"),
    "prefix_window": (relative(keys="rest", prefix="positions", window=9), "window: expected 0 with a prefix, got 9"),
    "c2p_heads": (disentangled(c2p=2), "c2p: expected the rows of q, 4 heads and equal buckets"),
    "p2c_heads": (disentangled(c2p=None, p2c=8), "p2c: expected the rows of q, 4 heads and equal buckets"),
    "no_distances": (disentangled(c2p=None, p2c=None), "c2p: expected this tensor, or p2c, or both"),
    "buckets": (disentangled(columns=4), "buckets: expected an odd number of columns, got 4"),
    "disentangled_causal": (disentangled(causal=True), "causal: expected false"),
    "disentangled_softcap": (disentangled(softcap=2.0), "softcap: expected 0, got 2"),
    "clamped_odd": (clamped(31, 7.0), "x: expected an even number of columns"),
    "clamped_limit": (clamped(HIDDEN, 0.0), "limit: expected a normal float32 above 0, got 0"),
    "channels": (channels("inv_freq"), r"weight: expected a rows_f32 weight \[1, 32\]"),
    "match_target": (matched("half", 1e-5), "target: expected f32 .* as x has"),
    "match_floor": (matched("hidden", 0.0), "floor: expected a normal float32 above 0, got 0"),
    "gaussian_topk": (scaled("gaussian_topk", "deviations", 1e39), "deviations: expected a finite number"),
    "topk_none": (topk(0), "k: expected 1 to 32, got 0"),
    "topk_many": (topk(33), "k: expected 1 to 32, got 33"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_hostile_operand_is_refused_by_name(rule: str, tmp_path: Path) -> None:
    patch, message = RULES[rule]
    path = write_bundle(tmp_path / "x.psm", tiny_graph(), patch=patch)
    with pytest.raises(InvalidFileError, match=message):
        Model.open(path)


def greedy_ids(graph: Graph) -> None:
    """Embeds the best column of the hidden state, whatever it holds."""
    add(graph, "best", DType.I32, (T,))
    add(graph, "again", DType.F32, (T, c(HIDDEN)))
    for n in graph.nodes[1:]:
        n.inputs[:] = [value("again") if o.name == "hidden" else o for o in n.inputs]
    operands = [value("best"), weight("embed.weight")]
    graph.nodes.insert(1, Node("argmax", "best", [value("hidden")], ["best"], {}))
    graph.nodes.insert(2, Node("embedding", "again", operands, ["again"], {"dim": HIDDEN}))


def attend_first(graph: Graph) -> None:
    i = next(i for i, n in enumerate(graph.nodes) if n.op == "kv_append")
    graph.nodes[i], graph.nodes[i + 1] = graph.nodes[i + 1], graph.nodes[i]


def append_twice(graph: Graph) -> None:
    i = next(i for i, n in enumerate(graph.nodes) if n.op == "kv_append")
    graph.nodes.insert(i, graph.nodes[i])


def set_attrs(op: str, **new: float) -> Patch:
    def change(graph: Graph) -> None:
        for n in graph.nodes:
            if n.op == op:
                n.attrs.update(new)

    return change


ODD: dict[str, Patch] = {
    "greedy_ids": greedy_ids,
    "topk": topk(32),
    "attend_first": attend_first,
    "append_twice": append_twice,
    "softcap": set_attrs("attention", softcap=1e-40),
    "scale": set_attrs("attention", scale=3e38),
    "not_causal": set_attrs("attention", causal=0, window=0),
    "not_causal_window": set_attrs("attention", causal=0, window=2),
    "unaligned_view": lambda g: setattr(g.values[f"{ATTENTION}.q"], "offset", 7),
    "alibi": at("attention", 5, weight("inv_freq")),
    "any_prefix": relative(keys="prefix", prefix="token_ids"),
    "any_rest": relative(keys="rest", prefix="token_ids"),
    "whole_disentangled": disentangled(),
    "whole_c2p": disentangled(p2c=None),
    "whole_p2c_window": disentangled(c2p=None, window=2),
    "any_span": relative(keys="span", prefix="token_ids"),
}


@pytest.mark.parametrize("kv_layout", [1, 2, 3, 4])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("odd", ODD)
def test_an_odd_graph_runs_on_damaged_weights(odd: str, level: str, kv_layout: int, tmp_path: Path) -> None:
    """Every bit of the weights is set: NaN in floats.  Whatever the answer is, the memory is the program's own, as a
    sanitized build of the core checks."""
    path = write_bundle(tmp_path / "x.psm", tiny_graph("w8a8"), patch=ODD[odd])
    data = path.read_bytes()
    first = -(-(64 + int.from_bytes(data[24:32], "little")) // 4096) * 4096
    path.write_bytes(data[:first] + b"\xff" * (len(data) - first))
    options = dataclasses.replace(OPTIONS, kv_layout=kv_layout, flags=POISON)
    with Model.open(path, mmap=False) as model, Context(2, cpu_level=level) as context:
        program = CoreProgram(model, context, options)
        start = 0 if odd.startswith(("not_causal", "whole_")) else 90  # whose requests run whole
        program.run(batch([(0, [1, 2, 3], [4]), (start, [5] * 6, [1, 2, 7])]))
        assert program.logits().shape == (9, 101)
        program.close()


@pytest.mark.parametrize("hostile", [-1, -(2**31), 2**31 - 1])
def test_pages_outside_of_the_window_are_never_read(hostile: int, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "x.psm", tiny_graph(windows=(32,)))
    with Model.open(path) as model, Context(1) as context:
        program = CoreProgram(model, context, OPTIONS)
        rows = []
        for first_page in (1, hostile):
            program.run(batch([(100, [5, 6], [first_page, first_page, 3, 4])]))
            rows.append(program.logits().copy())
        program.close()
    assert np.array_equal(rows[0], rows[1])
