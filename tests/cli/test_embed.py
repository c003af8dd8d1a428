"""``penstock embed``: a vector for each line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock import LLM
from penstock.cli.main import main
from tests.support.command import DEMO

TEXTS = ["def add(a, b):", "x = 1"]


def test_vectors_are_those_of_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.txt"
    path.write_text(f"{TEXTS[0]}\r\n\n{TEXTS[1]}")
    options = ["--pooling", "last", "--normalize", "--dimensions", "5"]
    with LLM(DEMO) as llm:
        for given, made in ([], llm.embed(TEXTS)), (options, llm.embed(TEXTS, "last", True, dimensions=5)):
            assert main(["embed", str(DEMO), str(path), *given]) == 0
            printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            assert [one["index"] for one in printed] == [0, 1]
            for one, expected in zip(printed, made, strict=True):
                assert np.array_equal(np.float32(one["embedding"]), expected.vector)
                assert one["num_tokens"] == len(expected.token_ids)


def test_a_wrong_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(b"good\n\xff\xfe\n")
    assert main(["embed", str(DEMO), str(path)]) == 1
    assert "line 2: expected text in UTF-8" in capsys.readouterr().err
    assert main(["embed", str(DEMO), str(path), "--prompt-name", "query"]) != 0
