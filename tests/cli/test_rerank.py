"""``penstock rerank``: the lines of a file by their relevance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from penstock import LLM
from penstock.cli.main import main
from tests.support.command import DEMO
from tests.support.encoders import LIMITS, build, write_tokenizer

LINES = ["the mats", "sat on the mat", "cats", "the " * 150]


def test_lines_are_ranked_as_by_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = tmp_path / "model", tmp_path / "documents.txt"
    build(transformers.AutoModelForSequenceClassification, "bert", num_labels=1).save_pretrained(folder)
    write_tokenizer(folder)
    path.write_text("\n".join(LINES[:3]))
    with LLM(folder, mode="eager", limits=LIMITS) as llm:
        expected = llm.rerank("the cat", LINES[:3], top_n=2)
    command = ["rerank", str(folder), str(path), "--query", "the cat", "--context-len", "96"]
    capsys.readouterr()
    assert main([*command, "--top-n", "2"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [{"index": one.index, "score": one.score, "document": one.document} for one in expected]
    path.write_text("\n".join(LINES))
    assert main([*command, "--truncate"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main([*command, "--instruction", "find cats"]) != 0
    assert "instruction" in capsys.readouterr().err


def test_a_model_that_ranks_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "documents.txt"
    path.write_text("x = 1")
    assert main(["rerank", str(DEMO), str(path), "--query", "x"]) != 0
    assert "expected a cross-encoder or a causal reranker" in capsys.readouterr().err
