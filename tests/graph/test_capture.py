"""Capture: what comes out, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.capture import capture
from penstock.graph.ir import Dim
from penstock.graph.passes import run_passes
from penstock.graph.tracer import trace_network
from penstock.nn import Attention, Batch, Embedding, Linear, LMHead, Module, scale_channels, silu_mul
from tests.graph.interpreter import Interpreter
from tests.support.errors import raises
from tests.support.families import GRAPH_PARAMS
from tests.support.networks import batch_of, capture_of, eager_network, export_of, network_of, tensors_of


@pytest.mark.parametrize("family", GRAPH_PARAMS)
def test_captured_matches_eager_for_every_size(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph runs one token, a few, and prompts across pages: T, B, P and R are symbols."""
    monkeypatch.setenv("PENSTOCK_REFERENCE", "1")
    captured = capture_of(family)
    network = eager_network(family, 8)
    interpreter = Interpreter(captured.graph, tensors_of(family, captured), 8)
    for lengths in ((1,), (2, 7), (64, 33, 1)):
        batch = batch_of(len(captured.graph.page_groups), *lengths)
        with torch.no_grad():
            expected = network(batch)
        assert interpreter.run(batch).equal(expected)


def test_graph_uses_checkpoint_names_and_symbols() -> None:
    captured = capture_of("llama_tied_one_kv_head")
    graph = captured.graph
    assert [symbol.name for symbol in graph.symbols] == ["T", "B", "P", "R"]
    assert graph.values[graph.output].shape == (Dim("R", 1), Dim(None, 0, 1003))
    assert graph.values["request_starts"].shape == (Dim("B", 1, 1),)
    assert graph.inputs == list(Batch._fields)
    assert "model.layers.1.self_attn.q_proj.weight" in graph.weights
    assert "lm_head.weight" not in graph.weights
    assert graph.properties == {"tied:lm_head.weight": "model.embed_tokens.weight", "output_head": "lm_head"}
    assert list(graph.states) == [f"model.layers.{layer}.self_attn.attention" for layer in (0, 1)]
    assert list(captured.constants) == ["model.rotary_emb.inv_freq"]
    assert {node.name for node in graph.nodes if node.op == "silu_mul"} == {"model.layers.0.mlp", "model.layers.1.mlp"}


def test_layers_share_a_page_group_when_windows_and_heads_agree() -> None:
    graph = capture_of("qwen2_windows").graph
    assert graph.page_groups == [0, 20]
    assert [state.group for state in graph.states.values()] == [0, 1, 1]
    assert [node.attrs["group"] for node in graph.nodes if node.op == "attention"] == [0, 1, 1]


def test_capture_is_deterministic() -> None:
    first, second = export_of("qwen3"), export_of("qwen3")
    assert dataclasses.asdict(first.graph) == dataclasses.asdict(second.graph)
    assert list(first.graph.values) == list(second.graph.values)
    assert list(first.graph.weights) == list(second.graph.weights)


def test_real_parameters_give_the_same_graph() -> None:
    network = network_of("llama", "cpu")
    sizes = {"network_name": "llama", "context_len": 256, "vocab_size": 1003}
    expected = dataclasses.asdict(capture_of("llama").graph)
    for way in (capture, trace_network):
        assert dataclasses.asdict(way(network, **sizes).graph) == expected


