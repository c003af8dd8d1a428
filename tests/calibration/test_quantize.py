"""Quantization with data of the demo model: the folder, its recipe, and a run that was interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from penstock.calibration import quantize
from penstock.calibration.quantize import DataOptions, DataReport, quantize_with_data
from penstock.calibration.texts import CalibrationData
from penstock.calibration.unfinished import UnfinishedWeights
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import QuantizeReport
from penstock.cli.main import main
from penstock.core.native import QuantizedRows
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from tests.support.encoders import build
from tests.support.errors import raises
from tests.support.families import prompt, save
from tests.support.invariant_checkpoints import write_checkpoint

DEMO = Path(__file__).parents[2] / "demo" / "model"
TEXT = DEMO / "train.py"


class StopError(Exception):
    pass


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataReport, int]:
    """A folder that GPTQ wrote in two runs, the first of which was stopped, and the weights of the second one."""
    out = tmp_path_factory.mktemp("gptq") / "out"
    options, finished = DataOptions("gptq", TEXT, 1024), []
    write = UnfinishedWeights.write

    def counted(self: UnfinishedWeights, name: str, rows: QuantizedRows) -> None:
        write(self, name, rows)
        finished.append(name)
        if len(finished) == 35:
            raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnfinishedWeights, "write", counted)
        with pytest.raises(StopError):
            quantize_with_data(DEMO, out, "w4a8", options)
        assert not out.exists()
        report = quantize_with_data(DEMO, out, "w4a8", options)
    return out, report, len(finished) - 35


def test_an_interrupted_run_continues(gptq: tuple[Path, DataReport, int]) -> None:
    out, report, num_second = gptq
    assert num_second == 42 - 35
    assert report.files.num_quantized == 43
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_the_folder_tells_the_method_and_data(gptq: tuple[Path, DataReport, int]) -> None:
    out, report, _ = gptq
    recipe = json.loads((out / "config.json").read_text())["quantization_config"]["recipe"]
    assert recipe == report.recipe
    assert recipe["method"] == "gptq"
    assert recipe["calibration"] == "train.py"
    assert recipe["calibration_tokens"] <= 1024
    assert len(recipe["calibration_sha256"]) == 64
    assert Checkpoint.open(out).scheme == "w4a8"
    assert report.without_data == ("model.embed_tokens.weight",)
    assert report.without_gptq == ()


def test_imatrix_samples_texts_and_finds_no_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = quantize_with_data(DEMO, tmp_path / "out", "w4a16", DataOptions("imatrix", num_tokens=256))
    assert report.recipe["calibration"] == "samples"
    monkeypatch.setattr(quantize, "open_calibrated", None)
    with raises(InvalidArgumentError):  # before any work
        quantize_with_data(DEMO, tmp_path / "out", "w4a16", DataOptions("imatrix"))


def test_the_output_counts_experts_without_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some experts see too few tokens: each is rounded to nearest, and the output does not hide it."""
    monkeypatch.setattr(quantize, "MIN_EXPERT_TOKENS", 100)
    texts, source = tmp_path / "texts.jsonl", save("mixtral", tmp_path / "model")
    texts.write_text(json.dumps({"input_ids": prompt(260)}))
    words = ["--scheme", "w4a8", "--method", "imatrix", "--calibration", str(texts), "--calibration-tokens", "256"]
    assert main(["quantize", str(source), str(tmp_path / "out"), *words]) == 0
    checkpoint = Checkpoint.open(tmp_path / "out")
    experts = [name for name in checkpoint.tensors if ".experts." in name and checkpoint.is_quantized(name)]
    shown = capsys.readouterr().err
    assert f"of {len(experts)} weights of experts saw too few" in shown
    assert f"0 of {len(experts)} weights of experts" not in shown


def test_smooth_does_not_claim_data_for_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"method": "smooth", "calibration": "texts", "calibration_tokens": 9, "calibration_sha256": 64 * "0"}
    files = QuantizeReport("w8a8", 1, 1, 1, 1.0)
    report = DataReport(files, recipe, (), (), 1.0, {"experts.0.w1.weight": 40, "experts.1.w1.weight": 50})
    monkeypatch.setattr(quantize, "quantize_with_data", lambda *args: report)
    assert main(["quantize", str(DEMO), str(tmp_path / "out"), "--scheme", "w8a8", "--method", "smooth"]) == 0
    shown = capsys.readouterr().err
    assert "40 to 50 calibration tokens" in shown
    assert "smooth rounds all weights of experts to nearest" in shown


def test_layers_that_share_weights_use_all_inputs(tmp_path: Path) -> None:
    """ALBERT has one weight for all layers: GPTQ rounds it once, by the inputs of all of them."""
    sizes = {"embedding_size": 32, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 2}
    build(transformers.AutoModelForMaskedLM, "albert", **sizes).save_pretrained(tmp_path / "model")
    data = CalibrationData([prompt(90), prompt(70)], "test")
    report = quantize_with_data(tmp_path / "model", tmp_path / "out", "w8a8", DataOptions("gptq", data=data))
    assert report.without_gptq == ()
    assert Checkpoint.open(tmp_path / "out").scheme == "w8a8"


@pytest.mark.parametrize(("method", "value"), [("smooth", np.nan), ("gptq", np.inf)])
def test_weights_that_are_not_finite_are_refused(method: str, value: float, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, source / "model.safetensors")
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"input_ids": [7, 8, 9, 10] * 80}))
    with pytest.raises(InvalidFileError) as refused:
        quantize_with_data(source, tmp_path / "out", "w4a8", DataOptions(method, texts, 320, 1))
    assert "model.layers.0.mlp.up_proj.weight" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_gptq_refuses_fewer_tokens_than_columns(tmp_path: Path) -> None:
    with raises(InvalidArgumentError, param="calibration_tokens", code="too_few_tokens"):
        quantize_with_data(DEMO, tmp_path / "out", "w4a8", DataOptions("gptq", TEXT, 600))
    short = tmp_path / "short.txt"
    short.write_bytes(TEXT.read_bytes()[:1500])
    with raises(InvalidArgumentError, param="calibration", code="too_few_tokens"):
        quantize_with_data(DEMO, tmp_path / "out", "w4a8", DataOptions("gptq", short))
    assert list(tmp_path.iterdir()) == [short]


@pytest.mark.parametrize(("out", "imatrix_out", "param"), [
    ("none/out", None, "out"), ("out", "none/own.gguf", "imatrix_out"), ("out", ".", "imatrix_out"),
])  # fmt: skip
def test_places_of_results_are_checked_before_the_work(
    out: str, imatrix_out: str | None, param: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "open_calibrated", None)
    imatrix = None if imatrix_out is None else tmp_path / imatrix_out
    with raises(FileAccessError, param=param):
        quantize_with_data(DEMO, tmp_path / out, "w4a16", DataOptions("imatrix", imatrix_out=imatrix))


def test_unknown_methods_are_refused() -> None:
    with raises(InvalidArgumentError, param="method"):
        DataOptions("other")
    with raises(InvalidArgumentError, param="calibration_tokens"):
        DataOptions("gptq", num_tokens=3)
