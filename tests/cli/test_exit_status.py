"""The exit status is 2 for a wrong option, argument or value, and 1 for a missing or damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.support.command import DEMO

WRONG = {
    "a target": (2, ["infer", "--model", str(DEMO), "--target", "gpu", "x"], "--target: expected 'cpu'"),
    "a scheme": (2, ["export", "x", "out.psm", "--scheme", "int4"], "--scheme: expected one of"),
    "the input as output": (2, ["batch", str(DEMO), "b.jsonl", "b.jsonl"], "the output must not be the input"),
    "a missing model": (1, ["run", "./gone.psm", "x"], "gone.psm: no such file"),
    "a folder without a tokenizer": (1, ["run", "folder", "x"], "folder: expected tokenizer.json"),
    "a missing tokenizer": (1, ["infer", "--model", str(DEMO), "--tokenizer", "gone", "x"], "--tokenizer: no such"),
    "a missing folder": (1, ["export", "--model-dir", "gone"], "--model-dir: gone: no such folder"),
    "a missing folder of a plot": (1, ["profile", str(DEMO), "--plot", "gone/x.svg"], "no such folder"),
    "a missing script": (1, ["run", "folder", "x", "--network", "gone.py:Net", "--mode", "eager"], "gone.py: no such"),
    "a scheme in a file": (1, ["export", "--config-path", "scheme.yaml"], "scheme.yaml: scheme: expected one of"),
    "a length in a file": (1, ["infer", "--model", "length.yaml", "x"], "length.yaml: infer: infer_seq_length"),
    "a field in a file": (1, ["infer", "--model", "field.yaml", "x"], "field.yaml: infer: unknown field 'foo'"),
    "a target in a file": (1, ["infer", "--model", "target.yaml", "x"], "target.yaml: infer: target"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_exit_status_tells_a_wrong_option_from_a_wrong_file(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "folder" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    if case == "a missing script":
        (tmp_path / "folder" / "tokenizer.json").write_bytes((DEMO.parent / "model" / "tokenizer.json").read_bytes())
    (tmp_path / "scheme.yaml").write_text("scheme: int4")
    infer = f"infer:\n  prefill_model_path: {DEMO}\n  "
    (tmp_path / "length.yaml").write_text(f"{infer}infer_seq_length: -1")
    (tmp_path / "field.yaml").write_text(f"{infer}foo: 1")
    (tmp_path / "target.yaml").write_text(f"{infer}target: gpu")
    status, arguments, message = WRONG[case]
    assert main(arguments) == status
    assert message in capsys.readouterr().err