class Tiny(Module):
    """Embedding, something, head: ``something`` is the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(50, 16)
        self.up = Linear(16, 32)
        self.attention = Attention(2, 1, 8)
        self.head = LMHead(16, 50)

    def something(self, x: Tensor, batch: Batch) -> Tensor:
        return x

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.something(self.embed(batch.token_ids), batch), batch.output_rows)


def capture_tiny(something: object, **changes: object) -> None:
    class Changed(Tiny):
        pass

    Changed.something = something
    with torch.device("meta"):
        network = Changed()
    capture(network, network_name="tiny", context_len=64, **({"vocab_size": 50} | changes))


REFUSED = {
    "softmax": (lambda self, x, batch: x.softmax(-1), r"aten\.softmax.*in module \(root\)"),
    "linear": (
        lambda self, x, batch: torch.nn.functional.linear(x, self.head.weight[:16]),
        "penstock.nn.Linear|weights",
    ),
    "silu": (lambda self, x, batch: torch.nn.functional.silu(x), r"aten\.silu.*penstock\.nn\.silu_mul"),
    "scalar": (lambda self, x, batch: x * 2.0, r"aten\.mul.*penstock\.nn\.scale"),
    "broadcast": (lambda self, x, batch: x + x[:, :1], r"aten\.add.*broadcast"),
    "transpose": (lambda self, x, batch: x.view(-1, 2, 8).transpose(1, 2).reshape(-1, 16), r"aten\.transpose"),
    "columns": (lambda self, x, batch: self.up(x).view(-1, 16, 2)[:, :, 0], r"aten\.select.*rows whole"),
    "rows": (lambda self, x, batch: x[1:], r"aten\.slice|differs between steps"),
    "index": (lambda self, x, batch: x[batch.positions.long()], "penstock|index|to"),
    "item": (lambda self, x, batch: x if int(batch.positions[0]) == 0 else x + x, "branches on the value"),
    "size": (lambda self, x, batch: x if x.shape[0] == 6 else x + x, "fixes a size|differs"),
    "weight": (lambda self, x, batch: x + self.embed.weight[:1].expand(x.shape[0], 16), "aten|weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_are_not_ops_are_refused(name: str) -> None:
    something, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        capture_tiny(something)


def test_wrong_shapes_are_refused_at_capture() -> None:
    with raises(InvalidArgumentError, param="up", match=r"^\[silu_mul\] .*gate"):
        capture_tiny(lambda self, x, batch: silu_mul(x, self.up(x)))


def test_wrong_output_is_refused() -> None:
    with raises(InvalidArgumentError, param="output", match=r".*float32 .*\[R, 51\]"):
        capture_tiny(Tiny.something, vocab_size=51)


def test_views_fold_into_offsets() -> None:
    """Splits, slices and reshapes of rows are views of the value that an op made, never copies."""

    def something(self: Tiny, x: Tensor, batch: Batch) -> Tensor:
        wide = self.up(x)
        left, right = wide.split([16, 16], dim=1)
        heads = wide.view(-1, 4, 8)[:, 1:3].flatten(1)
        return silu_mul(left, right) + silu_mul(heads, wide[:, 16:])

    class Changed(Tiny):
        pass

    Changed.something = something
    with torch.device("meta"):
        network = Changed()
    graph = run_passes(capture(network, network_name="tiny", context_len=64, vocab_size=50).graph)
    operations = [node.op for node in graph.nodes]
    assert operations == ["embedding", "linear", "silu_mul", "silu_mul", "add", "gather_rows", "linear"]
    read = [graph.values[i.name] for node in graph.nodes if node.op == "silu_mul" for i in node.inputs]
    assert [(value.base, value.offset) for value in read] == [("up:linear", at) for at in (0, 16, 8, 16)]
    assert all(value.shape == (Dim("T", 1), Dim(None, 0, 16)) for value in read)


def test_a_meta_constant_is_refused() -> None:
    class Positions(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(16), persistent=False)

        def something(self, x: Tensor, batch: Batch) -> Tensor:
            from penstock.ops.eager import ops

            return ops.rms_norm(x, self.scale, eps=1e-5)

    with torch.device("meta"):
        network = Positions()
    with raises(UnsupportedError, param="scale"):
        capture(network, network_name="tiny", context_len=64, vocab_size=50)


def test_a_filled_adapter_slot_is_refused() -> None:
    network = network_of("llama", "meta")
    network.model.layers[0].mlp.up_proj.adapter = lambda x: x
    with raises(UnsupportedError, match=r"model\.layers\.0\.mlp\.up_proj\.adapter:"):
        capture(network, network_name="llama", context_len=64, vocab_size=1003)


@pytest.mark.parametrize("kind", ["bfloat16", "gradient"])
def test_a_constant_may_have_any_float_type_and_a_gradient(kind: str) -> None:
    class Scaled(Tiny):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("cpu"):
                ones = torch.full((16,), 1.5, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
            self.register_buffer("scale", ones.requires_grad_(kind == "gradient"), persistent=False)

        def something(self, x: Tensor, batch: Batch) -> Tensor:
            return scale_channels(x, self.scale)

    with torch.device("meta"):
        network = Scaled()
    constants = capture(network, network_name="tiny", context_len=64, vocab_size=50).constants
    assert constants["scale"].tolist() == [1.5] * 16
