"""The options of ``tokenizer_config.json`` that change how a ``tokenizer.json`` treats a text, as in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from penstock.checkpoint.sentencepiece.steps import SPACE_MARK, decoder_steps
from penstock.checkpoint.tokenizer_files.classes import BERT_CLASSES, SPACE_MARK_CLASSES
from penstock.config import ConfigReader

__all__ = ["apply_options"]

_PREFIX_CLASSES: Final = (
    "GPT2Tokenizer", "RobertaTokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "CohereTokenizer",
)  # fmt: skip
_MARK_CLASSES: Final = ("XLMRobertaTokenizer", "CamembertTokenizer", "AlbertTokenizer")
_SEQUENCES: Final = ("normalizers", "pretokenizers", "decoders")


def apply_options(tokenizer: dict[str, Any], name: str | None, config: ConfigReader) -> None:
    """Apply the options of the class ``name`` to a tokenizer.json in place.

    These are ``add_prefix_space`` of the classes of GPT-2, RoBERTa, XLM-RoBERTa and Llama, ``legacy`` of Llama's, and
    how BERT's treat capital letters, accents and Chinese characters.  Raises InvalidFileError for a value of the wrong
    type.
    """
    if name in _PREFIX_CLASSES:
        for step in _steps(tokenizer.get("pre_tokenizer"), "ByteLevel"):
            step["add_prefix_space"] = config.bool("add_prefix_space", False)
    elif name in _MARK_CLASSES and config.has("add_prefix_space"):
        scheme = "always" if config.bool("add_prefix_space") else "never"
        for field in ("pre_tokenizer", "decoder"):
            for step in _steps(tokenizer.get(field), "Metaspace"):
                step["prepend_scheme"] = scheme
                step.pop("add_prefix_space", None)
    elif name in SPACE_MARK_CLASSES:
        _mark_spaces(tokenizer, config)
    elif name in BERT_CLASSES:
        for step in _steps(tokenizer.get("normalizer"), "BertNormalizer"):
            step["lowercase"] = config.bool("do_lower_case", True)
            step["handle_chinese_chars"] = config.bool("tokenize_chinese_chars", True)
            step["strip_accents"] = config.bool("strip_accents") if config.has("strip_accents") else None


def _steps(component: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a component that have this type, those inside sequences too."""
    if not isinstance(component, dict):
        return
    if component.get("type") == kind:
        yield component
    for key in _SEQUENCES:
        parts = component.get(key)
        for part in parts if isinstance(parts, list) else ():
            yield from _steps(part, kind)


def _mark_spaces(tokenizer: dict[str, Any], config: ConfigReader) -> None:
    """Give a tokenizer of SentencePiece's form the steps that transformers 5 builds for Llama's classes.

    A text begins with a space; with ``legacy`` each part of it behind a special token does, too.
    """
    model = tokenizer.get("model")
    is_bytes = any(True for field in ("pre_tokenizer", "decoder") for _ in _steps(tokenizer.get(field), "ByteLevel"))
    if is_bytes or not isinstance(model, dict) or model.get("type") != "BPE":
        return
    has_prefix = config.bool("add_prefix_space", True)
    behind_tokens = "always" if config.bool("legacy", False) else "first"
    tokenizer["normalizer"] = None
    tokenizer["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": SPACE_MARK,
        "prepend_scheme": behind_tokens if has_prefix else "never",
        "split": False,
    }
    tokenizer["decoder"] = {"type": "Sequence", "decoders": decoder_steps(has_prefix)}
