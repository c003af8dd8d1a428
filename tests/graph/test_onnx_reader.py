"""The reader of ONNX files: names, sizes, what is refused, and hostile files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.general.sizes import as_text
from penstock.graph.onnx.reader import read_onnx
from penstock.networks.network import read_network
from penstock.networks.predictor import open_predictor
from tests.support.command import ROOT
from tests.support.errors import raises


def model(
    nodes: list[Any], inputs: dict[str, tuple[Any, ...]], outputs: list[str], constants: dict[str, Any] | None = None,
    opset: int = 18, **more: Any,
) -> onnx.ModelProto:  # fmt: skip
    element = more.pop("element", TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, element, shape) for name, shape in inputs.items()],
        [helper.make_value_info(name, helper.make_tensor_type_proto(TensorProto.FLOAT, None)) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9, **more)


def relu(shape: tuple[Any, ...], **more: Any) -> bytes:
    found: bytes = model([helper.make_node("Relu", ["x"], ["y"])], {"x": shape}, ["y"], **more).SerializeToString()
    return found


def shape_of(data: bytes, sizes: dict[str, Any] | None = None) -> list[str]:
    return [as_text(size) for size in read_onnx(data, sizes).outputs[0].shape]


def test_sizes_are_named_fixed_or_have_ranges() -> None:
    data = relu(("batch", None, "H", 4))
    assert shape_of(data) == ["batch", "x_1", "H", "4"]
    assert shape_of(data, {"batch": 2, "x/1": 3, "H": (32, 1024, 32)}) == ["2", "3", "32*H_32", "4"]
    assert shape_of(data, {"x": (1, 2, None, 4)}) == ["1", "2", "H", "4"]
    symbol = read_onnx(data, {"H": (32, 1024, 32)}).symbols()[-1]
    assert (symbol.min, symbol.max) == (1, 32)
    for wrong in ({"W": 3}, {"H": (5, 4)}, {"x/3": 5}, {"H": (1, 31, 32)}):
        with raises(InvalidArgumentError, param="sizes"):
            read_onnx(data, wrong)


def test_arithmetic_on_shapes_disappears() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["y"]),
    ]
    constants = {"zero": np.array([0]), "rest": np.array([-1, 2])}
    draft = read_onnx(model(nodes, {"x": ("N", 3, 4)}, ["y"], constants).SerializeToString())
    assert [call.op for call in draft.calls] == ["reshape"]
    assert [as_text(size) for size in draft.outputs[0].shape] == ["N", "6", "2"]


@pytest.mark.parametrize("opset", [11, 13])
def test_squeeze_of_two_versions(opset: int) -> None:
    if opset < 13:
        node, constants = helper.make_node("Squeeze", ["x"], ["y"], axes=[1]), None
    else:
        node, constants = helper.make_node("Squeeze", ["x", "axes"], ["y"]), {"axes": np.array([1])}
    data = model([node], {"x": (2, 1, 3)}, ["y"], constants, opset).SerializeToString()
    assert shape_of(data) == ["2", "3"]


def test_a_condition_on_sizes_takes_one_branch() -> None:
    def branch(op: str) -> Any:
        out = helper.make_value_info("out", helper.make_tensor_type_proto(TensorProto.FLOAT, None))
        return helper.make_graph([helper.make_node(op, ["x"], ["out"])], op, [], [out])

    nodes = [
        helper.make_node("Size", ["x"], ["n"]),
        helper.make_node("Equal", ["n", "six"], ["same"]),
        helper.make_node("If", ["same"], ["y"], then_branch=branch("Exp"), else_branch=branch("Loop")),
    ]
    data = model(nodes, {"x": ("A", 3)}, ["y"], {"six": np.array(6)}).SerializeToString()
    assert [call.attrs["kind"] for call in read_onnx(data, {"A": 2}).calls] == ["exp"]
    for size, sizes, name in (("batch-size", {}, "batch-size"), (None, {}, "x/0"), ("A", {"A": (2, 64, 2)}, "A")):
        data = model(nodes, {"x": (size, 3)}, ["y"], {"six": np.array(6)}).SerializeToString()
        with raises(UnsupportedError, code="unsupported_nodes") as raised:
            read_onnx(data, sizes)
        assert f"--size {name}=N" in str(raised.value)
        assert read_onnx(data, {name: 2}).outputs  # the name is one that a caller may give
    nodes[-1].input[0] = "flag"
    open_value = model(nodes[2:], {"x": (2, 3), "flag": ()}, ["y"]).SerializeToString()
    with raises(UnsupportedError, code="unsupported_nodes") as raised:
        read_onnx(open_value)
    assert "--size flag=N" in str(raised.value)


def test_texts_of_a_file_are_properties_of_its_bundle(tmp_path: Path) -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], {"x": (2,)}, ["y"])
    texts = {"labels": "cat\ndog", "\x01": "no name", "long": "a" * (1 << 20) + "b", "nul": "a\0b"}
    helper.set_model_props(made, texts)
    (tmp_path / "net.onnx").write_bytes(made.SerializeToString())
    network = read_network(tmp_path / "net.onnx")
    network.save(tmp_path / "net.psm", properties={"more": "1"})
    with open_predictor(tmp_path / "net.psm") as predictor, network.compile() as compiled:
        assert predictor.properties == {"labels": "cat\ndog", "more": "1"}
        assert compiled.properties == {"labels": "cat\ndog"}


def test_functions_are_read_through_their_bodies() -> None:
    body = helper.make_node("LeakyRelu", ["a"], ["b"])
    body.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    function = helper.make_function("mine", "Leaky", ["a"], ["b"], [body], [helper.make_opsetid("", 18)], ["slope"])
    node = helper.make_node("Leaky", ["x"], ["y"], domain="mine", slope=0.25)
    made = model([node], {"x": (2,)}, ["y"], functions=[function])
    made.opset_import.append(helper.make_opsetid("mine", 1))
    assert [call.attrs["alpha"] for call in read_onnx(made.SerializeToString()).calls] == [0.25]
    recursive = helper.make_function(
        "mine", "Leaky", ["a"], ["b"], [helper.make_node("Leaky", ["a"], ["b"], domain="mine")],
        [helper.make_opsetid("", 18)],
    )  # fmt: skip
    endless = model([node], {"x": (2,)}, ["y"], functions=[recursive])
    with pytest.raises(InvalidFileError):
        read_onnx(endless.SerializeToString())


def test_all_unsupported_nodes_are_named() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["a"], name="first"),
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT),
        helper.make_node("Fused", ["b"], ["y"], name="second", domain="com.microsoft"),
        helper.make_node("Loop", ["x"], ["unused"], name="third"),
    ]
    with raises(UnsupportedError, code="unsupported_nodes") as found:
        read_onnx(model(nodes, {"x": (2,)}, ["y"]).SerializeToString())
    text = str(found.value)
    assert "first" in text
    assert "com.microsoft::Fused" in text
    assert "third" not in text  # nobody reads it


def test_halves_are_computed_in_f32_and_doubles_refused() -> None:
    draft = read_onnx(relu((2,), element=TensorProto.FLOAT16))
    assert [call.op for call in draft.calls] == ["cast", "unary"]
    with raises(UnsupportedError, param="x"):
        read_onnx(relu((2,), element=TensorProto.DOUBLE))
    with raises(UnsupportedError, param="opset"):
        read_onnx(relu((2,), opset=6))


def test_external_data_stays_in_the_folder(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    (tmp_path / "weights.bin").write_bytes(bytes(8) + weight.tobytes())
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ("N", 2)}, ["y"], {"w": weight})
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    path = tmp_path / "net.onnx"

    def write(location: str, offset: int = 8, length: int = 24) -> None:
        del tensor.external_data[:]
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=value))
        path.write_bytes(made.SerializeToString())

    write("weights.bin")
    call = next(call for call in read_onnx(path).calls if call.op == "linear")
    assert np.array_equal(call.argument(1).value, weight.T)
    for wrong in (("../weights.bin",), (str(tmp_path / "weights.bin"),), ("weights.bin", 100), ("weights.bin", 8, 20)):
        write(*wrong)
        with pytest.raises(InvalidFileError):
            read_onnx(path)


def test_damaged_files_are_refused() -> None:
    data = model(
        [helper.make_node("Gemm", ["x", "w"], ["y"])], {"x": (2, 3)}, ["y"], {"w": np.ones((3, 4), np.float32)}
    )
    whole = data.SerializeToString()
    generator = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(int(generator.integers(1, 4))):
            damaged[int(generator.integers(len(damaged)))] = int(generator.integers(256))
        try:
            read_onnx(bytes(damaged))
        except (InvalidFileError, UnsupportedError):
            continue
    for wrong in (b"", b"\xff" * 40, whole[:-30]):
        with pytest.raises(InvalidFileError):
            read_onnx(wrong)


def test_numbers_that_are_too_large_are_refused() -> None:
    split = helper.make_node("Split", ["x"], ["y"], num_outputs=(1 << 63) - 1)
    with pytest.raises(InvalidFileError):
        read_onnx(model([split], {"x": (4,)}, ["y"]).SerializeToString())
    with raises(UnsupportedError, param="x"):
        read_onnx(relu((2, 1 << 62)))
    nodes = [helper.make_node("Relu", ["k"], ["w"]), helper.make_node("Conv", ["x", "w"], ["y"], group=(1 << 31) - 1)]
    with pytest.raises(InvalidFileError):
        read_onnx(model(nodes, {"x": (1, 4, 5), "k": (4, 1, 2)}, ["y"]).SerializeToString())
    norms = [("RMSNormalization", {"axis": 1}, ["x", "w"]), ("GroupNormalization", {"num_groups": 1}, ["x", "w", "w"])]
    for norm, attrs, names in norms:
        node = helper.make_node(norm, names, ["y"], **attrs)
        with raises(UnsupportedError, code="unsupported_nodes"):
            read_onnx(model([node], {"x": (1, 1 << 30, 2), "w": (1 << 30,)}, ["y"], opset=23).SerializeToString())


def test_names_that_are_no_utf_8_are_refused() -> None:
    whole = model([helper.make_node("Relu", ["x"], ["y"], name="rectify")], {"x": (2,)}, ["y"]).SerializeToString()
    for name in (b"rectify", b"Relu"):
        with raises(InvalidFileError, param="node"):
            read_onnx(whole.replace(name, b"\xeb" + name[1:]))


@pytest.mark.long
def test_mutants_are_read_or_refused() -> None:
    # A process of its own: the limit of memory is one of all that a process has.
    command = [sys.executable, "-W", "ignore", "-m", "tests.graph.onnx_mutants", "--most", "4000"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    read, refused = (int(found) for found in re.findall(r"(\d+) (?:read|refused)", done.stdout))
    assert min(read, refused) > 500


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with raises(UnsupportedError, code="missing_package"):
        read_onnx(b"x")
