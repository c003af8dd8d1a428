"""A model against another one: the report, the verdict, costs for advise, and refusals by name."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.quality import evaluate as module
from penstock.bench.quality.bootstrap import Interval
from penstock.bench.quality.costs import read_costs
from penstock.bench.quality.evaluate import Evaluation, Subject, evaluate
from penstock.bench.quality.report import Divergence, ModelReport, Speed
from penstock.bench.quality.scores import _Chunks
from penstock.bench.quality.verdict import judge
from penstock.bench.quality.windows import WindowRule
from penstock.checkpoint.tensor_file import TensorFile
from penstock.cli.main import main
from penstock.errors import InvalidArgumentError, InvalidFileError
from tests.support.command import DEMO, FOLDER, ROOT
from tests.support.errors import raises

RULE = WindowRule(length=64, max_windows=3)


def test_the_python_of_the_guide_runs(monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/guides/evaluation.md").read_text()
    (script,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Evaluation(" in block]
    exec(script.replace("max_windows=4", "max_windows=1"), {})  # noqa: S102 - our own document
    assert "smaller" in capsys.readouterr().out


def test_a_model_against_itself_differs_in_nothing() -> None:
    report = evaluate(Evaluation(Subject(DEMO), Subject(DEMO), FOLDER / "valid.txt", RULE, speed=False))
    assert report.divergence is not None
    assert (report.divergence.max, report.divergence.same_top.value, report.divergence.nll_change.value) == (0, 1, 0)
    assert report.verdict is not None
    assert (report.verdict.worth, report.verdict.is_measurable) == ("no", False)
    assert report.text.num_scored == 3 * 64
    assert len(report.model.running_perplexity) == 3
    assert report.model.running_perplexity[-1] == pytest.approx(report.model.perplexity)
    json.dumps(asdict(report), allow_nan=False)


def changed_demo(folder: Path, name: str, change) -> Path:
    """The demo's folder with a changed file."""
    folder.mkdir()
    for path in FOLDER.iterdir():
        if path.name != "valid.txt":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    return folder


def test_a_scheme_for_a_gguf_file_counts_its_own_bytes(tmp_path) -> None:
    """The file has float32: its weights are four times those that w8a8 computes with."""
    path = tmp_path / "model.gguf"
    assert main(["convert", str(FOLDER), str(path), "--dtype", "f32"]) == 0
    floats, rounded = (
        evaluate(Evaluation(Subject(path, scheme=scheme), text=FOLDER / "valid.txt", rule=RULE, speed=False)).model
        for scheme in (None, "w8a8")
    )
    assert floats.weight_bytes == pytest.approx(4 * floats.num_parameters, rel=1e-4)
    assert rounded.weight_bytes < 0.26 * floats.weight_bytes


def test_another_tokenizer_is_refused(tmp_path) -> None:
    def exchange(data: bytes) -> bytes:
        values = json.loads(data)
        vocab = values["model"]["vocab"]
        vocab["e"], vocab["o"] = vocab["o"], vocab["e"]
        return json.dumps(values).encode()

    other = changed_demo(tmp_path / "other", "tokenizer.json", exchange)
    with raises(InvalidArgumentError, param="against", code="vocabulary_mismatch"):
        evaluate(Evaluation(Subject(FOLDER), Subject(other), rule=RULE, speed=False))


def test_logits_that_are_not_finite_are_refused(tmp_path) -> None:
    at, num_bytes = TensorFile(FOLDER / "model.safetensors").tensors["model.norm.weight"].offset, 2 * 256
    huge = b"\x7f\x7f" * 256  # finite weights of bf16 whose products overflow
    bad = changed_demo(tmp_path / "bad", "model.safetensors", lambda data: data[:at] + huge + data[at + num_bytes :])
    with raises(InvalidFileError, param="against", code="non_finite_logits"):
        evaluate(Evaluation(Subject(FOLDER), Subject(bad), rule=RULE, speed=False))


def test_windows_of_llama_cpp_are_reported() -> None:
    rule = WindowRule("llama.cpp", 64, max_windows=2)
    text = evaluate(Evaluation(Subject(DEMO), text=FOLDER / "valid.txt", rule=rule, speed=False)).text
    assert (text.convention, text.length, text.stride, text.num_scored) == ("llama.cpp", 64, 64, 2 * 31)


def test_a_window_may_fill_the_context() -> None:
    context_len = json.loads((FOLDER / "config.json").read_text())["max_position_embeddings"]
    rule = WindowRule(length=context_len, max_windows=1)
    report = evaluate(Evaluation(Subject(DEMO), None, FOLDER / "valid.txt", rule, speed=False))
    assert report.text.num_scored == context_len


def test_windows_beyond_the_context_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(module, "_speed", lambda *_: pytest.fail("measured before the window was checked"))
    with raises(InvalidArgumentError, param="window", code="context_length_exceeded"):
        evaluate(Evaluation(Subject(DEMO), rule=WindowRule(length=1025)))


