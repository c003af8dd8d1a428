"""int8 networks: which nodes become int8, what they compute, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import penstock
from penstock import lite
from penstock.cli.models import inspect, quantize
from penstock.cli.parser import CommandParser
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.ir import DType, Graph
from penstock.networks.int8.judge import output_errors
from penstock.networks.int8.quantize import Int8Options, Int8Report, check_arguments, quantize_network
from penstock.networks.int8.ranges import METHODS, Range
from penstock.networks.int8.stored import StoredNetwork
from penstock.networks.predictor import open_predictor
from tests.support.errors import raises
from tests.support.general_graphs import NetworkBuilder
from tests.support.int8_reference import reference_outputs


class Block(nn.Module):
    """Inverted residuals, as MobileNetV2 has them: expand, depthwise, project, add."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1), nn.ReLU6(), nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.ReLU6(),
            nn.Conv2d(wide, channels, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(x)
        return y


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 24, 3, padding=1)
        self.blocks, self.last = nn.Sequential(Block(24), Block(24)), nn.Conv2d(48, 32, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.wide(torch.relu(self.stem(x))))
        x = torch.relu(self.last(torch.cat([torch.max_pool2d(self.blocks(x), 2), torch.max_pool2d(x, 2)], 1)))
        y: Tensor = self.head(x.mean((2, 3)))
        return y


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network net.psm and six samples of its input."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("int8")
    module = Classifier().eval()
    penstock.capture(module, torch.randn(2, 3, 32, 32), shapes={"x": ("B", 3, 32, 32)}).save(path / "net.psm")
    (path / "samples").mkdir()
    for number in range(6):
        np.savez(path / "samples" / f"{number}.npz", x=torch.randn(2, 3, 32, 32).numpy())
    return path


def made(folder: Path, **options: Any) -> tuple[Int8Report, Graph]:
    out = folder / "int8.psm"
    report = quantize_network(folder / "net.psm", out, folder / "samples", Int8Options(threads=1, **options))
    return report, read_graph(out)[0]


@pytest.mark.parametrize("ranges", METHODS)
def test_a_network_becomes_int8(folder: Path, ranges: str) -> None:
    report, graph = made(folder, ranges=ranges)
    assert (report.num_int8, report.num_candidates, report.kept) == (9, 9, ())
    assert (report.num_samples, report.num_judged) == (5, 1)
    (error,) = report.errors
    assert error.relative < 0.1
    assert error.agreement >= 0.5
    assert report.num_bytes < report.source_bytes
    ops = [node.op for node in graph.nodes]
    assert ops.count("conv_int8") == 8
    assert ops.count("conv") == 1  # three channels
    assert ops.count("requantize") == report.num_conversions == 1  # behind the first; pools and concat stay int8
    assert [node.attrs["scheme"] for node in graph.nodes if node.op == "linear"] == ["w8a8"]
    assert json.loads(graph.properties["quantization"])["ranges"] == ranges


def test_nodes_that_are_kept_stay_float(folder: Path) -> None:
    report, graph = made(folder, keep=("blocks.0.*", "head.*"))
    assert report.num_int8 == 5
    assert len(report.kept) == 4
    assert sum(node.op == "conv" for node in graph.nodes) == 4
    assert all(node.attrs["scheme"] == "f32" for node in graph.nodes if node.op == "linear")
    with raises(InvalidArgumentError, param="keep"):
        made(folder, keep=("block.0.*",))


def test_the_worst_nodes_stay_float_until_the_error_holds(folder: Path) -> None:
    free, _ = made(folder)
    least = free.errors[0].relative
    report, _ = made(folder, max_error=least / 2)
    assert 0 < report.num_int8 < free.num_int8
    assert report.errors[0].relative < 0.75 * least  # of other samples
    everything, graph = made(folder, max_error=1e-9)
    assert everything.num_int8 == 0
    assert everything.errors[0].relative == 0
    assert "conv_int8" not in {node.op for node in graph.nodes}


