"""The tokenizer of a pipeline: the bundle's own, one from a path, or an object like those of transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoint.side_files import read_side_files, read_small_file
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.text.detokenizer import Detokenizer, WindowDetokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.validation import wrong_type

__all__ = ["OtherTokenizer", "open_tokenizer"]


def open_tokenizer(tokenizer: object) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``, a folder or a bundle, or wrap a tokenizer object.

    The object has ``encode(text, add_special_tokens=)`` and ``decode(ids, skip_special_tokens=)``.
    InvalidArgumentError for anything else; the errors of ``Tokenizer`` for a path.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, (str, os.PathLike)):
        path = Path(tokenizer)
        if path.suffix == ".json" and path.is_file():
            return Tokenizer({"tokenizer.json": read_small_file(path)})
        return Tokenizer(read_side_files(path))
    if not callable(getattr(tokenizer, "encode", None)) or not callable(getattr(tokenizer, "decode", None)):
        raise wrong_type("tokenizer", "a path, or an object with encode and decode", tokenizer)
    return OtherTokenizer(tokenizer)


class OtherTokenizer(Tokenizer):
    """Wraps another library's tokenizer.  Streamed text is found by decoding ever longer ends of an answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._other = tokenizer
        self._is_isolated = False
        self._specials = frozenset(int(token) for token in getattr(tokenizer, "all_special_ids", ()))
        self.special_tokens = {}
        template = getattr(tokenizer, "chat_template", None)
        named = {"default": template} if isinstance(template, str) else template
        self.chat_templates, self._template_damage = dict(named) if isinstance(named, dict) else {}, ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        if not isinstance(text, str):
            raise wrong_type("text", "a string", text)
        try:
            ids = self._other.encode(text, add_special_tokens=add_special_tokens)
            return [int(token) for token in ids]
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"tokenizer: encode(text, add_special_tokens=) failed: {error}", param="tokenizer"
            ) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        try:
            text = self._other.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"tokenizer: decode(ids, skip_special_tokens=) failed: {error}", param="tokenizer"
            ) from error
        if not isinstance(text, str):
            raise InvalidFileError(
                f"tokenizer: decode returned {type(text).__name__} instead of a string", param="tokenizer"
            )
        return text

    def decode_each(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the texts of several lists of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists]

    def close(self) -> None:
        """Do nothing: the caller owns the wrapped object."""

    def detokenizer(self, *, skip_special_tokens: bool = True, keeps_bytes: bool = False) -> Detokenizer:
        """Return a new incremental detokenizer."""
        return WindowDetokenizer(self, skip_special_tokens=skip_special_tokens)

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the id of each of the texts that is one special token."""
        ids = {text: self.token_id(text) for text in texts}
        return {text: token for text, token in ids.items() if token is not None and token in self._specials}

    def token_id(self, token: str) -> int | None:
        """Return the id of a token's text; None if it is not a single token."""
        ids = self.encode(token, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    def is_special(self, token: int) -> bool:
        """Return True if a token is special, so that it has no text."""
        return token in self._specials

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes of a token's text; by default empty for a special token."""
        if token in self._specials and skip_special_tokens:
            return b""
        return self.decode([token], skip_special_tokens=skip_special_tokens).encode("utf-8")
