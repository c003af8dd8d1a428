"""Log-probabilities in the formats of OpenAI's two completion routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.engine.logprobs import TokenLogprobs
    from penstock.text.tokenizer import Tokenizer

__all__ = ["ChatLogprobs", "TextLogprobs", "joined"]

LEAST: Final = -9999.0
"""The log-probability of an impossible token, as in OpenAI's API, because JSON has no infinity."""


class ChatLogprobs:
    """Creates the entries of ``choices[].logprobs.content``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, listed: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the entries of tokens."""
        content = [
            {**self._entry(entry.token_id, entry.logprob), "top_logprobs": [self._entry(*pair) for pair in entry.top]}
            for entry in listed
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        data = self._tokenizer.token_bytes(token) if "\ufffd" in text else b""
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(data or text.encode())}


class TextLogprobs:
    """Creates ``choices[].logprobs`` of a growing text; offsets count characters from its beginning.

    ``num_chars``: the length of the echoed prompt before the answer.
    """

    def __init__(self, tokenizer: Tokenizer, num_chars: int = 0) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._offset = num_chars

    def prompt(self, ids: Sequence[int], listed: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return the log-probabilities of an echoed prompt."""
        before = TextLogprobs(self._tokenizer)
        columns = before.of(ids, listed)
        return columns | {"text_offset": [min(offset, self._offset) for offset in columns["text_offset"]]}

    def of(self, ids: Sequence[int], listed: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens."""
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token))
        return {
            "tokens": [self._text(token) for token in ids],
            "token_logprobs": [None if entry is None else max(entry.logprob, LEAST) for entry in listed],
            "top_logprobs": [
                None if entry is None else {self._text(i): max(value, LEAST) for i, value in entry.top}
                for entry in listed
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate several ``logprobs`` objects."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]} if parts else {}
