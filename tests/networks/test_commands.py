"""``penstock export NET.onnx``, ``inspect`` and ``predict``: an ONNX file becomes a bundle that runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from penstock.cli.main import main


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    nodes = [helper.make_node("Relu", ["image"], ["y"]), helper.make_node("ReduceMean", ["y"], ["mean"], axes=[2, 3])]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, "H", "W"])
    mean = helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch", 3, 1, 1])
    graph = helper.make_graph(nodes, "net", [image], [mean])
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


def test_an_onnx_file_becomes_a_bundle_that_runs(
    onnx_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(onnx_file.with_suffix(".psm"))
    assert main(["export", str(onnx_file), bundle, "--size", "batch=1:64", "--size", "H=32:1024:32"]) == 0
    assert "input image: f32" in capsys.readouterr().out
    assert main(["inspect", bundle]) == 0
    assert "image" in capsys.readouterr().out
    image = np.random.default_rng(0).standard_normal((2, 3, 64, 7)).astype(np.float32)
    np.save(tmp_path / "image.npy", image)
    result = tmp_path / "result.npz"
    assert main(["predict", bundle, "--input", f"image={tmp_path / 'image.npy'}", "--output", str(result)]) == 0
    expected = np.maximum(image, 0).mean((2, 3), keepdims=True)
    np.testing.assert_allclose(np.load(result)["mean"], expected, rtol=1e-5, atol=1e-6)
    capsys.readouterr()
    assert main(["predict", bundle, "--size", "batch=8", "--runs", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"]["mean"]["shape"] == [8, 3, 1, 1]
    image_file = ["--input", f"image={tmp_path / 'image.npy'}"]
    for options, code in (
        (["--size", "H=64"], 0),
        (["--size", "H=33"], 2),
        (["--size", "H=2048"], 2),
        (["--size", "H=64", "--size", "H_32=2"], 2),
        (["--size", "H=64", *image_file], 0),
        (["--size", "H=96", *image_file], 2),
    ):
        assert main(["predict", bundle, *options]) == code


def test_wrong_sizes_and_files_are_named(onnx_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(onnx_file.with_suffix(".psm"))
    assert main(["export", str(onnx_file), bundle, "--size", "batch"]) in (1, 2)
    assert main(["export", str(onnx_file), bundle, "--size", "batch=0"]) == 2
    assert "batch" in capsys.readouterr().err
    assert main(["export", str(onnx_file), bundle, "--scheme", "w8a8"]) in (1, 2)
    assert "--scheme" in capsys.readouterr().err
    assert main(["export", str(onnx_file), bundle]) == 0
    assert main(["predict", bundle, "--input", "wrong=x.npy"]) in (1, 2)
    assert main(["predict", bundle, "--input", str(tmp_path / "missing.npy")]) in (1, 2)
    np.save(tmp_path / "flat.npy", np.zeros(3, np.float32))
    assert main(["predict", bundle, "--input", str(tmp_path / "flat.npy")]) in (1, 2)
    assert "image" in capsys.readouterr().err
