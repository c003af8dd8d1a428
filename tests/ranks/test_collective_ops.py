"""The ops of several ranks: alone on each rank, and as nodes of a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core import layouts
from penstock.core.metadata import read_metadata
from penstock.core.native import Context, CoreTensor, Model, run_op
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.graph.bundle import BundleWriter
from penstock.graph.ir import Graph, Node, Operand, Value
from penstock.graph.metadata import decode_metadata
from tests.support.errors import raises
from tests.support.rank_threads import RankThreads, SharedMemory, logits_of, steps, whole_logits

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, int], list[Path]]


def tensor(array: np.ndarray, layout: int = 0) -> CoreTensor:
    dtype = layouts.I32 if array.dtype == np.int32 else layouts.F32
    return CoreTensor(array.ctypes.data, dtype, array.shape, array.strides[0] // 4, layout)


def on_ranks(world: int, work: Callable[[int, Context], Any], num_threads: int = 2) -> list[Any]:
    """What ``work`` returns or raises on each rank."""
    memory, results = SharedMemory(world), [None] * world

    def run(rank: int) -> None:
        with Context(num_threads, comm=memory.comm(rank, world)) as context:
            try:
                results[rank] = work(rank, context)
            except PenstockError as error:
                results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_all_gather_puts_unequal_columns_together(num_rows: int) -> None:
    starts = [0, 7, 8, 40]
    whole = np.random.default_rng(1).standard_normal((num_rows, 40), np.float32)

    def work(rank: int, context: Context) -> bool:
        part, out = whole[:, starts[rank] : starts[rank + 1]], np.zeros_like(whole)  # strided rows
        run_op(context, "all_gather", [tensor(part), tensor(out)], {"starts": "0|7|8|40", "rank": rank})
        return out.tobytes() == whole.tobytes()

    assert on_ranks(3, work) == [True] * 3


@pytest.mark.parametrize("num_slots", [1, 3])
def test_all_gather_puts_each_slot_together(num_slots: int) -> None:
    starts = [0, 7, 8, 40]
    whole = np.random.default_rng(1).standard_normal((5, num_slots, 40), np.float32)

    def work(rank: int, context: Context) -> bool:
        part, out = whole[:, :, starts[rank] : starts[rank + 1]].copy(), np.zeros_like(whole)
        run_op(context, "all_gather", [tensor(part), tensor(out)], {"starts": "0|7|8|40", "rank": rank})
        return out.tobytes() == whole.tobytes()

    assert on_ranks(3, work) == [True] * 3


@pytest.mark.parametrize(("bits", "limit"), [(8, 127), (16, 32512)])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_rounded_rows_round_to_the_same_integers(num_slots: int, bits: int, limit: int) -> None:
    """On all ranks, with the scale of the whole row; also rows of zeros and rows that are not finite."""
    starts, generator = [0, 7, 8, 40], np.random.default_rng(1)
    whole = generator.standard_normal((6, num_slots, 40), np.float32) * np.float32(10.0) ** generator.integers(
        -30, 30, (6, num_slots, 1)
    ).astype(np.float32)
    whole[1], whole[2, 0, 9], whole[3, 0, 30], whole[4] = 0, np.nan, np.inf, whole[4] * np.float32(1e-38)

    def rounded(x: np.ndarray) -> tuple[bytes, bytes]:
        with np.errstate(all="ignore"):
            scale = np.abs(x).max(-1, keepdims=True) / np.float32(limit)
            integers = np.rint(x * (np.float32(1) / scale))
        is_small, is_finite = scale < np.float32(1e-37), np.isfinite(scale)
        scale, integers = np.where(is_small, 0, scale), np.where(is_small | ~is_finite, 0, integers)
        return np.where(is_finite, scale, np.nan).tobytes(), integers.astype(np.int32).tobytes()

    def work(rank: int, context: Context) -> bytes:
        part, out = whole[:, :, starts[rank] : starts[rank + 1]].copy(), np.zeros_like(whole)
        attrs = {"starts": "0|7|8|40", "rank": rank, "bits": bits}
        run_op(context, "all_gather_rounded", [tensor(part), tensor(out)], attrs)
        assert rounded(out) == rounded(whole)
        return out.tobytes()

    results = on_ranks(3, work)
    assert results[0] == results[1] == results[2]
    assert isinstance(results[0], bytes)


def test_the_owner_of_a_token_stores_its_row() -> None:
    """Minus zero stays minus zero, as it would not in a sum."""
    table = np.random.default_rng(2).standard_normal((50, 12), np.float32)
    table[3] = -0.0
    ids = np.array([3, 49, 0, 20, 3, 19, 21, 49], np.int32)
    starts = [0, 20, 21, 50]

    def work(rank: int, context: Context) -> bool:
        part = np.ascontiguousarray(table[starts[rank] : starts[rank + 1]])
        out = np.zeros((len(ids), 12), np.float32)
        attrs = {"dim": 12, "starts": "0|20|21|50", "rank": rank}
        run_op(context, "sharded_embedding", [tensor(ids), tensor(part, layouts.ROWS_F32), tensor(out)], attrs)
        return out.tobytes() == table[ids].tobytes()

    assert on_ranks(3, work) == [True] * 3


def test_broadcast_send_and_recv_move_rows() -> None:
    sent = [np.full((5, 300), rank, np.float32) for rank in range(3)]

    def work(rank: int, context: Context) -> tuple[list[float], list[float]]:
        out, other, group = np.zeros((5, 300), np.float32), np.zeros((5, 300), np.float32), {"world": 3, "rank": rank}
        run_op(context, "broadcast", [tensor(sent[rank]), tensor(out)], {"root": 2, **group})
        run_op(context, "barrier", [tensor(out), tensor(other)], group)
        first = np.unique(other).tolist()
        positions = np.arange(5, dtype=np.int32)
        if rank == 0:  # 0 -> 1 -> 2 -> 0
            run_op(context, "send", [tensor(sent[rank]), tensor(out)], {"target": 1, **group})
        run_op(context, "recv", [tensor(positions), tensor(out)], {"width": 300, "source": (rank - 1) % 3, **group})
        if rank > 0:
            run_op(context, "send", [tensor(out), tensor(other)], {"target": (rank + 1) % 3, **group})
        return first, np.unique(out).tolist()

    assert on_ranks(3, work) == [([2.0], [0.0])] * 3


@pytest.mark.parametrize(
    ("op", "attrs", "field", "message"),
    [
        ("all_gather", {"starts": "0|8|16", "rank": 2}, "rank", r"expected 0 to 1, \w+ 2"),
        ("all_gather", {"starts": "0|8|8", "rank": 0}, "starts", "expected 2 to 65 ascending numbers"),
        ("all_gather", {"starts": "1|8", "rank": 0}, "starts", "expected"),
        ("all_gather", {"starts": "0|", "rank": 0}, "starts", "expected"),
        ("all_gather", {"starts": "", "rank": 0}, "starts", "expected"),
        ("all_gather", {"starts": "0|9999999999", "rank": 0}, "starts", "expected"),
        ("all_gather", {"starts": "|".join(map(str, range(66))), "rank": 0}, "starts", "expected"),
        ("all_gather", {"starts": "0|4|16", "rank": 0}, "x", "expected f32 rows of 4"),
        ("barrier", {"world": 2, "rank": 0}, "rank", "expected a context with the comm of rank 0 of 2"),
        ("broadcast", {"root": 2, "world": 2, "rank": 0}, "root", r"expected 0 to 1, \w+ 2"),
        ("send", {"target": -1, "world": 2, "rank": 0}, "target", r"expected 0 to 1, \w+ -1"),
        ("recv", {"width": 8, "source": 0, "world": 0, "rank": 0}, "world", r"expected 1 to 64, \w+ 0"),
        ("recv", {"width": 9, "source": 0, "world": 1, "rank": 0}, "rows", "expected f32 rows of 9"),
        ("recv", {"width": 0, "source": 0, "world": 1, "rank": 0}, "width", "expected 1 to"),
        ("barrier", {"world": 65, "rank": 0}, "world", r"expected 1 to 64, \w+ 65"),
        ("barrier", {"world": 3, "rank": 3}, "rank", r"expected 0 to 2, \w+ 3"),
    ],
)
def test_wrong_attributes_are_refused_by_name(op: str, attrs: dict[str, Any], field: str, message: str) -> None:
    x, out = np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float32)
    with Context(1) as context, raises(InvalidArgumentError, param=field, match=message):
        run_op(context, op, [tensor(x), tensor(out)], attrs)


def add_collectives(graph: Graph, rank: int) -> None:
    """Behind the first norm, which every rank computes: a barrier and a broadcast."""
    index, norm = next((i, node) for i, node in enumerate(graph.nodes) if node.op == "rms_norm")
    group = {"world": 2, "rank": rank}
    last = norm.outputs[0]
    for op, attrs in reversed([("barrier", group), ("broadcast", {"root": 1, **group})]):
        x, name = graph.values[norm.outputs[0]], f"added:{op}"
        graph.values[name] = Value(name, x.dtype, x.shape)
        graph.nodes.insert(index + 1, Node(op, name, [Operand("value", norm.outputs[0])], [name], attrs))
        if last == norm.outputs[0]:
            last = name
    for node in graph.nodes[index + 3 :]:
        node.inputs = [Operand("value", last) if o == Operand("value", norm.outputs[0]) else o for o in node.inputs]


def test_nodes_of_a_graph_exchange(bundle_of: BundleOf, parts_of: PartsOf, tmp_path: Path) -> None:
    whole, changed = bundle_of("llama", "w8a8"), []
    for rank, part in enumerate(parts_of(whole, 2)):
        path = tmp_path / f"{rank}.psm"
        with Model.open(part) as model:
            graph, _ = decode_metadata(read_metadata(part, model.stamp))
            stored = np.frombuffer(model.segment("weights") or b"", np.uint8)
            add_collectives(graph, rank)
            with BundleWriter(path, graph, {}) as writer:
                for weight in graph.weights.values():
                    writer.add_weight(weight.name, stored[weight.offset : weight.offset + weight.num_bytes])
        changed.append(path)
    for num_threads in (1, 2):
        with RankThreads(changed, num_threads=num_threads) as ranks:
            assert logits_of(ranks.program, steps(1)) == whole_logits(whole, steps(1))
