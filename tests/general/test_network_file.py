"""Bundles of general networks by a hostile hand: each rule refuses its own; damaged bytes crash nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.native import Context, Model, crc32
from penstock.core.predict import NetworkProgram
from penstock.errors import InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.ir import DType, Graph, Operand, State, Symbol, Value
from penstock.ops.general_table import GENERAL_SCHEMAS
from tests.support.errors import raises
from tests.support.file_damage import num_mutants
from tests.support.general_graphs import (
    SEEDS,
    NetworkBuilder,
    mixed_inputs,
    mixed_network,
    selecting_inputs,
    winograd_inputs,
    write_seeds,
)

Patch = Callable[[Graph], None]


def of_value(name: str, **changes: Any) -> Patch:
    return lambda g: g.values.__setitem__(name, dataclasses.replace(g.values[name], **changes))


def of_weight(name: str, **changes: Any) -> Patch:
    return lambda g: g.weights.__setitem__(name, dataclasses.replace(g.weights[name], **changes))


def field(name: str, new: object) -> Patch:
    return lambda g: setattr(g, name, new)


def sizes(*new: Symbol) -> Patch:
    return field("symbols", list(new))


def node(at: int, **changes: Any) -> Patch:
    return lambda g: g.nodes.__setitem__(at, dataclasses.replace(g.nodes[at], **changes))


def unbound_size(graph: Graph) -> None:
    graph.symbols.append(Symbol("free", 1, 4))


def state(graph: Graph) -> None:
    graph.page_groups, graph.states["s"] = [0], State("s", 1, 8, 0)


def undefined_output(graph: Graph) -> None:
    graph.values["u"], graph.outputs = Value("u", DType.F32, ()), ["x", "u"]


def later_operand(graph: Graph) -> None:
    graph.nodes[0].inputs[0] = Operand("value", "total")


N, H = Symbol("N", 1, 300, example=4), Symbol("h", 1, 8, example=2)
X = Operand("value", "x")
REFUSED: dict[str, tuple[str, Patch]] = {
    "a vocabulary": ("vocab_size", field("vocab_size", 8)),
    "a context": ("context_len", field("context_len", 8)),
    "states": ("states", state),
    "no outputs": ("metadata.outputs", field("outputs", [])),
    "an input twice": (r"inputs\[1\]", field("inputs", ["x", "x"])),
    "an input that is a constant": (r"inputs\[1\]", field("inputs", ["x", "table"])),
    "an output that nothing makes": (r"outputs\[1\]", undefined_output),
    "an output twice": (r"outputs\[1\].*listed twice", field("outputs", ["total", "total"])),
    "a size's name": (r"symbols\[0\].name", sizes(dataclasses.replace(N, name="a b"), H)),
    "a size that is a function": (r"symbols\[0\].name", sizes(dataclasses.replace(N, name="max"), H)),
    "a size twice": (r"symbols\[1\].name", sizes(N, dataclasses.replace(H, name="N"))),
    "an empty range": (r"symbols\[0\]", sizes(dataclasses.replace(N, min=9, max=8), H)),
    "no multiple in the range": (r"symbols\[0\]", sizes(Symbol("N", 5, 7, 4), H)),
    "an example out of the range": (r"symbols\[0\]", sizes(dataclasses.replace(N, example=301), H)),
    "a size of no input": (r"symbols\[2\]", unbound_size),
    "an unknown size": (r"inputs\[0\]", of_value("x", sizes="M,32")),
    "no list of sizes": (r"inputs\[0\]", of_value("x", sizes="N,,32")),
    "too many dims": (r"inputs\[0\]", of_value("x", sizes="1,1,1,1,1,N,32")),
    "negative dims": (r"inputs\[0\]", of_value("x", sizes="N-9,32")),
    "too many elements": (r"inputs\[0\]", of_value("x", sizes="N,32,2000000000,2000000000")),
    "another output shape": (r"outputs\[0\]", of_value("total", sizes="N,33")),
    "another type of an output": ("first", of_value("first", dtype=DType.I32)),
    "a view": (r"values\[\d+\].base", of_value("total", base="x")),
    "an offset": (r"values\[\d+\].offset", of_value("total", offset=1)),
    "a constant of another type": (r"values\[\d+\].dtype", of_value("table", dtype=DType.F32)),
    "a constant that is packed": (r"values\[\d+\].dtype", of_value("table", weight="first.weight")),
    "a constant of another shape": (r"weights\[\d+\].shape", of_weight("table", shape=(2, 2))),
    "a constant of a large shape": (r"weights\[\d+\].shape", of_weight("table", shape=(1 << 31, 1 << 31, 1 << 31))),
    "a negative shape": (r"weights\[\d+\].shape", of_weight("table", shape=(-1, -2, 3))),
    "a missing attribute": ("out_features", node(0, attrs={"scheme": "f32"})),
    "another list of sizes": ("sizes", node(6, attrs={"sizes": "N*4,2,k"})),
    "another number of elements": ("reshape", node(6, attrs={"sizes": "N*4,2,5"})),
    "no operand": ("expected a value", node(1, inputs=[Operand("none")])),
    "an operand too few": ("inputs", node(4, inputs=[X])),
    "a value before it is defined": (r"inputs\[0\]", later_operand),
    "a value that is defined twice": (r"outputs\[0\]", node(1, outputs=["first"])),
}  # fmt: skip


@pytest.fixture(scope="module")
def builder() -> NetworkBuilder:
    return mixed_network()


@pytest.mark.parametrize("name", REFUSED)
def test_each_rule_refuses_its_own(builder: NetworkBuilder, tmp_path: Path, name: str) -> None:
    where, patch = REFUSED[name]

    path = builder.write(tmp_path / "net.psm", patch)
    with pytest.raises((InvalidFileError, UnsupportedError), match=where):
        Model.open(path)


@pytest.mark.parametrize("op", ["embedding", "argmax", "barrier"])
def test_ops_of_language_models_are_refused(tmp_path: Path, op: str) -> None:
    b = NetworkBuilder(Symbol("N", 1, 4))
    x = b.input("x", "N,32", DType.I32 if op == "embedding" else DType.F32)
    if op == "embedding":
        b.node(op, [x, b.weight("table", np.zeros((4, 8), np.float32))], "y", dim=8)
    elif op == "argmax":
        b.node(op, [x], "y", out_dtype=DType.I32)
    else:
        b.node(op, [x], "y", world=1, rank=0)
    b.output("y", "N")
    path = b.write(tmp_path / "net.psm", lambda _: None)
    with raises(UnsupportedError, param="nodes[0]", match=op):
        Model.open(path)


def test_the_kind_and_its_feature_belong_together(builder: NetworkBuilder, tmp_path: Path) -> None:
    data = bytearray(builder.write(tmp_path / "net.psm").read_bytes())
    assert (data[10], data[36]) == (1, 1)  # the minor version, and the bit that older readers refuse
    data[36] = 0
    (tmp_path / "b.psm").write_bytes(data)
    with raises(InvalidFileError, match="required_features"):
        Model.open(tmp_path / "b.psm")
    data[36] = 3
    (tmp_path / "b.psm").write_bytes(data)
    with raises(UnsupportedError, match="required_features"):
        Model.open(tmp_path / "b.psm")


def test_seeds_of_the_fuzzers_have_every_op(tmp_path: Path) -> None:
    ops = {node.op for path in write_seeds(tmp_path) for node in read_graph(path)[0].nodes}
    assert set(GENERAL_SCHEMAS) - ops == set()


INPUTS = {"mixed": mixed_inputs(4, 2), "selecting": selecting_inputs(2, 6), "winograd": winograd_inputs(2, 5, 4)}


@pytest.mark.parametrize("name", SEEDS)
def test_damaged_bytes_crash_nothing(tmp_path: Path, name: str) -> None:
    data, path = SEEDS[name]().write(tmp_path / "net.psm").read_bytes(), tmp_path / "b.psm"
    end = 64 + int.from_bytes(data[24:32], "little")
    rng, ran = random.Random(5), 0
    with Context(1) as context:
        for _ in range(num_mutants(300)):
            bytes_ = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                bytes_[rng.randrange(64, end)] = rng.choice((0, 1, 2, 3, 7, 8, 48, 127, 255, rng.randrange(256)))
            bytes_[32:36] = crc32(bytes_[64:end]).to_bytes(4, "little")
            path.write_bytes(bytes_)
            try:
                with Model.open(path) as model, NetworkProgram(model, context) as program:
                    program.predict(INPUTS[name])
                    ran += 1
            except (PenstockError, UnicodeDecodeError):
                continue
    assert ran
