"""A hostile tokenizer ends the command with one line, on its way in and on its way out."""

from __future__ import annotations

import pytest

from tests.support.hostile_tokenizers import backtracks, bundle_with, grows, words


@pytest.mark.parametrize(
    ("fields", "prompt", "message"),
    [
        ({"normalizer": grows(1000, 6)}, "aaa", "normalizer: expected steps that lengthen a text at most 4096 times"),
        (
            {"decoder": grows(1000, 6, "decoders")},
            "aaa",
            "decoder: expected steps that lengthen a text at most",
        ),
        ({"pre_tokenizer": backtracks()}, "a" * 60 + "b", "backtracks too often on this text"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 0}, "unk_token": "a"}}, "a", "have the same id 0"),
    ],
)
def test_a_hostile_tokenizer_is_one_line(penstock_command, tmp_path, fields, prompt, message) -> None:
    path = bundle_with(tmp_path / "hostile.psm", words(**fields))
    done = penstock_command("run", path, prompt, "--max-tokens", 4)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "tokenizer.json: " in lines[0]
    assert message in lines[0]
