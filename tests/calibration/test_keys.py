"""Smoothing of keys: scores keep their bits, int8 keys lose less, and other families are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.plant_outliers import plant_outliers
from penstock.calibration.keys import check_family
from penstock.calibration.quantize import DataOptions, quantize_with_data
from penstock.checkpoint.folder import Checkpoint
from penstock.cli.main import main
from penstock.errors import UnsupportedError
from penstock.llm.llm import LLM
from penstock.runtime.program import ProgramLimits
from tests.support.checkpoint_folders import write_folder
from tests.support.command import FOLDER
from tests.support.errors import raises

IDS = list(range(5, 133))


def logits(path: Path, kv_cache: str) -> np.ndarray:
    with LLM(path, use_cache=False, limits=ProgramLimits(kv_layout=kv_cache)) as llm:
        return np.asarray(llm.logits(IDS))


def test_smoothed_keys_cure_planted_pairs(tmp_path: Path) -> None:
    plant_outliers(FOLDER, tmp_path / "planted", ("keys",), 64.0, share=0.05)
    folders = {}
    for smooths in (False, True):
        folders[smooths] = tmp_path / f"out-{smooths}"
        options = DataOptions("imatrix", FOLDER / "train.py", 512, smooth_keys=smooths)
        quantize_with_data(tmp_path / "planted", folders[smooths], "w8a8", options)
    exact = {smooths: logits(folder, "f32") for smooths, folder in folders.items()}
    assert exact[True].tobytes() == exact[False].tobytes()
    losses = {smooths: float(np.square(logits(folders[smooths], "int8") - exact[smooths]).mean()) for smooths in exact}
    assert losses[True] < 0.3 * losses[False]
    config = Checkpoint.open(folders[True]).config.values
    assert config["quantization_config"]["recipe"]["smooth_keys"] is True


def test_another_family_is_refused(tmp_path: Path) -> None:
    for values in ({"model_type": "qwen3"}, {"model_type": "llama", "partial_rotary_factor": 0.5}):
        folder = write_folder(tmp_path / values["model_type"], **values)
        with raises(UnsupportedError, param="smooth_keys"):
            check_family(Checkpoint.open(folder))


def test_a_method_without_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(FOLDER), str(tmp_path / "out"), "--scheme", "w8a8", "--smooth-keys"]
    assert main(arguments) != 0
    assert "--smooth-keys" in capsys.readouterr().err
