"""The tokens of a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Collection
from enum import IntEnum
from typing import Any, Final

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.tokenizer_limits import MAX_TOKEN_CHARS
from penstock.config import show
from penstock.errors import InvalidFileError

__all__ = ["TokenType", "Vocab"]

_LOG: Final = logging.getLogger("penstock.tokenizer_files")
_ROLES: Final = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
_END_TEXTS: Final = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<turn|>", "<|tool_response>",
))  # fmt: skip
"""Control tokens that end a text in every model that has them: a GGUF file names only some of its end tokens."""


def _with_texts(texts: list[str], file: str) -> list[str]:
    """Return the texts, with one for each token that has none, as llama.cpp names it."""
    if all(texts):
        return texts
    empty = [token for token, text in enumerate(texts) if not text]
    _LOG.warning("penstock: %s: tokenizer.ggml.tokens: %d tokens have no text, first %d", file, len(empty), empty[0])
    return [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]


class TokenType(IntEnum):
    """The values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocab:
    """The tokens: ``texts`` and ``types`` by id, ``ids`` by text, ``roles`` of special tokens."""

    def __init__(self, metadata: Metadata, vocab_size: int) -> None:
        self.metadata = metadata
        self.texts = _with_texts(metadata.texts("tokenizer.ggml.tokens"), metadata.file)
        if len(self.texts) > vocab_size:
            raise metadata.error("tokenizer.ggml.tokens", f"at most {vocab_size} tokens, as the embedding has rows")
        types = metadata.integers("tokenizer.ggml.token_type", len(self.texts))
        self.types = [TokenType.NORMAL] * len(self.texts) if types is None else types
        self.ids = dict(zip(self.texts, range(len(self.texts)), strict=True))
        self._named: dict[str, int | None] = {}
        if len(self.ids) < len(self.texts):
            twice = next(text for token, text in enumerate(self.texts) if self.ids[text] != token)
            raise InvalidFileError(
                f"{metadata.file}: tokenizer.ggml.tokens: {show(twice)} is there twice", param="tokenizer.ggml.tokens"
            )
        length = max(map(len, self.texts), default=0)
        if length > MAX_TOKEN_CHARS:
            token = next(token for token, text in enumerate(self.texts) if len(text) == length)
            raise InvalidFileError(
                f"{metadata.file}: tokenizer.ggml.tokens: expected up to {MAX_TOKEN_CHARS} characters, got token "
                f"{token} of {length}",
                param="tokenizer.ggml.tokens",
            )
        self.roles = {}
        for role, key in _ROLES:
            token_id = self.id_of(key)
            if token_id is not None:
                self.roles[role] = token_id

    def id_of(self, name: str) -> int | None:
        """Return the token that ``tokenizer.ggml.NAME_token_id`` names, or None.

        An id that no token has, such as -1 or 4294967295, counts as missing, as in llama.cpp, with a warning.
        """
        if name not in self._named:
            self._named[name] = self._read_id(f"tokenizer.ggml.{name}_token_id")
        return self._named[name]

    def _read_id(self, key: str) -> int | None:
        token = self.metadata.values.get(key)
        if token is None:
            return None
        if type(token) is not int:
            raise self.metadata.error(key, "an integer")
        if 0 <= token < len(self.texts):
            return token
        _LOG.warning(
            "penstock: %s: %s: there is no token %s, so the key has no effect", self.metadata.file, key, show(token)
        )
        return None

    def added_tokens(self, keep_space: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Return the tokens that are found in a text before it is split: control tokens and those of the user.

        ``keep_space``: control tokens that leave the white space behind them in the text, where others take it; None
        is all of them.
        """
        kinds = {int(kind) for kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)}
        added = [token for token, kind in enumerate(self.types) if kind in kinds]
        return [
            {
                "id": token,
                "content": self.texts[token],
                "single_word": False,
                "lstrip": False,
                "rstrip": (
                    self.types[token] == TokenType.CONTROL
                    and keep_space is not None
                    and self.texts[token] not in keep_space
                ),
                "normalized": False,
                "special": self.types[token] != TokenType.USER_DEFINED,
            }
            for token in added
        ]

    def end_tokens(self) -> list[int]:
        """Return the tokens that end a text, that of the file first."""
        named = [token for token in map(self.id_of, ("eos", "eot", "eom")) if token is not None]
        known = [self.ids[text] for text in sorted(_END_TEXTS) if text in self.ids]
        return list(dict.fromkeys([*named, *(token for token in known if self.types[token] == TokenType.CONTROL)]))
