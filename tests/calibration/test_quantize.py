"""Quantization with data of the demo model: the folder, its recipe, and a run that was interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.calibration import quantize
from penstock.calibration.quantize import DataOptions, DataReport, quantize_with_data
from penstock.calibration.unfinished import UnfinishedWeights
from penstock.checkpoint.folder import Checkpoint
from penstock.core.native import QuantizedRows
from penstock.errors import FileAccessError, InvalidArgumentError
from tests.support.errors import raises

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
