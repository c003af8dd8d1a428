"""Passes: what they make of a node list, and that the numbers stay the same bit for bit."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor

from penstock.errors import InvalidArgumentError
from penstock.graph.capture import capture
from penstock.graph.ir import Graph, Layout, Operand
from penstock.graph.passes import (
    assign_scheme,
    drop_dead_code,
    fuse_add_norm,
    fuse_linear,
    order_values,
    run_passes,
)
from penstock.nn import Batch, Embedding, Linear, LMHead, Module, RMSNorm, gelu
from penstock.ops.table import LINEAR_SCHEMES
from penstock.quant.scheme import find_scheme
from tests.graph.interpreter import Interpreter
from tests.support.errors import raises
from tests.support.families import GRAPH_PARAMS
from tests.support.marks import mostly_long
from tests.support.networks import batch_of, capture_of, tensors_of


def check_references(graph: Graph) -> None:
    """Every name that is read exists, is made before it is read, and views lie inside rows of roots."""
    made = set(graph.inputs)
    for node in graph.nodes:
        for operand in node.inputs:
            if operand.kind == "value":
                value = graph.values[operand.name]
                assert (value.base or value.name) in made, f"{node.name} reads {operand.name} before it exists"
            else:
                assert (
                    operand.kind == "none"
                    or operand.name in {"weight": graph.weights, "state": graph.states}[operand.kind]
                )
        made.update(node.outputs)
    assert (graph.values[graph.output].base or graph.output) in made
    for value in graph.values.values():
        if value.base is not None:
            base = graph.values[value.base]
            assert base.base is None
            row = [1, 1]
            for index, described in enumerate((value, base)):
                for dim in described.shape[1:]:
                    row[index] *= dim.offset
            assert value.offset + row[0] <= row[1]


@pytest.mark.parametrize("family", GRAPH_PARAMS)
def test_passes_keep_every_bit(family: str) -> None:
    captured = capture_of(family)
    tensors = tensors_of(family, captured)
    passed = run_passes(captured.graph)
    check_references(captured.graph)
    check_references(passed)
    before, after = Interpreter(captured.graph, tensors, 8), Interpreter(passed, tensors, 8)
    for lengths in ((1,), (64, 33, 1)):
        batch = batch_of(len(passed.page_groups), *lengths)
        assert before.run(batch).equal(after.run(batch))


@pytest.mark.parametrize("one_pass", [fuse_linear, fuse_add_norm, drop_dead_code, order_values])
def test_each_pass_by_itself_keeps_every_bit(one_pass: object) -> None:
    captured = capture_of("qwen2")
    tensors = tensors_of("qwen2", captured)
    graph = copy.deepcopy(captured.graph)
    one_pass(graph)
    check_references(graph)
    batch = batch_of(1, 33, 2)
    expected = Interpreter(captured.graph, tensors, 8).run(batch)
    assert Interpreter(graph, tensors, 8).run(batch).equal(expected)


def test_a_layer_becomes_its_kernels() -> None:
    graph = capture_of("llama").graph
    layer = "model.layers.1."
    assert [node.op for node in graph.nodes if node.name.startswith(layer) or node.name == layer[:-1]] == [
        "rms_norm", "linear", "linear", "linear", "rope", "rope", "kv_append", "attention", "linear",
        "add", "rms_norm", "linear", "linear", "silu_mul", "linear", "add",
    ]  # fmt: skip
    passed = run_passes(graph)
    assert [(node.op, node.name.removeprefix(layer)) for node in passed.nodes if node.name.startswith(layer)] == [
        ("add_rms_norm", "input_layernorm"),
        ("linear", "self_attn.q_proj|k_proj|v_proj"),
        ("rope", "self_attn"),
        ("rope", "self_attn"),
        ("kv_append", "self_attn.attention"),
        ("attention", "self_attn.attention"),
        ("linear", "self_attn.o_proj"),
        ("add_rms_norm", "post_attention_layernorm"),
        ("linear", "mlp.gate_proj|up_proj"),
        ("silu_mul", "mlp"),
        ("linear", "mlp.down_proj"),
    ]


def test_fusion_keeps_checkpoint_names_and_rows() -> None:
    graph = run_passes(capture_of("llama_tied_one_kv_head").graph)
    attention = "model.layers.0.self_attn."
    weight = graph.weights[f"{attention}q_proj|k_proj|v_proj.weight"]
    assert (weight.rows, weight.cols) == (224, 160)
    assert [(part.name.removeprefix(attention), part.row_start, part.num_rows) for part in weight.parts] == [
        ("q_proj.weight", 0, 160),
        ("k_proj.weight", 160, 32),
        ("v_proj.weight", 192, 32),
    ]
    views = {value.offset for value in graph.values.values() if value.base == f"{attention}q_proj|k_proj|v_proj:linear"}
    assert views == {0, 160, 192}


def test_linears_with_biases_fuse_and_concatenate_biases() -> None:
    graph = run_passes(capture_of("qwen2").graph)
    names = [node.name for node in graph.nodes if node.op == "linear"]
    assert names[:3] == [
        "model.layers.0.self_attn.q_proj|k_proj|v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj|up_proj",
    ]
    weight = graph.weights[f"{names[0]}.weight"]
    bias = graph.weights[f"{names[0]}.bias"]
    assert (bias.rows, bias.cols) == (1, weight.rows)
    assert [(p.row_start, p.num_rows) for p in bias.parts] == [(p.row_start, p.num_rows) for p in weight.parts]
    assert [p.name.removesuffix(".bias") for p in bias.parts] == [p.name.removesuffix(".weight") for p in weight.parts]


@pytest.mark.parametrize("family", GRAPH_PARAMS)
def test_no_checkpoint_name_is_lost_or_doubled(family: str) -> None:
    captured = capture_of(family).graph
    names = Counter(part.name for weight in captured.weights.values() for part in weight.parts)
    passed = Counter(part.name for weight in run_passes(captured).weights.values() for part in weight.parts)
    # A network with ALiBi computes the rotary table, which no layer reads: no tensor of the checkpoint.
    assert set(names - passed) <= {"model.rotary_emb.inv_freq"}
    assert passed <= names
    assert set(names.values()) == {1}


def test_passes_are_pure_and_idempotent() -> None:
    graph = capture_of("llama").graph
    before = dataclasses.asdict(copy.deepcopy(graph))
    passed = run_passes(graph)
    assert dataclasses.asdict(graph) == before
    assert dataclasses.asdict(run_passes(passed)) == dataclasses.asdict(passed)


class Odd(Module):
    """What must not fuse: a tied weight, one bias of two, an addition that two norms read; and dead code."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(50, 16)
        self.a, self.b = Linear(16, 16, bias=True), Linear(16, 16)
        self.c, self.d = Linear(16, 16), Linear(16, 16)
        self.d.weight = self.c.weight
        self.first, self.second = RMSNorm(16), RMSNorm(16)
        self.out = Linear(16, 16)
        self.head = LMHead(16, 50)

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch.token_ids)
        gelu(self.out(x))
        x = self.a(x) + self.b(x)
        x = self.first(x) + self.second(x)
        x = self.c(x) + self.d(x)
        return self.head(x, batch.output_rows)


