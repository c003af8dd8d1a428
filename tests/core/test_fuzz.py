"""Ten thousand mutants of bundles against the core under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.graph.ir import Graph, Node, Operand
from penstock.graph.passes.append_tail import append_tail
from penstock.graph.passes.shard import shard
from penstock.ops import table
from penstock.ops.table import Op
from tests.support.builds import build
from tests.support.general_graphs import write_seeds
from tests.support.tiny_graph import tiny_graph, write_bundle
from tests.support.tokenizer_kinds import KINDS, segment_of

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
NUM_MUTANTS = 10000


@pytest.fixture(scope="module")
def fuzzer(sanitized_build: Path) -> Path:
    targets = ("fuzz_bundle", "fuzz_sample", "fuzz_tokenizer", "api_check", "ops_check")
    build(sanitized_build, *targets)
    return next(path for path in sanitized_build.rglob("fuzz_bundle") if path.is_file())


def rank_graph() -> Graph:
    """The graph of a rank without others, with every op that exchanges."""
    graph, _ = shard(tiny_graph(), 0, 1)
    index = next(i for i, node in enumerate(graph.nodes) if node.op == "gather_rows")
    x, group = graph.nodes[index].inputs[0].name, {"world": 1, "rank": 0}
    width = graph.values[x].shape[1].offset
    attrs = {
        "broadcast": {"root": 0, **group},
        "send": {"target": 0, **group},
        "recv": {"width": width, "source": 0, **group},
        "barrier": group,
    }
    for op, values in attrs.items():
        graph.values[op] = dataclasses.replace(graph.values[x], name=op, base=None, offset=0)
        graph.nodes.insert(index, Node(op, op, [Operand("value", x)], [op], values))
        x, index = op, index + 1
    graph.nodes[index].inputs[0] = Operand("value", x)
    return graph


def test_no_mutant_crashes_the_core(fuzzer: Path, bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    seeds = [str(bundle_of(scheme, windows)) for scheme, windows in (("f32", (0, 32)), ("w8a8", (0,)), ("w4a8", (32,)))]
    tail = tiny_graph()
    append_tail(tail, "topk:5")
    seeds.append(str(write_bundle(tmp_path / "tail.psm", tail)))
    seeds.append(str(write_bundle(tmp_path / "rank.psm", rank_graph())))
    seeds += map(str, write_seeds(tmp_path))
    seeds.append(str(ROOT / "tests/golden/layouts/1.0/layouts.psm"))
    command = [str(fuzzer), str(NUM_MUTANTS), "1", *seeds]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", done.stdout)}
    assert counts["mutants"] == NUM_MUTANTS
    assert counts["opened"] > NUM_MUTANTS // 50  # mutants reach the planner and the executor too
    assert counts["ran"] > NUM_MUTANTS // 50
    assert counts["hidden"] > NUM_MUTANTS // 200
    assert counts["tails"] > NUM_MUTANTS // 200
    assert counts["predicted"] > NUM_MUTANTS // 200
    assert counts["invalid_file"] > NUM_MUTANTS // 2


def test_no_numbers_of_sampling_crash_the_core(fuzzer: Path) -> None:
    command = [str(fuzzer.with_name("fuzz_sample")), "20000", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 10000  # most cases are sound


def test_no_mutant_of_a_tokenizer_crashes_the_core(fuzzer: Path, tmp_path: Path) -> None:
    seeds = []
    for i, kind in enumerate(kind for kind in KINDS if kind != "demo"):
        seeds.append(tmp_path / f"{i}.bin")
        seeds[-1].write_bytes(segment_of(KINDS[kind]()))
    command = [str(fuzzer.with_name("fuzz_tokenizer")), "20000", "1", *map(str, seeds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", done.stdout)}
    assert counts["opened"] > 20000 // 5  # what opens encodes and decodes
    assert counts["encoded"] > counts["opened"]
    assert counts["invalid_file"] > 20000 // 5


def test_no_misuse_from_c_crashes_the_core(fuzzer: Path) -> None:
    """Null, closed, foreign and forked handles, wrong sizes of structs, steps beyond the plan: a status each time."""
    command = [str(fuzzer.with_name("api_check")), str(ROOT / "demo" / "demo.psm")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "0 failures\n"


def test_no_op_of_ones_own_crashes_the_core(fuzzer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that are none, tables and schemas that are malformed, callbacks that lie or fail."""
    op = Op("example::squared_relu", 1, "(Tensor x, Weight? scale, *, float limit) -> Tensor", 0.0)
    monkeypatch.setitem(table._CUSTOM, op.name, op)

    def patch(graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "silu_mul":
                node.op, node.inputs, node.attrs = op.name, [node.inputs[0], Operand("none")], {"limit": 4.0}

    bundle = write_bundle(tmp_path / "op.psm", tiny_graph(), patch=patch)
    command = [str(fuzzer.with_name("ops_check")), str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "0 failures\n"
