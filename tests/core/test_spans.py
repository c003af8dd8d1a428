"""Spans of a step: one for each phase, thread and node, in order, within the step; and what nodes say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core import spans
from penstock.core.library import NodeInfoStruct, check, library, sized
from penstock.core.native import Context, CoreProgram, Model
from penstock.errors import InvalidArgumentError
from tests.support.core_steps import OPTIONS, batch
from tests.support.errors import raises
from tests.support.tiny_graph import LINEAR_LAYOUTS, VOCAB


@pytest.mark.parametrize("threads", [1, 3])
def test_every_phase_of_every_node_has_a_span_on_every_thread(threads: int, bundle_of: Callable[..., Path]) -> None:
    with Model.open(bundle_of("w4a8")) as model, Context(threads) as context:
        nodes = spans.node_infos(model)
        with CoreProgram(model, context, OPTIONS) as program:
            spans.set_profiling(program, True)
            assert len(spans.last_spans(program)) == 0
            program.run(batch([(0, [1, 2, 3], (1,))]))
            found = spans.last_spans(program)
    whole, rest = found[0], found[1:]
    assert whole["node"] == -1
    phases = {op: 2 if op == "linear" else 1 for op in {node.op for node in nodes}}  # it rounds its rows first
    phases["silu_mul"] = 0  # the linear before it makes its result
    phases["attention"] = 2  # parts of long contexts, then what they make together
    expected = [(n, phase) for n, node in enumerate(nodes) for phase in range(phases[node.op])]
    last_append = max(n for n, node in enumerate(nodes) if node.op == "kv_append")
    expected = sorted([*expected, (last_append, 1)])  # after it the rows that wanted-only nodes read are moved together
    for thread in range(threads):
        mine = rest[rest["thread"] == thread]
        assert sorted(zip(mine["node"].tolist(), mine["phase"].tolist(), strict=True)) == expected
        times = np.stack([mine["arrive_ns"], mine["begin_ns"], mine["end_ns"]], 1).ravel()
        assert (np.diff(times) >= 0).all()
        assert whole["begin_ns"] <= times[0]
        assert times[-1] <= whole["end_ns"]
    assert len(rest) == threads * len(expected)


def test_a_phase_begins_after_its_inputs_end_on_every_thread(bundle_of: Callable[..., Path]) -> None:
    with Model.open(bundle_of("w8a8")) as model, Context(2) as context:
        last = model.info.num_nodes - 1
        with CoreProgram(model, context, OPTIONS) as program:
            spans.set_profiling(program, True)
            program.run(batch([(0, list(range(60)), (1, 2))]))
            found = spans.last_spans(program)
    head = found[found["node"] == last]
    rounded, multiplied = head[head["phase"] == 0], head[head["phase"] == 1]
    assert multiplied["begin_ns"].min() >= rounded["end_ns"].max()


def test_spans_stop_and_change_no_bit(model: Model, context: Context) -> None:
    results = []
    with CoreProgram(model, context, OPTIONS) as program:
        for on in (False, True, False):
            spans.set_profiling(program, on)
            program.run(batch([(0, [4, 5, 6], (1,))]))
            results.append(program.logits().tobytes())
            assert bool(len(spans.last_spans(program))) == on
    assert len(set(results)) == 1


def test_nodes_say_what_they_read_and_make(bundle_of: Callable[..., Path]) -> None:
    with Model.open(bundle_of("w4a8", (0, 32))) as model:
        nodes, info = spans.node_infos(model), model.info
        out = sized(NodeInfoStruct)
        with raises(InvalidArgumentError, param="index"):
            check(library().ps_model_node(model.handle, info.num_nodes, out))
    assert sum(node.weight_bytes for node in nodes) == info.weight_bytes_per_token
    linears = [node for node in nodes if node.op == "linear"]
    assert {node.scheme for node in linears} == {"w4a8"}
    for node in linears:
        assert node.shape[1].of() == node.rows > 0
        assert node.cols > 0
        assert node.layout == LINEAR_LAYOUTS["w4a8"]
    assert linears[-1].shape[0].of(R=3) == 3
    assert linears[-1].rows == VOCAB
    assert linears[0].shape[0].of(T=7) == 7
    attention = [node for node in nodes if node.op == "attention"]
    assert [node.window for node in attention] == [0, 32]
    assert all(node.num_kv_heads == 2 and node.head_dim == 8 for node in attention)