class Logits:
    """A program whose step computed four rows."""

    def __init__(self, values: list[float]) -> None:
        self._rows = np.array(values, np.float32)[:, None] + np.zeros((1, 3), np.float32)

    def logits(self):
        return self._rows


def test_rows_before_the_first_scored_one_are_left_out() -> None:
    chunks = _Chunks(2, "model")
    chunks.take(9, Logits([0, 1, 2, 3]), None, range(1))  # type: ignore[arg-type]
    assert (chunks.num_waiting, chunks.num_taken) == (0, 1)
    chunks.take(9, Logits([0, 1, 2, 3]), None, range(1, 4))  # type: ignore[arg-type]
    assert chunks.pop(1)[:, 0].tolist() == [2]
    assert (chunks.num_waiting, chunks.pop(1)[:, 0].tolist(), chunks.num_waiting) == (1, [3], 0)
    with raises(InvalidFileError, param="model", code="non_finite_logits"):
        chunks.take(9, Logits([float("nan")]), None, range(1))  # type: ignore[arg-type]


def model(num_bytes: int, prefill: float, decode: float, kv: str = "f32") -> ModelReport:
    """A report of a model whose runs differ by 1 %."""
    runs = [[rate, rate * 0.995, rate * 1.005] for rate in (prefill, decode)]
    speed = Speed(512, 64, prefill, runs[0], decode, runs[1], 1 << 26, "avx2", 2)
    kv_bytes = {"f32": 4096, "int4": 576}[kv]
    return ModelReport("m", "llama", "w4a8", kv, kv_bytes, num_bytes, 1000, 4.5, 10.0, (9.0, 11.0), 2.3, [10.0], speed)


def divergence(change: float, error: float) -> Divergence:
    interval = Interval(change, change - 2 * error, change + 2 * error, error, 2.8 * error)
    return Divergence(Interval(0.01), 0.007, 0.02, 0.06, 0.1, 0.2, Interval(0.94), 0.03, interval, [0.0, 0.2])


@pytest.mark.parametrize(
    ("size", "prefill", "decode", "change", "worth"),
    [
        (1000, 100, 20, 0.001, "yes"),
        (1000, 100, 20, 0.02, "trade"),
        (1000, 100, 5, 0.02, "mixed"),
        (4000, 100, 10, 0.02, "no"),
        (4000, 100, 10, 0.0, "no"),
        (4000, 50, 10, -0.02, "no"),
        (4000, 100, 10, -0.02, "yes"),
    ],
)
def test_the_verdict_weighs_gains_and_losses(size, prefill, decode, change, worth) -> None:
    verdict = judge(model(size, prefill, decode), model(4000, 100, 10), divergence(change, 0.004))
    assert (verdict.worth, verdict.is_measurable) == (worth, abs(change) > 0.008)
    assert verdict.size == 4000 / size
    assert verdict.sentence.endswith(".")


def test_smaller_keys_and_values_are_a_gain() -> None:
    verdict = judge(model(4000, 100, 10, "int4"), model(4000, 100, 10), divergence(0.001, 0.004))
    assert (verdict.worth, verdict.size) == ("yes", 1.0)
    assert verdict.kv_size == pytest.approx(4096 / 576)
    assert "m (w4a8, int4)" in verdict.sentence  # else both have one name


def test_speeds_that_overlap_are_equal() -> None:
    slow = model(4000, 100, 10)
    noisy = replace(slow, speed=replace(slow.speed, decode_runs=[9.0, 14.0, 15.0]))
    verdict = judge(noisy, slow, divergence(0.0, 0.004))
    assert (verdict.prefill, verdict.decode, verdict.worth) == (1.0, 1.0, "no")


def report(scheme: str, other: str, change: float) -> str:
    return json.dumps(
        {
            "model": {"scheme": scheme},
            "against": {"scheme": other},
            "divergence": {"nll_change": {"value": change}},
        }
    )


def test_costs_come_from_reports(tmp_path) -> None:
    for number, text in enumerate([report("w4a8", "f32", 0.05), report("w8a8", "f32", 0.002)]):
        (tmp_path / f"{number}.json").write_text(text)
    costs = read_costs([tmp_path / "0.json", tmp_path / "1.json"])
    assert costs == pytest.approx({"w4a8": np.expm1(0.05), "f32": 0.0, "w8a8": np.expm1(0.002)})
    for text, code in (
        ("{}", "invalid_report"),
        ("[]", "invalid_report"),
        ("{", "invalid_json"),
        (report("w8a8", "bf16", 0.002), "invalid_report"),
    ):
        (tmp_path / "2.json").write_text(text)
        with raises(InvalidFileError, param="quality", code=code):
            read_costs([tmp_path / "0.json", tmp_path / "2.json"])