def test_the_core_computes_what_the_graph_says(folder: Path) -> None:
    made(folder, keep=("head.*",))
    network = StoredNetwork.open(folder / "int8.psm")
    x = np.random.default_rng(1).standard_normal((3, 3, 32, 32)).astype(np.float32)
    (expected,) = reference_outputs(network, {"x": x})
    with open_predictor(folder / "int8.psm", threads=1) as predictor:
        (found,) = predictor.run([x])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())  # ties of a rounding
    model = lite.Model()
    model.build_from_file(folder / "int8.psm", lite.ModelType.PENSTOCK)
    (tensor,) = model.get_inputs()
    tensor.set_data_from_numpy(x)
    assert model.predict([tensor])[0].get_data_to_numpy().tobytes() == found.tobytes()


def test_a_result_has_the_same_bits_in_any_batch(folder: Path) -> None:
    made(folder)
    x = np.random.default_rng(0).standard_normal((5, 3, 32, 32)).astype(np.float32)
    found = []
    for threads in (1, 3):
        with open_predictor(folder / "int8.psm", threads=threads) as predictor:
            found += [predictor.run([x])[0], np.concatenate([predictor.run([x[i : i + 1]])[0] for i in range(5)])]
    assert {array.tobytes() for array in found} == {found[0].tobytes()}


def test_ranges_clip_outliers() -> None:
    numbers = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    numbers[0] = 50
    own = Range()
    own.see(numbers)
    own.count(numbers)
    assert own.is_signed
    assert own.scale("minmax") == pytest.approx(50 / 127)
    expected = np.quantile(np.abs(numbers), 0.9999) / 127
    assert own.scale("percentile") == pytest.approx(expected, rel=0.02)
    assert 2 / 127 < own.scale("kl") < 6 / 127
    other = Range()
    other.see(np.abs(numbers) * 2)
    other.count(np.abs(numbers) * 2)
    other.merge(own)
    assert other.is_signed
    assert other.scale("minmax") == pytest.approx(100 / 127)
    assert other.counts.sum() == 200_000


def test_weights_may_have_the_names_of_int8_ones(folder: Path, tmp_path: Path) -> None:
    network = StoredNetwork.open(folder / "net.psm")
    first, second = [node.inputs[1] for node in network.graph.nodes if node.op in ("conv", "linear")][-2:]
    old, new = second.name, f"{first.name}.int8"
    network.graph.weights[new] = dataclasses.replace(network.graph.weights.pop(old), name=new)
    network.weights[new] = network.weights.pop(old)
    for node in network.graph.nodes:
        node.inputs = [dataclasses.replace(o, name=new) if o == second else o for o in node.inputs]
    network.write(tmp_path / "net.psm")
    for name in ("net.psm", "same.psm"):
        source = tmp_path / "net.psm" if name == "net.psm" else folder / "net.psm"
        quantize_network(source, tmp_path / f"int8-{name}", folder / "samples", Int8Options(threads=1))
    x = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    outputs = []
    for name in ("net.psm", "same.psm"):
        with open_predictor(tmp_path / f"int8-{name}", threads=1) as predictor:
            outputs.append(predictor.run([x])[0].tobytes())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("source", ["x", "cast", "joined", "moved"])
def test_int8_that_no_node_rounded_is_refused(source: str, tmp_path: Path) -> None:
    """Other integers than -127 to 127, or 0 to 127 of u8, would give numbers that depend on the processor."""
    b = NetworkBuilder()
    x, floats = b.input("x", "2,8", DType.I8), b.input("floats", "2,8")
    own = b.node("requantize", [floats], "own", out_dtype=DType.I8, x_scale=0.0, y_scale=0.2, dtype="i8")
    b.node("cast", [floats], "cast", out_dtype=DType.I8, dtype="i8")
    b.node("concat", [own, x, *[None] * 6], "joined", out_dtype=DType.I8, axis=0)
    b.node("permute", [own], "moved", out_dtype=DType.I8, order="1,0")
    y = b.node("requantize", [source], "y", x_scale=0.1, y_scale=0.0, dtype="f32")
    b.output(y, {"joined": "4,8", "moved": "8,2"}.get(source, "2,8"))
    path = b.write(tmp_path / "net.psm", patch=lambda graph: None)
    if source == "moved":
        with open_predictor(path, threads=1) as predictor:
            assert predictor.run([np.ones((2, 8), np.int8), np.ones((2, 8), np.float32)])[0].shape == (8, 2)
        return
    with raises(InvalidFileError, match=rf"requantize y\): inputs\[0\].*\({source}\)"):
        open_predictor(path, threads=1)


