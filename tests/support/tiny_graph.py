"""A tiny Llama as a Graph made by hand, its weights, its bundle: nothing here depends on capture."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.core.native import Context, layout_bytes, pack
from penstock.graph.bundle import BundleWriter
from penstock.graph.ir import Dim, DType, Graph, Layout, Node, Operand, Part, State, Symbol, Value, Weight
from penstock.graph.passes.append_tail import append_tail

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT_LEN = 32, 4, 2, 8, 48, 101, 256
LINEAR_LAYOUTS = {
    "f32": Layout.T16_F32, "f16": Layout.T16_F16, "bf16": Layout.T16_BF16, "w8a16": Layout.T16_I8,
    "w8a8": Layout.T16_I8, "w4a16": Layout.T16_I4G32, "w4a8": Layout.T16_I4G32,
}  # fmt: skip
T, B, P, R = Dim("T", 1), Dim("B", 1), Dim("P", 1), Dim("R", 1)


def c(size: int) -> Dim:
    return Dim(None, 0, size)


def value(name: str) -> Operand:
    return Operand("value", name)


def weight(name: str) -> Operand:
    return Operand("weight", name)


class Builder:
    """Adds values, weights and nodes; each method returns the name of what it made."""

    def __init__(self, scheme: str, windows: list[int]) -> None:
        symbols = [Symbol("T", 1, 4096), Symbol("B", 1, 256), Symbol("P", 1, 1 << 20), Symbol("R", 0, 4096)]
        self.graph = Graph("tiny", scheme, VOCAB, CONTEXT_LEN, symbols, page_groups=list(windows))
        for name, shape in {
            "token_ids": (T,), "positions": (T,), "request_starts": (Dim("B", 1, 1),),
            "page_tables": (c(len(windows)), B, P), "output_rows": (R,),
        }.items():  # fmt: skip
            self.graph.values[name] = Value(name, DType.I32, shape)
            self.graph.inputs.append(name)

    def value(self, name: str, *shape: Dim, base: str | None = None, offset: int = 0) -> str:
        self.graph.values[name] = Value(name, DType.F32, shape, base, offset)
        return name

    def weight(self, name: str, rows: int, cols: int, layout: Layout = Layout.ROWS_F32) -> Operand:
        self.graph.weights[name] = Weight(name, rows, cols, layout, (Part(name, 0, rows),))
        return weight(name)

    def node(self, op: str, name: str, inputs: list[Operand], outputs: list[str], **attrs: float | str) -> None:
        self.graph.nodes.append(Node(op, name, inputs, outputs, dict(attrs)))

    def linear(self, name: str, x: str, rows: int, cols: int, dim: Dim = T, bias: bool = False) -> str:
        scheme = self.graph.scheme
        operands = [value(x), self.weight(f"{name}.weight", rows, cols, LINEAR_LAYOUTS[scheme])]
        operands.append(self.weight(f"{name}.bias", 1, rows) if bias else Operand("none"))
        y = self.value(f"{name}.y", dim, c(rows))
        self.node("linear", name, operands, [y], out_features=rows, scheme=scheme)
        return y

    def attention(self, name: str, normed: str, layer: int, window: int) -> str:
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        qkv = self.linear(f"{name}.qkv", normed, width, HIDDEN, bias=layer == 0)
        q = self.value(f"{name}.q", T, c(HEADS), c(HEAD_DIM), base=qkv)
        k = self.value(f"{name}.k", T, c(KV_HEADS), c(HEAD_DIM), base=qkv, offset=HEADS * HEAD_DIM)
        v = self.value(f"{name}.v", T, c(KV_HEADS), c(HEAD_DIM), base=qkv, offset=(HEADS + KV_HEADS) * HEAD_DIM)
        turned_q = self.value(f"{name}.q.rope", T, c(HEADS), c(HEAD_DIM))
        turned_k = self.value(f"{name}.k.rope", T, c(KV_HEADS), c(HEAD_DIM))
        self.node("rope", name, [value(q), value("cos_sin")], [turned_q], interleaved=False)
        self.node("rope", name, [value(k), value("cos_sin")], [turned_k], interleaved=False)
        group = self.graph.page_groups.index(window)
        self.graph.states[name] = State(name, KV_HEADS, HEAD_DIM, group)
        step = [value("positions"), value("request_starts"), value("page_tables")]
        state = Operand("state", name)
        self.node("kv_append", name, [value(turned_k), value(v), state, *step], [], group=group)
        out = self.value(f"{name}.out", T, c(HEADS), c(HEAD_DIM))
        self.node(
            "attention", name, [value(turned_q), state, *step, Operand("none")], [out],
            scale=HEAD_DIM**-0.5, group=group, causal=True, window=window, softcap=0.0,
        )  # fmt: skip
        flat = self.value(f"{name}.flat", T, c(HEADS * HEAD_DIM), base=out)
        return self.linear(f"{name}.o", flat, HIDDEN, HEADS * HEAD_DIM)

    def norm(self, name: str, x: str, residual: str) -> tuple[str, str]:
        y, total = self.value(f"{name}.y", T, c(HIDDEN)), self.value(f"{name}.sum", T, c(HIDDEN))
        operands = [value(x), value(residual), self.weight(f"{name}.weight", 1, HIDDEN)]
        self.node("add_rms_norm", name, operands, [y, total], eps=1e-6)
        return y, total

    def feed_forward(self, name: str, normed: str) -> str:
        both = self.linear(f"{name}.gate_up", normed, 2 * FFN, HIDDEN)
        gate = self.value(f"{name}.gate", T, c(FFN), base=both)
        up = self.value(f"{name}.up", T, c(FFN), base=both, offset=FFN)
        act = self.value(f"{name}.act", T, c(FFN))
        self.node("silu_mul", name, [value(gate), value(up)], [act])
        return self.linear(f"{name}.down", act, HIDDEN, FFN)


def tiny_graph(scheme: str = "f32", num_layers: int = 2, windows: tuple[int, ...] = (0,)) -> Graph:
    """Layers take the windows in turn; one page group per window."""
    b = Builder(scheme, list(dict.fromkeys(windows)))
    table = b.weight("embed.weight", VOCAB, HIDDEN)
    hidden = b.value("hidden", T, c(HIDDEN))
    b.node("embedding", "embed", [value("token_ids"), table], [hidden], dim=HIDDEN)
    b.value("cos_sin", T, c(HEAD_DIM))
    b.node(
        "rotary_embedding", "rotary", [value("positions"), b.weight("inv_freq", 1, HEAD_DIM // 2)], ["cos_sin"],
        scaling=1.0,
    )  # fmt: skip
    normed = b.value("first.y", T, c(HIDDEN))
    b.node("rms_norm", "first", [value(hidden), b.weight("first.weight", 1, HIDDEN)], [normed], eps=1e-6)
    residual = hidden
    for layer in range(num_layers):
        out = b.attention(f"layers.{layer}.attn", normed, layer, windows[layer % len(windows)])
        normed, residual = b.norm(f"layers.{layer}.post", out, residual)
        out = b.feed_forward(f"layers.{layer}.mlp", normed)
        normed, residual = b.norm(f"layers.{layer}.next", out, residual)
    last = b.value("last", R, c(HIDDEN))
    b.node("gather_rows", "gather", [value(normed), value("output_rows")], [last])
    b.graph.output = b.linear("lm_head", last, VOCAB, HIDDEN, dim=R)
    b.graph.properties["made_by"] = "tests"
    return b.graph


def stateless_graph(scheme: str = "f32") -> Graph:
    """A network without attention: a page group is declared, and no state has pages in it."""
    b = Builder(scheme, [0])
    hidden = b.value("hidden", T, c(HIDDEN))
    b.node("embedding", "embed", [value("token_ids"), b.weight("embed.weight", VOCAB, HIDDEN)], [hidden], dim=HIDDEN)
    mixed = b.feed_forward("mlp", hidden)
    last = b.value("last", R, c(HIDDEN))
    b.node("gather_rows", "gather", [value(mixed), value("output_rows")], [last])
    b.graph.output = b.linear("lm_head", last, VOCAB, HIDDEN, dim=R)
    return b.graph


def tiny_values(graph: Graph, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Float values of every weight, by name."""
    rng = np.random.default_rng(seed)
    values = {}
    for w in graph.weights.values():
        scale = 1.0 if w.rows == 1 else w.cols**-0.5
        values[w.name] = (rng.standard_normal((w.rows, w.cols)) * scale).astype(np.float32)
    if "inv_freq" not in values:
        return values
    values["inv_freq"] = (100.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))[None].astype(np.float32)
    return values


