"""Planted outliers: the model computes the same, its inputs do not look the same, and wrong requests are refused."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.plant_outliers import KINDS, plant_outliers
from penstock.checkpoint.float_types import to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.llm import LLM
from tests.support.checkpoint_folders import write_folder
from tests.support.command import FOLDER
from tests.support.errors import raises

FACTOR = 32.0


def test_planted_models_compute_the_same(tmp_path) -> None:
    planted = plant_outliers(FOLDER, tmp_path / "out", KINDS, FACTOR)
    ids, logits = list(range(5, 45)), []
    for folder in (FOLDER, tmp_path / "out"):
        with LLM(folder, scheme="f32", use_cache=folder == FOLDER) as llm:
            logits.append(llm.logits(ids))
    assert np.abs(logits[0] - logits[1]).max() < 1e-4
    before, after = Checkpoint.open(FOLDER), Checkpoint.open(tmp_path / "out")
    for name, picked in planted.items():
        tensor = name if name.endswith(".weight") else f"{name}.weight"
        own, other = (to_float32(one.read(tensor), one.tensors[tensor].dtype) for one in (before, after))
        changed = np.flatnonzero((own != other).reshape(len(own), -1).any(axis=1))
        if "k_proj" in name or "norm" in name:
            assert len(changed) >= len(picked)
        assert np.abs(other).max() > 4 * np.abs(own).max() or "norm" not in name
    assert {name.rsplit(".", 1)[-1] for name in planted} == {"weight", "up_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"kinds": ("heads",)}, "kinds"),
        ({"kinds": ()}, "kinds"),
        ({"factor": 3.0}, "factor"),
        ({"share": 0.0}, "share"),
    ],
)
def test_a_wrong_request_is_refused(tmp_path, options, param) -> None:
    with raises(InvalidArgumentError, param=param):
        plant_outliers(FOLDER, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_another_family_is_refused(tmp_path) -> None:
    folder = write_folder(tmp_path / "model", model_type="gemma2")
    with raises(UnsupportedError, param="model"):
        plant_outliers(folder, tmp_path / "out")