def test_the_default_range_has_the_least_error() -> None:
    """Compared with rounding by each method; few values are not clipped.  ReLU gives 84 to 99.7 % zeros."""
    rng = np.random.default_rng(0)
    for numbers in (
        rng.standard_normal(300), rng.standard_normal(200_000), rng.standard_t(2, 50_000), rng.uniform(0, 1, 30_000),
        np.r_[rng.standard_normal(100_000), 80.0], np.full(40, 3.0), np.zeros(9),
        *(np.maximum(rng.standard_normal(100_000) - bias, 0) for bias in (1, 2, 2.7)),
    ):  # fmt: skip
        x = numbers.astype(np.float32)
        own = Range()
        own.see(x)
        own.count(x)
        errors = {}
        for method in METHODS:
            scale = own.scale(method)
            errors[method] = float(np.square(x - scale * np.clip(np.rint(x / scale), -127, 127)).sum())
        least = min(errors.values()) if x.size > 10_000 else errors["minmax"]
        excess = 1.01 if x.all() else 1.1  # the fewer numbers are not 0, the coarser is the estimate
        assert errors["mse"] <= excess * least, errors


def test_errors_are_of_rows() -> None:
    x = np.array([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]], np.float32)
    y = np.array([[1.0, 2.0, 4.0], [3.0, 0.0, 5.0]], np.float32)
    (error,) = output_errors([{"y": x, "n": np.arange(3)}], [{"y": y, "n": np.arange(3)}])
    assert error.agreement == 0.5
    assert error.relative == pytest.approx(5 / np.sqrt(30))
    assert error.largest == pytest.approx(5 / 4)
    p, q = (torch.from_numpy(a).double().log_softmax(-1) for a in (x, y))
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert error.divergence == pytest.approx(float(expected))


def quantized(folder: Path, *options: str, source: str = "net.psm") -> int:
    parser = CommandParser()
    quantize.add_parser(parser.add_subparsers())
    out = str(folder / "out.psm")
    args = parser.parse_args(["quantize", str(folder / source), out, "--threads", "1", *options])
    return quantize.run(args)


def test_the_command_prints_error_and_speed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = str(folder / "samples")
    assert quantized(folder, "--scheme", "w8a8", "--calibration", samples, "--keep", "head.*") == 0
    text = capsys.readouterr().out
    assert "8 of 9 convolutions and linears in int8, 1 conversions" in text
    assert "times as fast" in text
    parser = CommandParser()
    inspect.add_parser(parser.add_subparsers())
    inspect.run(parser.parse_args(["inspect", str(folder / "out.psm")]))
    assert "8 convolutions and 0 linears, 1 conversions; 2 stay float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (("--scheme", "w8a8"), "calibration"),
        (("--scheme", "w8a8", "--calibration", "{}/net.psm"), "calibration"),
        (("--scheme", "w8a8", "--calibration", "{}"), "calibration"),
        (("--scheme", "w4a8", "--calibration", "{}/samples"), "scheme"),
        (("--scheme", "w8a8", "--calibration", "{}/samples", "--method", "gptq"), "method"),
        (("--scheme", "w8a8", "--calibration", "{}/samples", "--max-error", "0"), "max_error"),
        (("--scheme", "w8a8", "--calibration", "{}/samples", "--units", "fused"), "units"),
    ],
)
def test_the_command_refuses_by_name(folder: Path, options: tuple[str, ...], param: str) -> None:
    with raises(PenstockError, param=param):
        quantized(folder, *(option.format(folder) for option in options))


