"""Folded rotations: float logits of transformers' models stay, and other families are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plant_outliers import plant_outliers
from penstock.calibration import rotate
from penstock.calibration.quantize import DataOptions, quantize_with_data
from penstock.calibration.rotate import random_hadamard, rotate_checkpoint, rotated_folder
from penstock.calibration.unfinished import UnfinishedWeights
from penstock.checkpoint.folder import Checkpoint
from penstock.cli.main import main, make_parser
from penstock.core.native import QuantizedRows
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.llm import LLM
from penstock.quant.folder import ROTATION_KEY
from tests.support.checkpoint_folders import write_folder
from tests.support.command import FOLDER
from tests.support.errors import raises
from tests.support.families import build, prompt

IDS = list(range(3, 35))
NAMES = ("llama_biases", "llama_head_dim", "qwen2_tied_one_kv_head", "qwen3")


def logits(path: Path, scheme: str = "f32") -> np.ndarray:
    with LLM(path, scheme=scheme, use_cache=False) as llm:
        return np.asarray(llm.logits(IDS))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of transformers, whose norms and biases are random."""
    folders = {}
    for name in NAMES:
        folders[name] = tmp_path_factory.mktemp(name) / "model"
        build(name).save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize("rotation", ["r1", "r2"])
@pytest.mark.parametrize("name", NAMES)
def test_float_logits_stay(tmp_path: Path, models: dict[str, Path], name: str, rotation: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    rotate_checkpoint(models[name], tmp_path / "out", rotation)
    before, after = Checkpoint.open(models[name]), Checkpoint.open(tmp_path / "out")
    v_proj = "model.layers.0.self_attn.v_proj.weight"
    assert before.read(v_proj).tobytes() != after.read(v_proj).tobytes()
    found = logits(tmp_path / "out")
    assert np.abs(found - logits(models[name])).max() < 1e-4
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs = network(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(found - theirs).max() < 1e-4


def test_a_width_without_power_of_two_is_rotated_by_blocks() -> None:
    rotate = random_hadamard(96, 0)
    matrix = rotate(np.eye(96))
    assert matrix @ matrix.T == pytest.approx(np.eye(96), abs=1e-12)
    assert np.count_nonzero(matrix) == 96 * 32


def test_outliers_of_channels_are_spread(tmp_path: Path) -> None:
    plant_outliers(FOLDER, tmp_path / "planted", ("channels", "values"), 32.0)
    out = tmp_path / "out"
    assert main(["quantize", str(tmp_path / "planted"), str(out), "--scheme", "w8a8", "--rotate", "r1r2"]) == 0
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    expected = logits(tmp_path / "planted")
    losses = [np.square(logits(path, "w8a8") - expected).mean() for path in (tmp_path / "planted", out)]
    assert losses[1] < 0.2 * losses[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "planted"]


def test_a_killed_run_continues(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rotated files are kept, since the finished weights belong to them; nothing is rounded a second time."""
    texts, out, finished = tmp_path / "texts.jsonl", tmp_path / "out", []
    texts.write_text(json.dumps({"input_ids": prompt(500)}))
    words = ["--scheme", "w4a8", "--method", "gptq", "--calibration", str(texts), "--calibration-tokens", "500"]
    command = ["quantize", str(models["qwen3"]), str(out), "--rotate", "r2", *words]
    write = UnfinishedWeights.write

    def counted(self: UnfinishedWeights, name: str, rows: QuantizedRows) -> None:
        write(self, name, rows)
        finished.append(name)
        if len(finished) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(UnfinishedWeights, "write", counted)
    with pytest.raises(KeyboardInterrupt), rotated_folder(models["qwen3"], out, "r2") as folder:
        quantize_with_data(folder, out, "w4a8", DataOptions("gptq", texts, 500))
    assert {path.name for path in tmp_path.iterdir()} == {"texts.jsonl", ".out.rotated", ".out.unfinished"}
    monkeypatch.setattr(rotate, "rotate_checkpoint", None)
    assert main(command) == 0
    assert len(finished) == len(set(finished)) > 3
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["recipe"]["rotate"] == "r2"
    assert ROTATION_KEY not in config
    assert {path.name for path in tmp_path.iterdir()} == {"texts.jsonl", "out"}


def test_a_refused_run_leaves_no_rotated_files(tmp_path: Path, models: dict[str, Path]) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"input_ids": prompt(500)}))
    words = ["--scheme", "w4a8", "--method", "gptq", "--calibration", str(texts), "--calibration-tokens", "64"]
    assert main(["quantize", str(models["qwen3"]), str(tmp_path / "out"), "--rotate", "r2", *words]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


@pytest.mark.parametrize("words", [["--method", "imatrix"], ["--method", "auto"], ["--budget", "6bits"]])
def test_few_texts_are_refused_before_a_rotation(
    words: list[str], tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotate, "rotate_checkpoint", None)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"input_ids": prompt(200)}))
    args = [str(models["qwen3"]), str(tmp_path / "out"), "--scheme", "w4a8", "--calibration", str(texts), *words]
    parsed = make_parser(["quantize"]).parse_args(["quantize", *args, "--rotate", "r2"])
    with raises(InvalidArgumentError, param="calibration", code="too_few_tokens"):
        parsed.run(parsed)


def test_models_of_vectors_keep_their_rows(tmp_path: Path) -> None:
    build("qwen3").base_model.save_pretrained(tmp_path / "model")
    with raises(UnsupportedError, param="rotate"):
        rotate_checkpoint(tmp_path / "model", tmp_path / "out", "r1")
    assert not (tmp_path / "out").exists()


def test_another_family_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", model_type="gemma2")
    with raises(UnsupportedError, param="rotate"):
        rotate_checkpoint(folder, tmp_path / "out", "r1r2")
    assert not (tmp_path / "out").exists()
