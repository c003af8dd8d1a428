"""The tokenizer.json of GGUF's tokenizer models ``bert`` (WordPiece) and ``t5`` (Unigram)."""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np

from penstock.checkpoint.bert_vocab import wordpiece_tokenizer
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.vocab import TokenType, Vocab
from penstock.config import show
from penstock.errors import InvalidFileError

__all__ = ["unigram", "word_piece"]

_SPACE_MARK: Final = "\u2581"


def word_piece(metadata: Metadata, vocab: Vocab) -> dict[str, Any]:
    """Return the tokenizer.json of a file whose tokens that begin a word are marked; others continue one.

    The form of the tokens is that of llama.cpp's conversion: ``[...]`` as they are, ``##x`` as ``x``, ``x`` as
    ``\u2581x``.  Raises InvalidFileError for a file without the tokens that surround a text.
    """
    texts = [_plain(text) for text in vocab.texts]
    tokens = {text: token for token, text in enumerate(texts)}
    if len(tokens) != len(texts):
        raise InvalidFileError(
            f"{metadata.file}: tokenizer.ggml.tokens: two tokens have the same text", param="tokenizer.ggml.tokens"
        )
    around = []
    for names in (("cls", "bos"), ("seperator", "eos")):  # the key is spelled so
        token = next((token for name in names if (token := vocab.id_of(name)) is not None), None)
        if token is None:
            raise metadata.error(f"tokenizer.ggml.{names[0]}_token_id", "a token")
        around.append(texts[token])
    unknown = vocab.id_of("unknown")
    if unknown is None:
        raise metadata.error("tokenizer.ggml.unknown_token_id", "a token")
    lowercase = metadata.flag("tokenizer.ggml.normalizer.lowercase", True)
    specials = [text for text, kind in zip(texts, vocab.types, strict=True) if kind == TokenType.CONTROL]
    return wordpiece_tokenizer(tokens, specials, texts[unknown], (around[0], around[1])) | {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": metadata.flag("tokenizer.ggml.normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        }
    }


def _plain(text: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        return text
    return text[1:] if text.startswith(_SPACE_MARK) else "##" + text


def unigram(metadata: Metadata, vocab: Vocab) -> dict[str, Any]:
    """Return the tokenizer.json of SentencePiece's Unigram, with its character map if the file has one."""
    scores = metadata.numbers("tokenizer.ggml.scores", len(vocab.texts))
    if scores is None:
        raise metadata.error("tokenizer.ggml.scores", "an array of numbers")
    lowest = min((s for s, kind in zip(scores, vocab.types, strict=True) if kind == TokenType.NORMAL), default=0.0)
    steps: list[dict[str, Any]] = []
    charsmap = metadata.values.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None:
        if not isinstance(charsmap, np.ndarray) or charsmap.dtype.itemsize != 1 or len(charsmap) < 4:
            raise metadata.error("tokenizer.ggml.precompiled_charsmap", "an array of bytes")
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap.tobytes()).decode()})
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    unknown = vocab.id_of("unknown")
    if unknown is None:
        unknown_tokens = [token for token, kind in enumerate(vocab.types) if kind == TokenType.UNKNOWN]
        if not unknown_tokens:
            raise InvalidFileError(
                f"{metadata.file}: tokenizer.ggml.unknown_token_id: expected a token, got {show(None)}",
                param="tokenizer.ggml.unknown_token_id",
            )
        unknown = unknown_tokens[0]
    metaspace = {
        "type": "Metaspace",
        "replacement": _SPACE_MARK,
        "prepend_scheme": "always" if metadata.flag("tokenizer.ggml.add_space_prefix", True) else "never",
        "split": True,
    }
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "byte_fallback": TokenType.BYTE in vocab.types,
            "vocab": [
                [text, _score(score, kind, lowest)]
                for text, score, kind in zip(vocab.texts, scores, vocab.types, strict=True)
            ],
        },
    }


def _score(score: float, kind: int, lowest: float) -> float:
    """Return a score that leaves the lowest of the normal tokens the lowest: unknown characters have one below it."""
    if kind == TokenType.NORMAL:
        return score
    return lowest if kind in (TokenType.UNUSED, TokenType.BYTE) else 0.0
