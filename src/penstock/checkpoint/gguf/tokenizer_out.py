"""The metadata of a GGUF file for the tokenizer of a checkpoint folder: byte-level BPE, and BPE over characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.checkpoint.generation import read_chat_templates
from penstock.checkpoint.gguf.split_patterns import pre_tokenizer_name
from penstock.checkpoint.gguf.vocab import TokenType
from penstock.config import parse_object, show
from penstock.errors import UnsupportedError

__all__ = ["tokenizer_metadata"]

_MAX_BYTES: Final = 1 << 27
_MAX_VALUES: Final = 1 << 23
_SPACE_MARK: Final = "\u2581"


def tokenizer_metadata(files: Mapping[str, bytes], vocab_size: int) -> dict[str, Any]:
    """Return the keys ``tokenizer.*`` of the files of a folder; none without tokenizer.json.

    Raises UnsupportedError for a tokenizer that GGUF has no name for.
    """
    if "tokenizer.json" not in files:
        return {}
    data = parse_object(
        files["tokenizer.json"], "tokenizer.json", max_bytes=_MAX_BYTES, max_values=_MAX_VALUES, lenient=True
    )
    name = "tokenizer_config.json"
    config = parse_object(files.get(name, b"{}"), name, max_bytes=_MAX_BYTES, max_values=_MAX_VALUES, lenient=True)
    model = data.get("model") or {}
    if model.get("type") != "BPE":
        raise UnsupportedError(
            f"tokenizer.json: model: expected BPE for a GGUF file, got {show(model.get('type'))}", param="model"
        )
    texts, types = _tokens(data, model, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
    if model.get("byte_fallback"):
        result = _sentencepiece(data, model, texts, merges)
    else:
        result = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre_tokenizer_name(data, "tokenizer.json"),
            "tokenizer.ggml.merges": merges,
        }
    result |= {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types}
    ids = {text: token for token, text in enumerate(texts)}
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for role, key in roles.items():
        text = config.get(role)
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text in ids:
            result[f"tokenizer.ggml.{key}_token_id"] = ids[text]
    around = _added_around(data)
    for key, role in (("bos", "bos_token"), ("eos", "eos_token")):
        text = config.get(role)
        text = text.get("content") if isinstance(text, dict) else text
        result[f"tokenizer.ggml.add_{key}_token"] = text in around
    return result | _template(files)


def _tokens(data: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of every token; rows of the embedding without a token get a text that is unused."""
    texts = [f"[PAD{token}]" for token in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    unknown = model.get("unk_token")
    for text, token in (model.get("vocab") or {}).items():
        is_byte = model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        texts[token] = text
        types[token] = int(TokenType.BYTE if is_byte else TokenType.NORMAL)
    for added in data.get("added_tokens") or []:
        text, token = added["content"], added["id"]
        if token >= vocab_size:  # a token that no file trained: the embedding has no row for it
            continue
        kind = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
        texts[token] = text
        types[token] = int(TokenType.UNKNOWN if text == unknown else kind)
    return texts, types


def _sentencepiece(
    data: Mapping[str, Any], model: Mapping[str, Any], texts: list[str], merges: list[str]
) -> dict[str, Any]:
    """Return the keys of a tokenizer whose pieces have scores: earlier merges have higher ones."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ", 1)) if " " in merge else merge, rank)
    normalizer = data.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    has_prefix = any(step.get("type") == "Prepend" and step.get("prepend") == _SPACE_MARK for step in steps)
    pre = data.get("pre_tokenizer") or {}
    if pre.get("type") == "Metaspace":
        has_prefix = pre.get("prepend_scheme", "always") != "never"
    elif pre:
        raise UnsupportedError(
            f"tokenizer.json: pre_tokenizer: expected none or Metaspace for a GGUF file, got {show(pre.get('type'))}",
            param="pre_tokenizer",
        )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(ranks.get(text, len(merges))) for text in texts],
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }


def _added_around(data: Mapping[str, Any]) -> set[str]:
    """Return the special tokens that the post-processor adds to a text."""
    processor = data.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    return {
        piece["SpecialToken"]["id"]
        for step in steps
        if step.get("type") == "TemplateProcessing"
        for piece in step.get("single", [])
        if "SpecialToken" in piece
    }


def _template(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the chat template, or all of them by their names."""
    return {
        "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): template
        for name, template in read_chat_templates(files).items()
    }
