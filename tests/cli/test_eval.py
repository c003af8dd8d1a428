"""``penstock eval``: tables, JSON and pictures of one model and of two, and refusals by the option's name."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from penstock.bench.quality import evaluate as module
from penstock.bench.quality.report import Speed
from tests.support.command import DEMO, FOLDER, ROOT, Run

SVG = "{http://www.w3.org/2000/svg}"
TASK = ROOT / "examples/evaluation/python_lines.jsonl"


def words_of(path) -> str:
    return " ".join(one.text or "" for one in ElementTree.fromstring(path.read_text()).iter(f"{SVG}text"))  # noqa: S314


def test_two_schemes_are_compared(penstock_inline: Run, tmp_path, monkeypatch) -> None:
    rates = iter([20.0, 10.0])

    def speed(*_: object) -> Speed:
        rate = next(rates)
        return Speed(495, 64, 100.0, [100.0] * 3, rate, [rate] * 3, 1 << 26, "avx2", 2)

    monkeypatch.setattr(module, "_speed", speed)  # penstock bench has its own tests
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(TASK.read_text().splitlines()[:3]))
    args = ["--text", FOLDER / "valid.txt", "--max-windows", "2", "--window", "100", "--tasks", few]
    picture = tmp_path / "q.svg"
    done = penstock_inline("eval", FOLDER, "--scheme", "w8a8", "--against-scheme", "f32", *args, "--plot", picture)
    assert done.returncode == 0, done.stderr
    for part in (
        "model (w8a8)",
        "model (f32)",
        "2 windows of 100 tokens",
        "KL divergence",
        "same top token",
        "few, acc",
    ):
        assert part in done.stdout
    assert "2.00 times faster in decode" in done.stdout.replace("\n", " ")
    assert "KL divergence that a share of the tokens exceeds" in words_of(picture)


def test_one_model_has_no_comparison(penstock_inline: Run, tmp_path) -> None:
    picture = tmp_path / "q.svg"
    args = ["--no-speed", "--window", "100", "--max-windows", "2", "--plot", picture]
    done = penstock_inline("eval", DEMO, "--json", *args)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["against"], found["divergence"], found["verdict"], found["model"]["speed"]) == (None,) * 4
    assert found["text"]["name"] == "built-in sample"
    assert "perplexity of the text up to each window" in words_of(picture)


def test_a_comparison_with_an_interval_is_json(penstock_inline: Run) -> None:
    args = ["--no-speed", "--window", "24", "--max-windows", "8", "--against", DEMO]
    done = penstock_inline("eval", DEMO, "--json", *args)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["divergence"]["mean"]["value"] == 0
    assert found["divergence"]["mean"]["standard_error"] == 0
    assert found["verdict"]["is_measurable"] is False


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (["--text", "none.txt"], "text"),
        (["--tasks", "none.jsonl"], "tasks"),
        (["--plot", "q.png"], "--plot"),
        (["--window", "1"], "--window"),
        (["--window", "5000"], "--window"),
        (["--stride", "600"], "--stride"),
        (["--max-windows", "-1"], "--max-windows"),
        (["--against", "none.psm"], "none.psm"),
    ],
)
def test_errors_name_the_option(options, option, penstock_inline: Run, monkeypatch) -> None:
    monkeypatch.setattr(module, "_speed", lambda *_: pytest.fail("measured before the options were checked"))
    done = penstock_inline("eval", DEMO, *options)
    assert done.returncode in (1, 2)
    assert option in done.stderr
