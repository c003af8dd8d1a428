"""Nodes that run over the tokens whose logits are wanted: the same bits as over all of them, and fewer rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.core import spans
from penstock.core.native import ALL_THREADS, POISON, Context, CoreProgram, Model
from penstock.graph.ir import KvLayout, Node, Operand
from tests.support.core_steps import OPTIONS, PROMPT, batch, i32
from tests.support.tiny_graph import HEAD_DIM, R, c, tiny_graph, value, write_bundle

# Prompts of two requests and their pages, and tokens of both together whose logits are wanted.
REQUESTS = [(0, PROMPT[:23], (3, 7)), (0, PROMPT[10:], (1, 2))]
ROWS = [[52], [22, 52], [22], [0], [2, 3, 4, 20, 21, 22, 23, 30, 52], list(range(26)), []]


def rows_of(program: CoreProgram, rows: Sequence[int]) -> npt.NDArray[np.float32]:
    program.run(batch(REQUESTS, output_rows=i32(*rows)))
    return program.logits().copy()


@pytest.mark.parametrize("scheme", ["f32", "bf16", "w8a8", "w4a8"])
@pytest.mark.parametrize("kv", KvLayout)
def test_few_wanted_rows_have_the_bits_of_all(scheme: str, kv: KvLayout, bundle_of: Callable[..., Path]) -> None:
    options = dataclasses.replace(OPTIONS, flags=POISON | ALL_THREADS, kv_layout=kv)
    with Model.open(bundle_of(scheme, (0, 32))) as model, Context(3) as context:
        assert any(node.wanted_only for node in spans.node_infos(model))
        tables = np.repeat(batch(REQUESTS).page_tables, 2, 0)
        with CoreProgram(model, context, options) as program:
            program.run(batch(REQUESTS, page_tables=tables))
            expected = program.logits().copy()
            for rows in ROWS:
                program.run(batch(REQUESTS, page_tables=tables, output_rows=i32(*rows)))
                assert program.logits().tobytes() == expected[rows].tobytes()


@pytest.mark.parametrize("rows", [[52, 22], [22, 22, 52], list(range(20, 50))])
def test_unordered_repeated_and_many_rows_are_selected(rows: list[int], model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as program:
        expected = rows_of(program, range(53))
        assert rows_of(program, rows).tobytes() == expected[rows].tobytes()


@pytest.mark.parametrize("chunks", [[40], [39, 1], [1, 38, 1], [16, 16, 8]])
def test_chunks_without_wanted_rows_keep_keys_and_values(chunks: list[int], model: Model, context: Context) -> None:
    with CoreProgram(model, context, dataclasses.replace(OPTIONS, flags=POISON | ALL_THREADS)) as program:
        program.run(batch([(0, PROMPT, (1, 2))]))
        expected, kept = program.logits()[-1].copy(), [program.kv(s).copy() for s in range(model.info.num_states)]
        at = 0
        for size in chunks:
            for state in range(model.info.num_states if at == 0 else 0):
                program.kv(state)[:] = 0xFF
            rows = i32(size - 1) if at + size == len(PROMPT) else i32()
            program.run(batch([(at, PROMPT[at : at + size], (1, 2))], output_rows=rows))
            at += size
        assert program.logits()[0].tobytes() == expected.tobytes()
        for state, pages in enumerate(kept):
            found = program.kv(state)[1:3].view(np.float32)
            written = np.isfinite(found)
            assert written.any()
            np.testing.assert_array_equal(found[written], pages[1:3].view(np.float32)[written])


def test_unwanted_rows_are_not_computed(model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as program:
        program.run(batch(REQUESTS, hidden=True))
        rows = program.hidden()  # a view: later steps have their rows there too
        whole = rows.copy()
        program.run(batch(REQUESTS, output_rows=i32(22, 52)))
        assert rows[:2].tobytes() == whole[[22, 52]].tobytes()
        assert not (rows[2:] == whole[2:]).all(1).any()
        program.run(batch(REQUESTS, output_rows=i32(22, 52), hidden=True))
        assert rows.tobytes() == whole.tobytes()


def test_wanted_only_nodes_have_no_other_readers(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    def kept(path: Path) -> list[str]:
        with Model.open(path) as model:
            return [f"{node.op} {node.name}" for node in spans.node_infos(model) if node.wanted_only]

    assert kept(bundle_of()) == [
        "rope layers.1.attn", "attention layers.1.attn", "linear layers.1.attn.o", "add_rms_norm layers.1.post",
        "linear layers.1.mlp.gate_up", "silu_mul layers.1.mlp", "linear layers.1.mlp.down",
        "add_rms_norm layers.1.next",
    ]  # fmt: skip
    graph = tiny_graph()  # keys that come after the last layer's attention read its result: it is made for all tokens
    attention = [node for node in graph.nodes if node.op == "attention"][-1]
    append = [node for node in graph.nodes if node.op == "kv_append"][-1]
    again = Node("kv_append", "again", list(append.inputs), [], dict(append.attrs))
    graph.nodes.insert(graph.nodes.index(attention) + 1, again)
    assert kept(write_bundle(tmp_path / "again.psm", graph)) == []
    graph = tiny_graph()  # hidden rows that something else than the picking reads
    gather = next(node for node in graph.nodes if node.op == "gather_rows")
    name = gather.inputs[0].name
    graph.values["doubled"] = dataclasses.replace(graph.values[name], name="doubled")
    double = Node("add", "double", [value(name), Operand("value", name)], ["doubled"], {})
    graph.nodes.insert(graph.nodes.index(gather), double)
    assert kept(write_bundle(tmp_path / "read.psm", graph)) == []
    graph = tiny_graph()  # wanted rows that something else than the picking reads: by numbers of all tokens
    rotary = next(node for node in graph.nodes if node.op == "rotary_embedding")
    graph.values["turned"] = dataclasses.replace(graph.values["cos_sin"], name="turned", shape=(R, c(HEAD_DIM)))
    inputs = [value("output_rows"), *rotary.inputs[1:]]
    graph.nodes.insert(1, Node("rotary_embedding", "again", inputs, ["turned"], dict(rotary.attrs)))
    assert kept(write_bundle(tmp_path / "rows.psm", graph)) == []
