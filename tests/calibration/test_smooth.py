"""Smoothing: where it can be folded, and that it changes no logit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.calibration.collect import CalibrationProgram
from penstock.calibration.smooth import Fold, Smoothing, find_folds, smoothing_of
from penstock.calibration.texts import CalibrationData
from penstock.checkpoint.folder import Checkpoint
from penstock.graph.export import export_bundle
from penstock.llm.llm import LLM
from penstock.quant.input_statistics import InputStatistics, WeightInputs
from tests.support.families import prompt, save

FAMILY = "llama_tied_one_kv_head"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILY, tmp_path_factory.mktemp("smooth") / "model")


def logits_of(folder: Path, out: Path) -> np.ndarray:
    export_bundle(folder, out, scheme="f32")
    with LLM(out) as llm:
        return llm.logits(prompt(24))


def test_folding_keeps_every_bit_of_the_logits(folder: Path, tmp_path: Path) -> None:
    expected = logits_of(folder, tmp_path / "first.psm")
    checkpoint, data = Checkpoint.open(folder), CalibrationData([prompt(24)] * 2, "prompts")
    with CalibrationProgram(tmp_path / "first.psm", data, 1) as program:
        statistics, folds = program.statistics(lambda _: None), find_folds(program.graph)
    readers = {name.removeprefix("model.layers.0.") for fold in folds for name in fold.readers if ".layers.0." in name}
    assert {"self_attn.q_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight"} <= readers
    assert "self_attn.o_proj.weight" not in readers
    smoothing = smoothing_of(checkpoint, folds, statistics)
    assert any(exponents.any() for exponents in smoothing.rows.values())
    shutil.copytree(folder, tmp_path / "folded")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: smoothing.apply(name, value, "f32") for name, value in tensors.items()},
        tmp_path / "folded" / "model.safetensors",
    )
    assert logits_of(tmp_path / "folded", tmp_path / "second.psm").tobytes() == expected.tobytes()


def test_small_float16_values_keep_their_bits(tmp_path: Path) -> None:
    """A norm whose weight would become subnormal stays as it is; weights that are rounded are folded in float32."""
    tensors = {
        "norm.weight": np.array([6.2e-5, 1, 2, 3], np.float16),
        "q.weight": np.array([[1e-4, 2, 1, 2], [3e-5, 1, 1, 1]], np.float16),
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint, squares = Checkpoint.open(tmp_path), np.ones(4)
    maxima = np.array([6e4, 1, 4e-3, 1], np.float32)
    statistics = InputStatistics({"q.weight": WeightInputs(squares, 4, maxima)})
    folds, plan = [Fold(("q.weight",), "norm.weight")], {"q.weight"}
    smoothing = smoothing_of(checkpoint, folds, statistics, 0.5, plan)
    exponents = smoothing.rows["norm.weight"]
    assert exponents[0] == 0
    assert exponents[2] < 0
    folded = smoothing.apply("norm.weight", checkpoint.read("norm.weight"), "f16").view(np.float16)
    np.testing.assert_array_equal(np.ldexp(folded.astype(np.float32), exponents), tensors["norm.weight"])
    values = smoothing.values("q.weight", checkpoint.read("q.weight"), "f16")
    np.testing.assert_array_equal(np.ldexp(values, -exponents), tensors["q.weight"])


def test_statistics_follow_the_factors() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((50, 6)).astype(np.float32)
    exponents = np.array([0, 1, -2, 3, 0, 5], np.int32)
    smoothing = Smoothing({"w": exponents}, {"norm": exponents})
    folded = np.ldexp(x, -exponents)
    inputs = smoothing.inputs_of("w", WeightInputs((x.astype(np.float64) ** 2).sum(axis=0), 50, np.abs(x).max(axis=0)))
    np.testing.assert_allclose(inputs.squares, (folded.astype(np.float64) ** 2).sum(axis=0), rtol=1e-6)
    assert inputs.maxima is not None
    assert inputs.maxima.tobytes() == np.abs(folded).max(axis=0).tobytes()
    np.testing.assert_allclose(smoothing.hessian_of("w", x.T @ x), folded.T @ folded, rtol=1e-4, atol=1e-4)
    ones = np.full(6, 0x3F80, np.uint16)  # bf16
    assert (smoothing.apply("norm", ones, "bf16") == 0x3F80 - exponents * 0x80).all()
    assert smoothing.apply("other", ones, "bf16") is ones
    other = WeightInputs(np.ones(6), 1)
    assert smoothing.inputs_of("other", other) is other
