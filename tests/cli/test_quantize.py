"""quantize with calibration data, and what inspect says of the result."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.calibration import rotate
from penstock.calibration.unfinished import UnfinishedWeights
from penstock.checkpoint.folder import Checkpoint
from penstock.cli.models import quantize
from penstock.cli.parser import CommandParser
from penstock.core.native import QuantizedRows
from penstock.errors import PenstockError
from tests.support.command import FOLDER
from tests.support.errors import raises
from tests.support.tiny_llama import write_tiny_llama


@pytest.mark.long
def test_the_method_is_shown_with_its_data(penstock_inline, tmp_path: Path):
    out, imatrix, text = tmp_path / "out", tmp_path / "own.gguf", Path(FOLDER) / "train.py"
    data = ("--calibration", text, "--calibration-tokens", 512, "--imatrix-out", imatrix)
    done = penstock_inline("quantize", FOLDER, out, "--scheme", "w4a8", "--method", "imatrix", *data)
    assert done.returncode == 0, done.stderr
    assert "w4a8 by imatrix, 43 weights" in done.stdout
    assert "embed_tokens" in done.stderr
    shown = penstock_inline("inspect", out)
    assert "imatrix: calibration train.py" in shown.stdout
    recipe = json.loads(penstock_inline("inspect", out, "--json").stdout)["recipe"]
    assert recipe["calibration_sha256"][:12] in done.stdout
    assert penstock_inline("export", out, tmp_path / "out.psm").returncode == 0
    assert json.loads(penstock_inline("inspect", tmp_path / "out.psm", "--json").stdout)["recipe"] == recipe
    again = (
        "quantize",
        FOLDER,
        tmp_path / "again",
        "--scheme",
        "w4a8",
        "--method",
        "imatrix",
        "--calibration",
        imatrix,
    )
    assert penstock_inline(*again, "--calibration", imatrix).returncode == 0
    first, second = (folder / "model.safetensors" for folder in (out, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--calibration", "x.txt"), "--calibration: expected another --method"),
        (("--method", "gptq", "--calibration-tokens", "3"), "--calibration-tokens: expected"),
        (("--method", "imatrix", "--imatrix-out", "no-folder/own.gguf"), "--imatrix-out: no-folder"),
        (("--method", "gptq", "--calibration", "none.txt"), "none.txt"),
        (("--method", "gptq", "--calibration", "none.dat"), "none.dat"),
    ],
)
def test_options_that_do_not_fit_are_refused(penstock_inline, tmp_path: Path, options: tuple[str, ...], word: str):
    done = penstock_inline("quantize", FOLDER, tmp_path / "out", "--scheme", "w4a8", *options)
    assert done.returncode in (1, 2)
    assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_budget_prints_what_each_unit_costs(penstock_inline, tmp_path: Path):
    source, plot = write_tiny_llama(tmp_path / "model"), tmp_path / "units.svg"
    options = ("--budget", "8.5bits", "--calibration-tokens", 512, "--plot", plot)
    done = penstock_inline("quantize", source, tmp_path / "out", "--scheme", "w4a8", *options)
    assert done.returncode == 0, done.stderr
    for word in ("gate_proj|up_proj", "lm_head", "bits per weight", "held-out tokens", "all units in w8a8"):
        assert word in done.stdout
    assert "layer 1" in plot.read_text()
    shown = penstock_inline("inspect", tmp_path / "out").stdout
    assert "budget 8.5 bits" in shown
    assert penstock_inline("export", tmp_path / "out", tmp_path / "out.psm").returncode == 0
    recipe = json.loads(penstock_inline("inspect", tmp_path / "out.psm", "--json").stdout)["recipe"]
    assert recipe["units"]["1 down_proj"]["scheme"] in ("w4a8", "w8a8")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--budget", "5bits", "--max-kl", "0.1"), "--max-kl"),
        (("--plot", "x.svg"), "--plot"),
        (("--budget", "5"), "--budget"),
        (("--max-kl", "0"), "--max-kl"),
        (("--min-speed", "fast"), "--min-speed"),
        (("--budget", "5bits", "--method", "auto"), "method"),
        (("--budget", "5bits", "--levels", "w4a8,w4a16"), "levels"),
        (("--budget", "5bits", "--imatrix-out", "x.gguf"), "--imatrix-out"),
        (("--budget", "5bits", "--head", "q6_k"), "--head"),
    ],
)
def test_wrong_budgets_are_refused(penstock_inline, tmp_path: Path, options: tuple[str, ...], word: str):
    done = penstock_inline("quantize", FOLDER, tmp_path / "out", "--scheme", "w4a8", *options)
    assert done.returncode in (1, 2)
    assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (("--method", "gptq", "--calibration", "{}/none.txt"), None),
        (("--method", "gptq", "--calibration-tokens", "3"), "calibration_tokens"),
        (("--method", "gptq", "--calibration-tokens", "600"), "calibration_tokens"),
        (("--method", "imatrix", "--imatrix-out", "{}/none/own.gguf"), "imatrix_out"),
        (("--method", "auto", "--calibration", "{}/none.txt"), None),
        (("--method", "auto", "--imatrix-out", "{}/own.gguf"), "imatrix_out"),
        (("--budget", "many"), "budget"),
        (("--budget", "5bits", "--calibration", "{}/none.txt"), None),
        (("--budget", "5bits", "--plot", "{}/none/plot.svg"), "plot"),
        (("--budget", "5bits", "--calibration-tokens", "3"), "calibration_tokens"),
        (("--budget", "5bits", "--levels", "w8a8,w4a8"), "levels"),
    ],
)
def test_options_are_checked_before_rotating(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], param: str | None
) -> None:
    monkeypatch.setattr(rotate, "rotate_checkpoint", lambda *args: pytest.fail("the rotation began"))
    parser = CommandParser()
    quantize.add_parser(parser.add_subparsers())
    own = [option.format(tmp_path) for option in options]
    args = parser.parse_args(
        ["quantize", str(FOLDER), str(tmp_path / "out"), "--scheme", "w4a8", "--rotate", "r1", *own]
    )
    with raises(PenstockError, param=param):
        quantize.run(args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (("--head", "q6_k"), "head"),
        (("--head", "q6_k", "--method", "gptq"), "head"),
        (("--head", "q6_k", "--method", "auto"), "head"),
        (("--smooth-keys", "--method", "smooth"), "smooth_keys"),
    ],
)
def test_the_model_is_checked_before_rotating(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], param: str
) -> None:
    """Its columns fit no block, and its family has keys that are not smoothed by rows."""
    monkeypatch.setattr(rotate, "rotate_checkpoint", lambda *args: pytest.fail("the rotation began"))
    source = write_tiny_llama(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    parser = CommandParser()
    quantize.add_parser(parser.add_subparsers())
    words = ["quantize", str(source), str(tmp_path / "out"), "--scheme", "w4a8", "--rotate", "r1", *options]
    with raises(PenstockError, param=param):
        quantize.run(parser.parse_args(words))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("has_weights", [False, True], ids=["nothing_finished", "weights_finished"])
def test_an_interrupted_run_names_the_folders_it_keeps(
    has_weights: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, out = write_tiny_llama(tmp_path / "model"), tmp_path / "out"

    def interrupted(args: argparse.Namespace) -> int:
        assert args.checkpoint == str(tmp_path / ".out.rotated" / "rotated")
        if has_weights:
            rows = QuantizedRows(np.ones((4, 8), np.int8), np.ones(4, np.float32), None)
            UnfinishedWeights(out, {}, Checkpoint.open(args.checkpoint)).write("w", rows)
        raise MemoryError

    monkeypatch.setattr(quantize, "_round", interrupted)
    parser = CommandParser()
    quantize.add_parser(parser.add_subparsers())
    args = parser.parse_args(["quantize", str(source), str(out), "--scheme", "w8a8", "--rotate", "r2"])
    with pytest.raises(MemoryError):
        quantize.run(args)
    kept = [".out.rotated", ".out.unfinished"] if has_weights else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "model"]
    shown = capsys.readouterr().err
    assert all(str(tmp_path / name) in shown for name in kept)
    assert bool(shown) == has_weights