def odd_graph() -> Graph:
    with torch.device("meta"):
        network = Odd()
    return capture(network, network_name="odd", context_len=64, vocab_size=50).graph


def test_nodes_that_must_not_fuse_are_kept() -> None:
    passed = run_passes(odd_graph())
    check_references(passed)
    assert [(node.op, node.name) for node in passed.nodes] == [
        ("embedding", "embed"),
        ("linear", "a"),
        ("linear", "b"),
        ("add_rms_norm", "first"),
        ("rms_norm", "second"),
        ("add", ""),
        ("linear", "c"),
        ("linear", "d"),
        ("add", ""),
        ("gather_rows", "head"),
        ("linear", "head"),
    ]
    assert passed.nodes[6].inputs[1] == passed.nodes[7].inputs[1] == Operand("weight", "c.weight")
    assert "out.weight" not in passed.weights


@pytest.mark.parametrize("scheme", mostly_long(LINEAR_SCHEMES, "f32", "w4a8"))
def test_schemes_place_every_weight(scheme: str) -> None:
    graph = assign_scheme(run_passes(capture_of("qwen2").graph), scheme, "bf16")
    row, head = find_scheme(scheme), find_scheme(find_scheme(scheme).head)
    schemes = {node.name.rpartition(".")[2]: node.attrs["scheme"] for node in graph.nodes if node.op == "linear"}
    assert schemes.pop("lm_head") == head.name
    assert set(schemes.values()) == {row.name}
    assert graph.scheme == scheme
    assert graph.weights["lm_head.weight"].layout == head.layout
    assert graph.weights["model.embed_tokens.weight"].layout == Layout.ROWS_BF16
    for name, weight in graph.weights.items():
        if weight.rows == 1:
            assert weight.layout == Layout.ROWS_F32, name
        elif "proj" in name:
            assert weight.layout == row.layout, name


def test_a_tied_table_lies_as_its_head_reads_it() -> None:
    graph = assign_scheme(run_passes(capture_of("llama_tied_one_kv_head").graph), "w4a8", "f16")
    assert graph.weights["model.embed_tokens.weight"].layout == Layout.T16_I8


def test_unknown_schemes_are_refused() -> None:
    graph = odd_graph()
    with raises(InvalidArgumentError, param="scheme", match="w3"):
        assign_scheme(graph, "w3")
    with raises(InvalidArgumentError, param="table_dtype"):
        assign_scheme(graph, "f32", "f8")
