"""Sums of products take half of the matrix, and passes over the texts may be one or several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.calibration import collect
from penstock.calibration.collect import CalibrationProgram, linear_groups, product_sums
from penstock.calibration.quantize import DataOptions, quantize_with_data
from penstock.calibration.texts import CalibrationData
from penstock.graph.export import export_bundle
from penstock.quant.product_sums import ProductSums
from tests.support.families import prompt, save

DATA = CalibrationData([prompt(180), prompt(120)], "test")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("products") / "model")


@pytest.mark.parametrize("cols", [48, 512, 1100])
def test_the_matrix_is_the_sum_of_products(cols: int) -> None:
    x = np.random.default_rng(0).standard_normal((40, cols)).astype(np.float32)
    sums = ProductSums(cols)
    sums.add(x[:7])
    sums.add(x[7:])
    expected = x.astype(np.float64).T @ x
    np.testing.assert_allclose(sums.matrix(), expected, atol=1e-4)
    np.testing.assert_array_equal(sums.diagonal(), np.diagonal(sums.matrix()))
    assert ProductSums.num_bytes(cols) <= 4 * cols * (cols + 512) // 2 if cols > 512 else 4 * cols * cols


def test_the_pass_of_the_statistics_adds_up_products(llama: Path, tmp_path: Path) -> None:
    export_bundle(llama, tmp_path / "f32.psm", scheme="f32")
    with CalibrationProgram(tmp_path / "f32.psm", DATA) as program:
        linears = [linear for linear in program.linears if "layers" in linear.names[0]]
        apart, sums = program.hessians(linears, lambda _: None), product_sums(linears)
        program.rest()
        program.statistics(lambda _: None, sums)
        assert all(sums[linear].diagonal().any() for linear in linears)
        for linear in linears:
            np.testing.assert_array_equal(sums[linear].matrix(), apart[linear].matrix())


def test_integers_do_not_depend_on_the_passes(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = DataOptions("gptq", data=DATA)
    quantize_with_data(llama, tmp_path / "one", "w4a8", options)
    monkeypatch.setattr(collect, "_HESSIAN_BYTES", 1)
    seen: list[int] = []
    hessians = CalibrationProgram.hessians

    def counted(self: CalibrationProgram, linears: list[collect.LinearNode], on_step: collect.StepCallback) -> object:
        seen.append(len(linears))
        return hessians(self, linears, on_step)

    monkeypatch.setattr(CalibrationProgram, "hessians", counted)
    quantize_with_data(llama, tmp_path / "many", "w4a8", options)
    assert len(seen) > 3
    one, many = (tmp_path / name / "model.safetensors" for name in ("one", "many"))
    assert one.read_bytes() == many.read_bytes()


def test_inputs_of_a_step_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = [collect.LinearNode((at,), (f"x{at}",), (f"w{at}",), 64) for at in range(4)]
    monkeypatch.setattr(collect, "_HESSIAN_BYTES", 2 * 64 * 64 * 4)
    assert len(linear_groups(linears, 0)) == 2
    assert len(linear_groups(linears, 1)) == 4
