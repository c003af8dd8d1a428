"""``penstock run`` with models that do not continue text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.errors import InvalidArgumentError
from tests.support.marks import mostly_long
from tests.support.text_tasks import write_folder

KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "text_classification": ("ForSequenceClassification", {"num_labels": 3}, "the cat"),
    "token_classification": ("ForTokenClassification", {"num_labels": 3}, "the cat sat"),
    "question_answering": ("ForQuestionAnswering", {}, "who sat?\nthe cat sat on the mat"),
    "fill_mask": ("ForMaskedLM", {}, "the [MASK] sat"),
    "embed": ("", {}, "the cat"),
}


@pytest.mark.parametrize("task", mostly_long(KINDS, "fill_mask", "token_classification"))
def test_run_prints_the_result_of_the_task(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, changes, text = KINDS[task]
    write_folder(tmp_path, kind, **changes)
    for options in ([], ["--json"]):
        capsys.readouterr()
        assert main(["run", str(tmp_path), text, "--mode", "eager", *options]) == 0
        out = capsys.readouterr().out
        assert out.strip()
    assert json.loads(out)["task"] == task


def test_a_question_needs_a_context(tmp_path: Path) -> None:
    from penstock import LLM
    from penstock.cli.run.task_output import print_task

    write_folder(tmp_path, "ForQuestionAnswering")
    with LLM(tmp_path, mode="eager") as llm, pytest.raises(InvalidArgumentError) as caught:
        print_task(llm, "question_answering", "who sat?", as_json=False)
    assert caught.value.param == "prompt"
