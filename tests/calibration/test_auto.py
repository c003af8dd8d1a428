"""The choice of a method by the divergence of its result on texts that no method saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.calibration.auto import methods_for, quantize_auto
from penstock.calibration.divergence import MeanDivergence
from penstock.calibration.judge import Judge, split_data
from penstock.calibration.quantize import DataOptions
from penstock.calibration.texts import CalibrationData
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidArgumentError
from penstock.quant.scheme import find_scheme
from penstock.runtime.build import Progress
from tests.support.errors import raises
from tests.support.tiny_llama import write_tiny_llama


class StopError(Exception):
    pass


@pytest.mark.long
def test_auto_keeps_the_method_with_the_least_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, judged = write_tiny_llama(tmp_path / "model"), tmp_path / "out", list[str]()
    monkeypatch.setattr("penstock.calibration.auto.methods_for", lambda scheme: ("rtn", "gptq"))
    measure = Judge.divergence

    def counted(judge: Judge, folder: Path) -> MeanDivergence:
        judged.append(folder.name)
        return measure(judge, folder)

    def stop(progress: Progress) -> None:
        if progress.note == "gptq":
            raise StopError

    monkeypatch.setattr(Judge, "divergence", counted)
    options = DataOptions("gptq", num_tokens=512)
    with pytest.raises(StopError):
        quantize_auto(source, out, "w4a8", options, stop)
    assert judged == ["rtn"]
    report = quantize_auto(source, out, "w4a8", options)
    assert judged == ["rtn", "gptq"]
    values = {own.method: own.divergence.mean for own in report.candidates if own.divergence is not None}
    assert report.method == min(values, key=lambda name: values[name])
    recipe = json.loads((out / "config.json").read_text())["quantization_config"]["recipe"]
    assert recipe == report.recipe
    assert recipe["method"] == report.method
    assert recipe["tried"] == pytest.approx(values, abs=1e-6)
    assert Checkpoint.open(out).scheme == "w4a8"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_methods_without_effect_are_not_tried() -> None:
    assert {"rtn", "imatrix", "gptq", "smooth+gptq"} <= set(methods_for(find_scheme("w4a8")))
    assert "smooth" not in methods_for(find_scheme("w4a16"))
    assert "imatrix" not in methods_for(find_scheme("w8a8"))


def test_every_fourth_sequence_is_held_out() -> None:
    data = CalibrationData([[number] * 512 for number in range(9)], "samples")
    seen, held = split_data(data)
    assert [ids[0] for ids in held.sequences] == [3, 7]
    assert len(seen.sequences) == 7
    assert [ids[0] for ids in split_data(CalibrationData(data.sequences[:2], ""))[1].sequences] == [1]
    with raises(InvalidArgumentError, param="calibration", code="too_few_tokens"):
        split_data(CalibrationData(data.sequences[:1], ""))
