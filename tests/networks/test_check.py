"""``CapturedNetwork.check`` and ``penstock export --check``: a network is compared with its source, node by node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn.utils import rnn

import penstock
from penstock.cli.main import main
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.general.passes import optimise
from penstock.graph.general.torch.writer import OPS
from penstock.graph.onnx.registry import READERS


class Tagger(nn.Module):
    """Ids to an LSTM with a free length, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(9, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(ids))[0]) * weights[..., None]  # type: ignore[no-any-return]


def tagger(**options: Any) -> penstock.CapturedNetwork:
    torch.manual_seed(0)
    example = torch.randint(0, 9, (2, 5)), torch.ones(2, 5)
    return penstock.capture(Tagger(), example, shapes={"ids": ("B", "S"), "weights": ("B", "S")}, **options)


def off_by_a_little(old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda writer, *args: writer.binary("add", old(writer, *args), 0.01)


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    nodes = [
        helper.make_node("Relu", ["image"], ["y"], name="first"),
        helper.make_node("Tanh", ["y"], ["z"], name="second"),
        helper.make_node("Cast", ["scale"], ["s"], to=1),
        helper.make_node("Mul", ["z", "s"], ["out"]),
    ]
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3])]
    inputs.append(helper.make_tensor_value_info("scale", TensorProto.INT64, []))
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", 3])
    path = tmp_path / "net.onnx"
    graph = helper.make_graph(nodes, "net", inputs, [out])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def test_a_network_agrees_with_its_module() -> None:
    network = tagger(check=True)
    result = network.check()
    assert result.passed
    assert [output.place for output in result.outputs] == ["output output"]
    assert result.outputs[0].relative <= result.tolerance == 1e-4
    given = {"weights": np.full((1, 3), 2, np.float32), "ids": np.array([[1, 8, 2]])}
    assert network.check(given).passed
    assert not network.check(given, tolerance=0).passed
    with pytest.raises(InvalidArgumentError) as error:
        network.check([given["ids"]])
    assert error.value.param == "inputs"
    with pytest.raises(InvalidArgumentError) as error:
        network.check(tolerance=-1)
    assert error.value.param == "tolerance"
    with pytest.raises(UnsupportedError) as refusal:
        network.check({**given, "ids": np.array([[1, 9, 2]])})  # no row of the embedding
    assert refusal.value.param == "inputs"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_agree_with_the_module(kind: type[nn.RNNBase]) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(4, 6, num_layers=2, bidirectional=True)

        def forward(self, x: torch.Tensor) -> Any:
            whole, _ = self.layer(x)
            rows = rnn.pack_padded_sequence(x, torch.tensor([2, 5, 1]), enforce_sorted=False)
            return whole, rnn.pad_packed_sequence(self.layer(rows)[0], total_length=5)[0]

    penstock.capture(Packed().eval(), torch.randn(5, 3, 4), check=True)


def test_the_first_node_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "aten.linear.default", off_by_a_little(OPS["aten.linear.default"]))
    result = tagger().check()
    assert not result.passed
    assert not result.is_rewritten
    assert result.first is not None
    assert result.first.place.startswith("head.")
    assert result.first.count == result.first.size
    assert result.first.absolute == pytest.approx(0.01, rel=1e-2)
    with pytest.raises(UnsupportedError) as error:
        tagger(check=True)
    assert error.value.code == "network_differs"
    assert "head." in str(error.value)


def test_a_pass_that_changes_results_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(draft: Any, **options: Any) -> None:
        optimise(draft, **options)
        for call in draft.calls:
            if call.op == "unary":
                call.attrs["kind"] = "sigmoid"

    monkeypatch.setattr("penstock.networks.check.optimise", broken)
    result = penstock.capture(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(2, 3)).check()
    assert result.is_rewritten
    assert result.first is not None
    assert result.first.place.startswith("1.")


def test_half_precision_has_a_wider_tolerance() -> None:
    result = penstock.capture(nn.Linear(64, 8).to(torch.bfloat16), torch.randn(2, 64).to(torch.bfloat16)).check()
    assert result.passed
    assert result.tolerance > 1e-2


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_file_is_compared_before_it_is_written(
    is_installed: bool, onnx_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not is_installed:
        monkeypatch.setattr("penstock.graph.onnx.load.OnnxSource._in_onnx_runtime", lambda *_: None)
    bundle = onnx_file.with_suffix(".psm")
    command = ["export", str(onnx_file), str(bundle), "--check", "--size", "scale=2"]
    assert main(command) == 0
    assert bundle.exists()
    bundle.unlink()
    tanh = READERS["Tanh"]
    monkeypatch.setitem(READERS, "Tanh", lambda site: site.binary("add", tanh(site), 0.01))
    capsys.readouterr()
    assert main(command) == 1
    assert "second" in capsys.readouterr().err
    assert not bundle.exists()


def test_check_is_for_files_of_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out.psm"), "--check"]) == 2
    assert "--check" in capsys.readouterr().err