def write_bundle(
    path: Path,
    graph: Graph,
    *,
    segments: Mapping[str, bytes | Callable[[], bytes]] | None = None,
    patch: Callable[[Graph], None] | None = None,
    values: dict[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Writes ``graph`` with ``values``, or else with random weights.  ``patch`` changes the copy that is stored after
    the weights' bytes are known, and without the writer's own check."""
    values = values or tiny_values(graph)
    stored = graph
    if patch is not None:
        stored = copy.deepcopy(graph)
        patch(stored)
    with (
        Context(1) as context,
        BundleWriter(path, stored, segments or {"config.json": b"{}"}, validate=patch is None) as writer,
    ):
        for w in list(stored.weights.values()):
            data = np.zeros(layout_bytes(w.layout, w.rows, w.cols), np.uint8)
            source = values.get(w.name)
            if source is not None and source.shape == (w.rows, w.cols):
                pack(context, w.layout, w.rows, w.cols, 0, w.rows, 1, source, data)
            writer.add_weight(w.name, data)
    return path


def replace(items: dict[str, object], key: str, **changes: object) -> None:
    """Replaces fields of a dataclass in a dict."""
    items[key] = dataclasses.replace(items[key], **changes)  # type: ignore[type-var]


if __name__ == "__main__":  # the seeds of `make fuzz`
    for _scheme in LINEAR_LAYOUTS:
        write_bundle(Path(sys.argv[1]) / f"{_scheme}.psm", tiny_graph(_scheme, windows=(0, 32)))
    for _tail in ("argmax", "topk:5"):
        _graph = tiny_graph()
        append_tail(_graph, _tail)
        write_bundle(Path(sys.argv[1]) / f"{_tail.partition(':')[0]}.psm", _graph)
