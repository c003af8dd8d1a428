"""Tasks of DeBERTa with its own vocabulary file: the results of transformers' pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock import pipeline
from tests.support.encoders import DEBERTA_V3, build
from tests.support.text_tasks import assert_close
from tests.support.tokenizer_folders import SHAPES

_NLI = {0: "entailment", 1: "neutral", 2: "contradiction"}
_TEXT = "I love Beijing, because it is a city"
TASKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "zero-shot-classification": (
        "ForSequenceClassification",
        {"id2label": _NLI, "label2id": {name: i for i, name in _NLI.items()}},
        {"candidate_labels": ["city", "love of food"]},
    ),
    "token-classification": ("ForTokenClassification", {"num_labels": 3}, {"aggregation_strategy": "simple"}),
    "fill-mask": ("ForMaskedLM", {}, {"top_k": 4}),
    "feature-extraction": ("", {}, {}),
}


@pytest.mark.parametrize("task", TASKS)
def test_results_are_those_of_transformers(task: str, tmp_path: Path) -> None:
    kind, changes, options = TASKS[task]
    SHAPES["DeBERTa"](tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    sizes = {"vocab_size": len(tokenizer), "position_buckets": 8, **changes}
    model = build(getattr(transformers, f"AutoModel{kind}"), "deberta-v2", **(DEBERTA_V3 | sizes))
    model.save_pretrained(tmp_path)
    assert "legacy" in json.loads((tmp_path / "config.json").read_text())
    text = f"{_TEXT} [MASK]" if task == "fill-mask" else _TEXT
    theirs = transformers.pipeline(task, model=model, tokenizer=tokenizer)
    with pipeline(task, tmp_path, backend="eager") as own:
        assert_close(own(text, **options), theirs(text, **options))
