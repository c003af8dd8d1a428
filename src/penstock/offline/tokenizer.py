"""A pipeline's tokenizer: a bundle's own, one of a path, or an object as transformers has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoint.side_files import read_side_files, read_small_file
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.text.detokenizer import Detokenizer, WindowDetokenizer
from penstock.text.tokenizer import Tokenizer

__all__ = ["OtherTokenizer", "open_tokenizer"]


def open_tokenizer(tokenizer: object) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, a folder or a bundle; or one that wraps an object with ``encode(text,
    add_special_tokens=)`` and ``decode(ids, skip_special_tokens=)``.

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
        raise InvalidArgumentError(
            f"tokenizer: expected a path, or an object with encode and decode, found {type(tokenizer).__name__}",
            param="tokenizer",
        )
    return OtherTokenizer(tokenizer)


class OtherTokenizer(Tokenizer):
    """Another library's tokenizer, asked for everything; text comes as it decodes ever longer ends of an answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._other = tokenizer
        self._is_isolated = False
        self._specials = frozenset(int(one) for one in getattr(tokenizer, "all_special_ids", ()))
        self.special_tokens = {}
        template = getattr(tokenizer, "chat_template", None)
        self.chat_template = template if isinstance(template, str) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        if not isinstance(text, str):
            raise InvalidArgumentError(f"text must be a string, not {type(text).__name__}")
        try:
            found = self._other.encode(text, add_special_tokens=add_special_tokens)
            return [int(one) for one in found]
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"tokenizer: encode(text, add_special_tokens=) failed: {error}", param="tokenizer"
            ) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        try:
            found = self._other.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"tokenizer: decode(ids, skip_special_tokens=) failed: {error}", param="tokenizer"
            ) from error
        if not isinstance(found, str):
            raise InvalidFileError(f"tokenizer: decode gave {type(found).__name__}, not text")
        return found

    def decode_each(self, lists: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several lists of token ids, without special tokens."""
        return [self.decode(ids) for ids in lists]

    def close(self) -> None:
        """Nothing to end: the object is the caller's."""

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokenizer."""
        return WindowDetokenizer(self)

    def token_id(self, token: str) -> int | None:
        """The id of a token's text; None when there is no such token."""
        found = self.encode(token, add_special_tokens=False)
        return found[0] if len(found) == 1 else None

    def is_special(self, token: int) -> bool:
        """Whether a token is no text."""
        return token in self._specials

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; nothing for a special one."""
        return b"" if token in self._specials else self.decode([token]).encode("utf-8")