def onnx_file(folder: Path) -> Path:
    """Write a network of two convolutions and a linear whose batch is free."""
    rng = np.random.default_rng(5)
    shapes = {"first": (16, 8, 3, 3), "second": (8, 16, 1, 1), "head": (8, 5)}
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name) for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["c"]), helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]), helper.make_node("MatMul", ["e", "head"], ["y"]),
    ]  # fmt: skip
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", ["B", 8, 12, 12]), ("y", ["B", 5]))
    ]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], weights)
    path = folder / "from_onnx.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def test_an_onnx_file_becomes_int8_as_its_bundle_does(tmp_path: Path) -> None:
    path = onnx_file(tmp_path)
    (tmp_path / "samples").mkdir()
    for number in range(4):
        sample = np.random.default_rng(number).standard_normal((2, 8, 12, 12)).astype(np.float32)
        np.save(tmp_path / "samples" / f"{number}.npy", sample)
    options = ("--scheme", "w8a8", "--calibration", str(tmp_path / "samples"))
    assert quantized(tmp_path, *options, "--size", "B=1:16", source="from_onnx.onnx") == 0
    directly = (tmp_path / "out.psm").read_bytes()
    penstock.read_network(path, sizes={"B": (1, 16)}).save(tmp_path / "net.psm")
    assert quantized(tmp_path, *options) == 0
    assert (tmp_path / "out.psm").read_bytes() == directly
    ops = [node.op for node in read_graph(tmp_path / "out.psm")[0].nodes]
    assert (ops.count("conv_int8"), ops.count("conv")) == (2, 0)
    with raises(InvalidArgumentError, param="size"):
        quantized(tmp_path, *options, "--size", "B=1:16")  # of a bundle


def test_arguments_are_checked_before_scripts_run(tmp_path: Path) -> None:
    path, script = onnx_file(tmp_path), tmp_path / "ops.py"
    script.write_text("raise SystemExit('the script ran')")
    (tmp_path / "samples").mkdir()
    for options in ((), ("--calibration", str(tmp_path / "samples"))):
        with raises(InvalidArgumentError, param="calibration", code="no_samples"):
            quantized(tmp_path, "--scheme", "w8a8", "--custom-ops", str(script), *options, source=path.name)
    np.save(tmp_path / "samples" / "0.npy", np.zeros(1, np.float32))
    with raises(InvalidArgumentError, param="out"):
        check_arguments(tmp_path / "net", tmp_path / "samples", Int8Options())


def test_messages_name_the_source(folder: Path, tmp_path: Path) -> None:
    pool = penstock.capture(nn.MaxPool2d(2), torch.randn(1, 3, 8, 8))
    for label, name in ((None, pool.name), ("pool.onnx", "pool.onnx")):
        with raises(UnsupportedError, param="model", match=rf"^{name}:"):
            quantize_network(pool, tmp_path / "out.psm", folder / "samples", label=label)


def test_samples_must_fit_the_inputs(folder: Path, tmp_path: Path) -> None:
    wrong: Any = {"y": np.zeros((1, 3, 32, 32), np.float32)}, {"x": np.zeros((1, 3, 32, 32))}, {"x": np.zeros(3, "f4")}
    for arrays in wrong:
        np.savez(tmp_path / "0.npz", **arrays)
        with raises(InvalidArgumentError, param="calibration"):
            quantize_network(folder / "net.psm", tmp_path / "out.psm", tmp_path)
    np.savez(tmp_path / "0.npz", x=np.full((1, 3, 32, 32), np.nan, np.float32))
    with raises(InvalidArgumentError, param="calibration"):
        quantize_network(folder / "net.psm", tmp_path / "out.psm", tmp_path)


def test_other_networks_are_refused(folder: Path, tmp_path: Path) -> None:
    made(folder)
    with raises(UnsupportedError, param="model"):
        quantize_network(folder / "int8.psm", tmp_path / "out.psm", folder / "samples")
    pool = penstock.capture(nn.MaxPool2d(2), torch.randn(1, 3, 8, 8))
    pool.save(tmp_path / "pool.psm")
    np.save(tmp_path / "0.npy", np.zeros((1, 3, 8, 8), np.float32))
    with raises(UnsupportedError, param="model"):
        quantize_network(tmp_path / "pool.psm", tmp_path / "out.psm", tmp_path)
    assert not (tmp_path / "out.psm").exists()
