"""AWQ: scales equal those of a plain numpy search, change no float logit, and are not worse than rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.calibration.arguments import GRID
from penstock.calibration.awq import ScaleFold, find_scale_folds, scaling_of
from penstock.calibration.collect import CalibrationProgram
from penstock.calibration.smooth import Smoothing
from penstock.calibration.texts import CalibrationData
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import plan_weights
from penstock.core.native import Context
from penstock.graph.export import export_bundle
from penstock.llm.llm import LLM
from penstock.quant.matrix import concatenate_rows, quantize_rows, values_of
from penstock.quant.scheme import find_scheme
from tests.support.invariant_checkpoints import write_checkpoint

LAYER = "model.layers.0."
IDS = [int(i) for i in np.random.default_rng(1).integers(0, 259, 300)]


class Calibrated:
    """A random model with outlier channels, the inputs of its linears, and the scales that were found."""

    def __init__(self, folder: Path) -> None:
        source = write_checkpoint(folder / "model")
        tensors = load_file(source / "model.safetensors")
        tensors[LAYER + "input_layernorm.weight"][[3, 50]] *= 40
        tensors[LAYER + "self_attn.v_proj.weight"][5] *= 30
        tensors[LAYER + "mlp.up_proj.weight"][7] *= 30
        save_file(tensors, source / "model.safetensors")
        self.folder, self.tensors = source, tensors
        self.bundle = folder / "model.psm"
        export_bundle(source, self.bundle, scheme="f32")
        checkpoint = Checkpoint.open(source)
        self.smoothing: dict[str, Smoothing] = {}
        with CalibrationProgram(self.bundle, CalibrationData([IDS], "ids"), 1) as program:
            self.folds = find_scale_folds(program.graph)
            (inputs,) = [
                {index: x.copy() for index, x in step.items()}
                for step in program.inputs(program.linears, lambda _: None)
            ]
            self.inputs = {name: inputs[linear] for linear in program.linears for name in linear.names}
            for scheme in ("w8a16", "w4a16"):
                plan = plan_weights(checkpoint, find_scheme(scheme))
                found = scaling_of(checkpoint, program, plan, GRID, lambda *_: lambda _: None)
                self.smoothing[scheme] = found

    def error(self, name: str, smoothing: Smoothing, scheme: str) -> float:
        """The squared error of a weight's outputs, after scaling and rounding with the packer."""
        weight, exponents = self.tensors[name], smoothing.columns.get(name, np.zeros(1, np.int32))
        with Context(1) as context:
            pieces = list(quantize_rows(context, find_scheme(scheme), np.ldexp(weight, exponents), "f32"))
        values = np.ldexp(values_of(concatenate_rows(pieces), find_scheme(scheme)), -exponents)
        return float(((self.inputs[name].astype(np.float64) @ (values - weight).T) ** 2).sum())


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    return Calibrated(tmp_path_factory.mktemp("awq"))


def fold_of(calibrated: Calibrated, name: str) -> ScaleFold:
    return next(fold for fold in calibrated.folds if LAYER + name in fold.readers)


def test_scales_fold_into_norms_values_and_up_rows(calibrated: Calibrated) -> None:
    names = [f"{name}_proj.weight" for name in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.down")]
    producers = {name: fold_of(calibrated, name).producer.removeprefix(LAYER) for name in names}
    assert producers == {
        "self_attn.q_proj.weight": "input_layernorm.weight",
        "self_attn.o_proj.weight": "self_attn.v_proj.weight",
        "mlp.gate_proj.weight": "post_attention_layernorm.weight",
        "mlp.down_proj.weight": "mlp.up_proj.weight",
    }
    assert fold_of(calibrated, "self_attn.o_proj.weight").heads == (2, 3, 16)


def plain_search(weights: list[np.ndarray], x: np.ndarray, heads: tuple[int, int, int] | None) -> np.ndarray:
    """The exponents by rounding each weight to int8 rows, and computing the outputs of all inputs."""
    x = x.astype(np.float64)
    means = np.abs(x).mean(axis=0)
    if heads is not None:
        means = means.reshape(heads).mean(axis=1).reshape(-1)
    logs, best, least = np.log2(means), np.zeros(0, np.int64), np.inf
    for power in np.arange(20) / 20:
        scale = power * logs
        exponents = np.clip(np.rint(scale - np.median(scale)), -8, 8).astype(int)
        columns = exponents
        if heads is not None:
            columns = np.repeat(exponents.reshape(heads[0], 1, heads[2]), heads[1], 1).ravel()
        error = 0.0
        for weight in weights:
            scaled = weight * 2.0**columns
            step = np.abs(scaled).max(axis=1, keepdims=True) / 127
            rounded = np.rint(scaled / step) * step / 2.0**columns
            error += ((x @ (rounded - weight).T) ** 2).sum()
        if error < least:
            best, least = columns, error
    return best


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"])
def test_scales_are_those_of_a_plain_search(calibrated: Calibrated, name: str) -> None:
    fold = fold_of(calibrated, name)
    weights = [calibrated.tensors[reader] for reader in fold.readers]
    expected = plain_search(weights, calibrated.inputs[LAYER + name], fold.heads)
    found = calibrated.smoothing["w8a16"].columns[LAYER + name]
    assert found.any()
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_errors_are_not_larger_than_those_of_rounding(calibrated: Calibrated, scheme: str) -> None:
    smoothing, plain = calibrated.smoothing[scheme], Smoothing({}, {})
    total = {True: 0.0, False: 0.0}
    for fold in calibrated.folds:
        errors = [sum(calibrated.error(name, one, scheme) for name in fold.readers) for one in (smoothing, plain)]
        assert errors[0] <= errors[1] * (1 + 1e-4)
        total[True], total[False] = total[True] + errors[0], total[False] + errors[1]
    assert total[True] < 0.8 * total[False]


def test_float_logits_stay_the_same(calibrated: Calibrated, tmp_path: Path) -> None:
    smoothing = calibrated.smoothing["w4a16"]
    folded = tmp_path / "folded"
    folded.mkdir()
    (folded / "config.json").write_bytes((calibrated.folder / "config.json").read_bytes())
    save_file(
        {name: smoothing.apply(name, value, "f32") for name, value in calibrated.tensors.items()},
        folded / "model.safetensors",
    )
    export_bundle(folded, tmp_path / "folded.psm", scheme="f32")
    logits = []
    for bundle in (calibrated.bundle, tmp_path / "folded.psm"):
        with LLM(bundle) as llm:
            logits.append(llm.logits(IDS[:24]))
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-4)
