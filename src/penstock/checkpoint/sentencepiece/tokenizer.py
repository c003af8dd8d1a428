"""The ``tokenizer.json`` of a SentencePiece model, in the forms of the tokenizers of Llama, Gemma, T5 and others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from penstock.checkpoint.generation import read_tokenizer_config
from penstock.checkpoint.sentencepiece.merges import merges_by_score
from penstock.checkpoint.sentencepiece.model import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
    read_sentencepiece,
)
from penstock.checkpoint.sentencepiece.steps import SPACE_MARK, decoder_steps, normalizer_steps
from penstock.checkpoint.sentencepiece.unigram import UNIGRAM, UNIGRAM_CLASSES, unigram_tokenizer
from penstock.checkpoint.tokenizer_files.post_processors import NO_POST_PROCESSOR
from penstock.checkpoint.tokenizer_limits import MAX_ADDED_TOKENS, MAX_TOKENIZER_BYTES, check_json_size
from penstock.config import ConfigReader, show
from penstock.errors import InvalidFileError

__all__ = ["sentencepiece_tokenizer"]

_CONFIG: Final = "tokenizer_config.json"
_CLASSES: Final = ("LlamaTokenizer", "CodeLlamaTokenizer")
_GEMMA: Final = "GemmaTokenizer"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def sentencepiece_tokenizer(
    data: bytes, config: bytes, roles: Mapping[str, str] | None = None, file: str = "tokenizer.model"
) -> bytes | None:
    """Return the ``tokenizer.json`` of ``file`` and ``tokenizer_config.json``.

    ``roles``: the texts of the special tokens of a class of Unigram or of Gemma.  None for another class than these and
    Llama's, and for a model of Llama's that changes texts before it splits them or that is no byte pair encoding: their
    conversion needs transformers.  Raises InvalidFileError for a damaged file.
    """
    reader = ConfigReader.parse(check_json_size(config, _CONFIG, MAX_TOKENIZER_BYTES), _CONFIG)
    name = reader.str("tokenizer_class", _CLASSES[0]).removesuffix("Fast")
    if name not in _CLASSES and (roles is None or name not in (_GEMMA, *UNIGRAM_CLASSES)):
        return None
    model = read_sentencepiece(data, file)
    if name in UNIGRAM_CLASSES:
        if model.model_type != UNIGRAM:
            return None
        return json.dumps(unigram_tokenizer(model, name, roles or {}, reader), ensure_ascii=False).encode()
    if model.model_type != BPE:
        return None
    ids = {text: token for token, text in enumerate(model.texts)}
    if name == _GEMMA:
        return json.dumps(_gemma(model, ids, roles or {}), ensure_ascii=False).encode()
    has_rules = bool(model.charsmap) or model.remove_extra_whitespaces or model.treat_whitespace_as_suffix
    marked = [t for t, kind in zip(model.texts, model.kinds, strict=True) if kind == USER_DEFINED and SPACE_MARK in t]
    if has_rules or not model.escape_whitespaces or marked:
        return None
    added = _added_tokens(reader, model, ids)
    tokenizer = _tokenizer(reader, model, ids) | {
        "added_tokens": added,
        "post_processor": _template(config, ids | {token["content"]: token["id"] for token in added}, model.file),
    }
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _tokenizer(reader: ConfigReader, model: SentencePieceModel, ids: dict[str, int]) -> dict[str, Any]:
    """Return the tokenizer without its added tokens.

    A text begins with a space mark, also behind a special token, as in the files that were published for Llama 2.
    ``legacy`` false is transformers' other form: no mark behind a special token, nor before a text that has one.
    """
    has_prefix = reader.bool("add_prefix_space", model.add_dummy_prefix)
    normalizer: dict[str, Any] | None = {"type": "Sequence", "normalizers": normalizer_steps(has_prefix)}
    pre_tokenizer: dict[str, Any] | None = None
    if not reader.bool("legacy", True):
        scheme = "first" if has_prefix else "never"
        normalizer = None
        pre_tokenizer = {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": scheme, "split": False}
    decoders = decoder_steps(has_prefix)
    unknown = next((text for text, kind in zip(model.texts, model.kinds, strict=True) if kind == UNKNOWN), None)
    return {
        "version": "1.0",
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": BYTE in model.kinds,
            "vocab": ids,
            "merges": _merges(model, ids),
        },
    }


def _gemma(model: SentencePieceModel, ids: dict[str, int], roles: Mapping[str, str]) -> dict[str, Any]:
    """Return the tokenizer.json of Gemma: spaces are marked, and none is added before a text."""
    flags = dict.fromkeys(_FLAGS, False)
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": token, "content": text, **flags, "special": kind == CONTROL}
            for token, (text, kind) in enumerate(zip(model.texts, model.kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": normalizer_steps(False)[0],
        "pre_tokenizer": split,
        "post_processor": NO_POST_PROCESSOR,
        "decoder": {"type": "Sequence", "decoders": decoder_steps(False)},
        "model": {
            "type": "BPE",
            "unk_token": roles.get("unk_token"),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": _merges(model, ids),
        },
    }


def _merges(model: SentencePieceModel, ids: dict[str, int]) -> list[list[str]]:
    """Return the merges of the normal pieces."""
    known = zip(model.texts, model.scores, model.kinds, strict=True)
    scores = {text: score for text, score, kind in known if kind == NORMAL}
    return merges_by_score(scores, ids, "pieces", model.file)


def _added_tokens(reader: ConfigReader, model: SentencePieceModel, ids: dict[str, int]) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is split, by id.

    These are the control, unknown and user-defined pieces, and ``added_tokens_decoder`` of tokenizer_config.json.
    """
    added: dict[int, dict[str, Any]] = {}
    for token, (text, kind) in enumerate(zip(model.texts, model.kinds, strict=True)):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            flags = dict.fromkeys(_FLAGS, False) | {"special": kind != USER_DEFINED}
            added[token] = {"id": token, "content": text, **flags}
    section = reader.object("added_tokens_decoder")
    if section is None:
        return list(added.values())
    if len(section.values) > MAX_ADDED_TOKENS:
        raise reader.error("added_tokens_decoder", f"at most {MAX_ADDED_TOKENS} tokens", section.values)
    for key in section.values:
        own = section.object(key)
        if own is None or not key.isdecimal() or len(key) > 9:
            raise reader.error("added_tokens_decoder", "tokens by their id", key)
        token, text = int(key), own.str("content")
        if ids.get(text, token) != token or (token < len(model.texts) and model.texts[token] != text):
            raise reader.error("added_tokens_decoder", f"the ids that {model.file} has", key)
        added[token] = {"id": token, "content": text, **{flag: own.bool(flag, False) for flag in _FLAGS}}
    extra = [token for token in sorted(added) if token >= len(model.texts)]
    if extra != list(range(len(model.texts), len(model.texts) + len(extra))):
        raise reader.error("added_tokens_decoder", f"ids without a gap from {len(model.texts)} on", extra)
    return [added[token] for token in sorted(added)]


def _template(config: bytes, ids: dict[str, int], file: str) -> dict[str, Any] | None:
    """Return the post-processor, which adds the first and the last token; None if it adds neither."""
    read = read_tokenizer_config({_CONFIG: config})
    first: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    second: list[dict[str, Any]] = [{"Sequence": {"id": "B", "type_id": 1}}]
    special = {}
    adds_bos = read.add_bos_token is None or read.add_bos_token
    for role, default, is_added, at in (
        ("bos_token", "<s>", adds_bos, 0),
        ("eos_token", "</s>", read.add_eos_token, 9),
    ):
        text = read.special_tokens.get(role, default)
        if not is_added:
            continue
        if text not in ids:
            raise InvalidFileError(f"{_CONFIG}: {role}: expected a token of {file}, got {show(text)}", param=role)
        for pieces, segment in ((first, 0), (second, 1)):
            pieces.insert(at, {"SpecialToken": {"id": text, "type_id": segment}})
        special[text] = {"id": text, "ids": [ids[text]], "tokens": [text]}
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": first, "pair": [*first, *second], "special_tokens": special}
