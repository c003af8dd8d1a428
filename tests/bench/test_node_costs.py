"""Costs of nodes against plain counts, and the steps that a profile runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.bench.node_costs import Cost, StepSize, kind_keys, kind_labels, node_costs, peak_of
from penstock.bench.profile import Profile, _Profiler, profile
from penstock.core.native import Model
from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.ir import Graph
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits
from tests.support.command import DEMO
from tests.support.errors import raises
from tests.support.families import build, save
from tests.support.tiny_graph import FFN, HIDDEN, VOCAB, tiny_graph, write_bundle

STEP = StepSize(starts=(5, 40), lens=(3, 2), width=3, num_rows=2)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    path = tmp_path_factory.mktemp("work") / "tiny.psm"
    return read_graph(write_bundle(path, tiny_graph("w8a8", windows=(0, 32))))[0]


def costs_of(graph: Graph, step: StepSize, kv_token_bytes: float) -> list[Cost]:
    """Of nodes that all run over every token."""
    return node_costs(graph, step, kv_token_bytes, [False] * len(graph.nodes))


def test_linears_multiply_every_weight_for_every_token(graph):
    costs = dict(zip((node.name for node in graph.nodes), costs_of(graph, STEP, 1.0), strict=True))
    assert costs["layers.0.mlp.down"].num_ops == 2 * 5 * FFN * HIDDEN
    assert costs["lm_head"].num_ops == 2 * 2 * HIDDEN * VOCAB  # wanted rows alone
    weight = graph.weights["layers.0.mlp.down.weight"]
    assert costs["layers.0.mlp.down"].num_bytes == weight.num_bytes + 4 * 5 * (FFN + HIDDEN)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_cost_what_their_tokens_choose(tmp_path, name):
    sizes = build(name).config
    num_experts, k = sizes.num_local_experts, sizes.num_experts_per_tok
    export_bundle(save(name, tmp_path / "model"), tmp_path / "m.psm", scheme="bf16")
    graph, _ = read_graph(tmp_path / "m.psm")
    for num_tokens in (1, 7):
        costs = costs_of(graph, StepSize((0,), (num_tokens,), 1, 1), 0.0)
        own = [(node, cost) for node, cost in zip(graph.nodes, costs, strict=True) if node.op == "expert_linear"]
        assert own
        for node, cost in own:
            weight = graph.weights[node.inputs[1].name]
            assert cost.num_ops == pytest.approx(2 * num_tokens * k * weight.rows / num_experts * weight.cols)
            touched = 1 - (1 - k / num_experts) ** num_tokens
            stored = sum(graph.weights[own.name].num_bytes for own in node.inputs if own.kind == "weight")
            slots = k if len(graph.values[node.inputs[0].name].shape) == 3 else 1
            rows = num_tokens * (slots * weight.cols + k * weight.rows / num_experts + k)
            assert cost.num_bytes == pytest.approx(stored * touched + 4 * rows)


def test_every_attention_multiplies_in_the_same_type():
    graph, _ = read_graph(DEMO)
    node = next(node for node in graph.nodes if node.op == "attention")
    ops = ("latent_attention", "sink_attention", "context_attention", "relative_attention", "disentangled_attention")
    for op in ops:
        other = dataclasses.replace(node, op=op)
        for kv_layout, cpu_level in (("bf16", "avx512"), ("f32", "avx512"), ("bf16", "amx")):
            assert peak_of(other, kv_layout, cpu_level) == peak_of(node, kv_layout, cpu_level)


def test_attention_counts_keys_within_the_window(graph):
    per_token = 128.0  # over all states, which are alike
    costs = costs_of(graph, STEP, per_token)
    heads_dim = 32
    for node, cost in zip(graph.nodes, costs, strict=True):
        if node.op != "attention":
            continue
        window = node.attrs["window"] or 1000
        spans = [(p + 1, max(0, p + 1 - window)) for s, n in zip(STEP.starts, STEP.lens, strict=True)
                 for p in range(s, s + n)]  # fmt: skip
        assert cost.num_ops == 4 * heads_dim * sum(end - begin for end, begin in spans)
        read = sum(len({p for end, begin in of for p in range(begin, end)}) for of in (spans[:3], spans[3:]))
        assert cost.num_bytes >= read * per_token / 2
        activations = 2 * 4 * 5 * heads_dim
        assert cost.num_bytes - read * per_token / 2 - activations <= 4 * (5 + 3 + 2 * 2 * 3)  # positions, tables


def test_only_gathered_rows_are_read(graph):
    costs = zip(graph.nodes, costs_of(graph, STEP, 1.0), strict=True)
    (gather,) = (cost for node, cost in costs if node.op == "gather_rows")
    assert gather.num_bytes == 2 * 2 * 4 * HIDDEN + 2 * 4  # two of five rows, and which


def test_kept_nodes_cost_what_the_wanted_tokens_do(graph):
    prompt = StepSize(starts=(5, 40), lens=(30, 20), width=3, num_rows=1)
    last = StepSize(starts=(59,), lens=(1,), width=3, num_rows=1)  # the second request's last token
    kept = [node.name.startswith("layers.1.mlp") or node.op == "attention" for node in graph.nodes]
    whole, alone = costs_of(graph, prompt, 128.0), costs_of(graph, last, 128.0)
    for node, is_kept, all_of_them, one, found in zip(
        graph.nodes, kept, whole, alone, node_costs(graph, prompt, 128.0, kept), strict=True
    ):
        assert found == (one if is_kept else all_of_them), node.name
    assert node_costs(graph, dataclasses.replace(STEP, num_rows=3), 128.0, kept) == costs_of(
        graph, dataclasses.replace(STEP, num_rows=3), 128.0
    )  # most are wanted
    nothing = node_costs(graph, dataclasses.replace(prompt, num_rows=0), 128.0, kept)
    assert {(cost.num_bytes, cost.num_ops) for cost, k in zip(nothing, kept, strict=True) if k} == {(0.0, 0.0)}


def test_a_token_reads_the_weights_that_the_core_counts():
    graph, _ = read_graph(DEMO)
    step = StepSize((0,), (1,), 1, 1)
    bare = dataclasses.replace(
        graph, weights={k: dataclasses.replace(w, num_bytes=0) for k, w in graph.weights.items()}
    )
    with_weights, without = (sum(c.num_bytes for c in costs_of(g, step, 0.0)) for g in (graph, bare))
    with Model.open(DEMO) as model:
        assert with_weights - without == model.info.weight_bytes_per_token


def test_peaks_follow_the_scheme():
    graph, _ = read_graph(DEMO)

    def peaks(is_it, kv_layout, cpu_level):
        return {peak_of(node, kv_layout, cpu_level) for node in graph.nodes if is_it(node.op)}

    assert peaks(lambda op: op == "linear", "bf16", "avx512") == {"int8"}
    assert peaks(lambda op: op not in ("linear", "attention"), "bf16", "avx512") == {"f32"}
    for kv_layout, cpu_level, peak in (
        ("bf16", "avx512", "bf16"), ("int8", "avx2", "bf16"), ("f32", "avx512", "f32"), ("bf16", "amx", "f32"),
    ):  # fmt: skip
        assert peaks(lambda op: op == "attention", kv_layout, cpu_level) == {peak}


def test_kind_labels_are_as_short_as_possible():
    graph, _ = read_graph(DEMO)
    labels = kind_labels(kind_keys(graph.nodes))
    assert {"linear q|k|v", "linear o", "linear gate|up", "linear down", "linear lm_head"} <= set(labels.values())
    first, second, other = (
        dataclasses.replace(graph.nodes[3], name=name) for name in ("a.0.x.out", "a.1.x.out", "a.0.y.out")
    )
    keys = kind_keys([first, second, other])
    assert keys[0] == keys[1] != keys[2]
    assert list(kind_labels(keys).values()) == ["linear a.*.x.out", "linear a.*.y.out"]


def test_decode_steps_have_their_contexts():
    """Every request attends to the same context, and a step after no context gives other logits."""
    graph, _ = read_graph(DEMO)
    found = []
    for context in (40, 0):
        limits = ProgramLimits(max_tokens=32, max_requests=3, num_pages=6, context_len=41, kv_layout="int8")
        program, _ = NativeProgram.open(DEMO, threads=1, limits=limits)
        with program.core_program:
            what = Profile(DEMO, context=context, batch=3, threads=1, kv_cache="int8")
            (step,) = _Profiler(what, program, graph, 2)._decode()
            assert step.batch.positions.tolist() == [context] * 3
            step.batch.token_ids[:] = 7
            program.run(step.batch)
            logits = program.logits().copy()
        program.close()
        assert logits[0].tobytes() == logits[1].tobytes() == logits[2].tobytes()
        found.append(logits[0])
    assert not np.allclose(found[0], found[1])


def test_a_step_that_one_thread_walks_has_the_limits_of_one(monkeypatch):
    class Told:
        def __init__(self, context):
            self.ops_per_s = dict.fromkeys(("f32", "bf16", "int8"), 1e9 * context.num_threads)
            self.read = 1e9 * context.num_threads

        def probe_compute(self, seconds):
            pass

        def probe_bandwidth(self):
            return self.read

    monkeypatch.setattr("penstock.bench.profile.MachineLimits", Told)
    what = Profile(DEMO, phases=("decode", "prefill"), threads=2, context=4, prompt_tokens=400, steps=9)
    prefill, decode = profile(what).phases
    assert decode.step_threads == 1
    for phase in (prefill, decode):
        assert phase.read_bytes_per_s == phase.ops_per_s["int8"] == 1e9 * phase.step_threads


def test_profiles_of_nothing_are_refused():
    with raises(InvalidArgumentError, param="phases", match="prefill, decode"):
        Profile(DEMO, phases=())
