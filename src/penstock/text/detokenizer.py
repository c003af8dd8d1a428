"""Incremental detokenizers: tokens in, finished text out.

Text is returned only when no later token can change it, so the concatenation of all pieces is the text of the tokens,
however its characters are split over tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final, Protocol

__all__ = ["ByteDetokenizer", "Detokenizer", "TokenDecoder", "WindowDetokenizer"]

REPLACEMENT: Final = "\ufffd"
MAX_PENDING_TOKENS: Final = 16


class TokenDecoder(Protocol):
    """The interface that a detokenizer needs from a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""

    def decode_each(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids."""

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes that a token stands for."""


class Detokenizer(Protocol):
    """Turns a stream of tokens into text."""

    def push(self, token: int) -> str:
        """Return the text that this token completes; "" if a later token can still change it."""

    def flush(self) -> str:
        """Return the rest at the end.  A character that was cut short becomes the replacement character."""


class ByteDetokenizer:
    """A detokenizer for byte-level tokenizers, whose tokens are bytes.  It decodes the bytes as UTF-8."""

    def __init__(self, tokenizer: TokenDecoder, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token, skip_special_tokens=self._skips))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """A detokenizer for other tokenizers.  It decodes the last finished piece with the new tokens.

    The last piece stays in the window, because a decoder may treat the first token of a text differently (the space in
    front of a word).  Text that ends in the replacement character may be half a character and is held back.
    """

    def __init__(self, tokenizer: TokenDecoder, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._shown: list[int] = []
        self._pending: list[int] = []

    def _new_text(self) -> str:
        lists = [self._shown, self._shown + self._pending]
        before, after = self._tokenizer.decode_each(lists, skip_special_tokens=self._skips)
        if after.startswith(before):
            return after[len(before) :]
        # An invalid byte made the decoder replace the bytes beside it as well.
        return self._tokenizer.decode(self._pending, skip_special_tokens=self._skips)

    def push(self, token: int) -> str:
        self._pending.append(token)
        text = self._new_text()
        if not text or (text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        text = self._new_text() if self._pending else ""
        self._pending = []
        return text
