"""The tests of ranks can fail: with a fault in one rank, other bits come out or the group ends."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.comm import SharedComm
from penstock.errors import UnavailableError
from penstock.graph import rank_bundle
from penstock.graph.bundle import BundleWriter, read_graph
from penstock.graph.ir import Dim, Layout, Node, Operand, Part, Value, Weight
from penstock.graph.passes.shard import RowRanges
from tests.support.errors import raises
from tests.support.faulty_comm import FaultyComm
from tests.support.rank_threads import RankThreads, SharedMemory, logits_of, steps, whole_logits

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, int], list[Path]]
STEPS = steps(1)


@pytest.fixture
def whole(bundle_of: BundleOf) -> Path:
    return bundle_of("llama_head_dim", "f32")


def run(parts: list[Path], fault: Callable[[SharedComm], Any] | None = None) -> tuple[list[bytes], RankThreads]:
    """The logits of two ranks, of which rank 1 has a fault."""
    memory = SharedMemory(2)

    def comm_of(rank: int) -> Any:
        comm = memory.comm(rank, 2)
        return fault(comm) if fault and rank == 1 else comm

    with RankThreads(parts, comm_of=comm_of) as ranks:
        return logits_of(ranks.program, STEPS), ranks


def test_without_a_fault_the_same_set_up_gives_the_same_bits(whole: Path, parts_of: PartsOf) -> None:
    found, ranks = run(parts_of(whole, 2), lambda comm: FaultyComm(comm))
    assert found == whole_logits(whole, STEPS)
    assert not ranks.errors


def test_a_slice_one_row_off_gives_other_bits(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts_of: PartsOf
) -> None:
    take_rows = rank_bundle.take_rows

    def one_off(weight: Weight, data: np.ndarray, ranges: RowRanges) -> np.ndarray:
        if ranges[0][0] > 0:
            ranges = tuple((start - 1, stop - 1) for start, stop in ranges)
        return take_rows(weight, data, ranges)

    monkeypatch.setattr(rank_bundle, "take_rows", one_off)
    part = tmp_path / "rank_1.psm"
    rank_bundle.write_rank_bundle(whole, part, 1, 2)
    found, _ = run([parts_of(whole, 2)[0], part])
    expected = whole_logits(whole, STEPS)
    assert [a == b for a, b in zip(found, expected, strict=True) if b] == [False] * sum(map(bool, expected))


def test_a_stale_buffer_gives_other_bits(whole: Path, parts_of: PartsOf) -> None:
    """Rank 1 reads in its 20th exchange what rank 0 sent in the 18th."""

    def stale(comm: SharedComm) -> FaultyComm:
        original, seen = comm.struct.all_gather, []

        def all_gather(this: int, tag: int, sizes: Any, parts: Any) -> int:
            status = original(this, tag, sizes, parts)
            seen.append(ctypes.string_at(parts[0], sizes[0]))
            if len(seen) == 20 and len(seen[17]) >= sizes[0]:
                ctypes.memmove(parts[0], seen[17], sizes[0])
            return int(status)

        return FaultyComm(comm, all_gather=all_gather)

    found, _ = run(parts_of(whole, 2), stale)
    assert found != whole_logits(whole, STEPS)


def test_a_rank_that_is_one_step_behind_ends_the_group(whole: Path, parts_of: PartsOf) -> None:
    """Rank 1 gets each batch one step late."""

    def behind(comm: SharedComm) -> FaultyComm:
        original, batches = comm.struct.broadcast, []

        def broadcast(this: int, tag: int, root: int, size: int, forever: int, data: Any) -> int:
            status = original(this, tag, root, size, forever, data)
            if status == 0 and size:  # ranks that open wait for each other by broadcasts of nothing
                batches.append(ctypes.create_string_buffer(ctypes.string_at(data[0], size), size))
                data[0] = ctypes.addressof(batches[max(0, len(batches) - 2)])
            return int(status)

        return FaultyComm(comm, broadcast=broadcast)

    with raises(UnavailableError, param="ranks", match=r"rank 1 .*step 1 .*rank 0, \w+ 0"):
        run(parts_of(whole, 2), behind)


def test_a_batch_that_arrives_damaged_ends_the_group(whole: Path, parts_of: PartsOf) -> None:
    def damaging(comm: SharedComm) -> FaultyComm:
        original = comm.struct.broadcast

        def broadcast(this: int, tag: int, root: int, size: int, forever: int, data: Any) -> int:
            status = original(this, tag, root, size, forever, data)
            if status == 0 and size:  # ranks that open wait for each other by broadcasts of nothing
                ctypes.c_uint8.from_address(data[0] + 60).value ^= 1  # in a token id
            return int(status)

        return FaultyComm(comm, broadcast=broadcast)

    with raises(UnavailableError, param="ranks", match=r"rank 1 .*hash"):
        run(parts_of(whole, 2), damaging)


def test_a_rank_that_leaves_out_an_exchange_ends_the_group(whole: Path, parts_of: PartsOf) -> None:
    def lazy(comm: SharedComm) -> FaultyComm:
        original, calls = comm.struct.all_gather, []

        def all_gather(this: int, tag: int, sizes: Any, parts: Any) -> int:
            calls.append(tag)
            return 0 if len(calls) == 9 else int(original(this, tag, sizes, parts))

        return FaultyComm(comm, all_gather=all_gather)

    with raises(UnavailableError, param="ranks", match="do not run the same step"):
        run(parts_of(whole, 2), lazy)


def test_a_sum_over_parts_of_k_gives_other_bits(whole: Path, tmp_path: Path) -> None:
    """What ranks that add up partial results would compute: a linear as the sum of two over half of its inputs."""
    graph, segments = read_graph(whole)
    offset = next(segment.offset for segment in segments if segment.name == "weights")
    data = np.frombuffer(whole.read_bytes(), np.uint8)[offset:]
    stored = {
        name: data[weight.offset : weight.offset + weight.num_bytes].copy() for name, weight in graph.weights.items()
    }
    down = next(node for node in graph.nodes if node.name.endswith("down_proj"))
    weight, x = graph.weights.pop(down.inputs[1].name), graph.values[down.inputs[0].name]
    tiles = stored[weight.name].reshape(-1, weight.cols, 64)
    rows, half = x.shape[0], weight.cols // 2
    index = graph.nodes.index(down)
    for i, columns in enumerate((range(half), range(half, weight.cols))):
        name = f"half{i}"
        graph.values[f"{name}:x"] = Value(f"{name}:x", x.dtype, (rows, Dim(None, 0, half)), x.name, columns.start)
        graph.values[name] = Value(name, x.dtype, (rows, Dim(None, 0, weight.rows)))
        graph.weights[name] = Weight(name, weight.rows, half, Layout.T16_F32, (Part(name, 0, weight.rows),))
        stored[name] = np.ascontiguousarray(tiles[:, columns.start : columns.stop]).reshape(-1)
        inputs = [Operand("value", f"{name}:x"), Operand("weight", name), Operand("none")]
        graph.nodes.insert(index, Node("linear", name, inputs, [name], dict(down.attrs)))
    graph.nodes[graph.nodes.index(down)] = Node(
        "add", "sum", [Operand("value", "half0"), Operand("value", "half1")], down.outputs, {}
    )
    path = tmp_path / "split_k.psm"
    with BundleWriter(path, graph, {}) as writer:
        for name in graph.weights:
            writer.add_weight(name, stored[name])
    found, expected = whole_logits(path, STEPS), whole_logits(whole, STEPS)
    assert found != expected
    for a, b in zip(found, expected, strict=True):
        assert np.allclose(np.frombuffer(a, np.float32), np.frombuffer(b, np.float32), atol=1e-3)


@pytest.mark.parametrize("when", [0, 1, 2, 9, 17, 18, 30])
def test_a_rank_that_raises_in_any_exchange_ends_the_step(when: int, whole: Path, parts_of: PartsOf) -> None:
    """Before the first exchange of a step, in one of a layer, in that of the logits, and in a later step."""

    def failing(comm: SharedComm) -> FaultyComm:
        original, calls = comm.struct.all_gather, []

        def all_gather(this: int, tag: int, sizes: Any, parts: Any) -> int:
            calls.append(tag)
            if len(calls) - 1 == when:
                comm.abort("rank 1: out of luck")
            return int(original(this, tag, sizes, parts))

        return FaultyComm(comm, all_gather=all_gather)

    with raises(UnavailableError, param="ranks", match="rank 1: out of luck"):
        run(parts_of(whole, 2), failing)
