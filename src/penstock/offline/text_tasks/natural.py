"""The task that a model is for: that of its head."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from penstock.checkpoint.pooling.head import ANSWER_TASK, TOKEN_TASK
from penstock.checkpoint.side_files import read_side_files
from penstock.config import ConfigReader
from penstock.llm.llm import LLM
from penstock.models.families import family_modules

__all__ = ["natural_task", "task_of_files"]

_BY_CLASS: Final = {
    "ForSequenceClassification": "text_classification",
    "ForTokenClassification": TOKEN_TASK,
    "ForQuestionAnswering": ANSWER_TASK,
    "ForMaskedLM": "fill_mask",
}
_TEXT_TO_TEXT: Final = "ForConditionalGeneration"
_PLAIN: Final = "text_generation"


def task_of_files(path: Path) -> str:
    """Return the task of a folder or a bundle by the class of its network, without opening it."""
    files = read_side_files(path, ["config.json"]) if path.exists() else {}
    if "config.json" not in files:
        return _PLAIN
    config = ConfigReader.parse(files["config.json"], str(path / "config.json"))
    classes = config.text_list("architectures") or []
    name = classes[0] if classes else ""
    for ending, task in _BY_CLASS.items():
        if name.endswith(ending):
            return task
    module = family_modules().get(config.str("model_type", ""), "")
    if ".encoder_decoder." in module and name.endswith(_TEXT_TO_TEXT):
        return "text2text_generation"
    is_embedder = ".encoders." in module or (path.is_dir() and (path / "modules.json").exists())
    return "feature_extraction" if is_embedder else _PLAIN


def natural_task(llm: LLM) -> str:
    """Return the name of the task that an open model is for."""
    head = llm.engine.pooling_head
    if head is not None and head.labels:
        return head.task or "text_classification"
    if llm.info.prefix_token >= 0:
        return "text2text_generation"
    if not llm.engine.has_language_head:
        return "feature_extraction"
    return "fill_mask" if llm.info.bidirectional else "text_generation"
