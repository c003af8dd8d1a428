"""Log-probabilities in the formats of OpenAI's two completion routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.engine.logprobs import TokenLogprobs
    from penstock.text.tokenizer import Tokenizer

__all__ = ["ChatLogprobsBuilder", "TextLogprobsBuilder", "joined"]

LEAST: Final = -9999.0
"""The log-probability of an impossible token, as in OpenAI's API, because JSON has no infinity."""
_BYTE_TOKEN: Final = re.compile(rb"<0x([0-9A-F]{2})>")
"""A token of a vocabulary of pieces of text that stands for one byte."""


def _id_name(token: int) -> str:
    """Return the name that vLLM gives a token instead of its text."""
    return f"token_id:{token}"


def _bytes_of(tokenizer: Tokenizer, token: int, text: str) -> bytes:
    """Return the bytes of a token with this text, also if they are only a part of a character."""
    data = tokenizer.token_bytes(token) if "\ufffd" in text else b""
    byte = _BYTE_TOKEN.fullmatch(data)
    return bytes([int(byte[1], 16)]) if byte else data or text.encode()


def _escaped(data: bytes) -> str:
    """Return OpenAI's name of a token that is not text: printable ASCII as it is, other bytes as ``\\x..``."""
    return "bytes:" + "".join(chr(i) if 32 <= i < 127 and chr(i) != "\\" else f"\\x{i:02x}" for i in data)


class ChatLogprobsBuilder:
    """Creates the entries of ``choices[].logprobs.content``.

    ``uses_ids``: tokens are written as ``token_id:N`` instead of their texts.
    """

    def __init__(self, tokenizer: Tokenizer, uses_ids: bool = False) -> None:
        self._tokenizer, self._uses_ids = tokenizer, uses_ids

    def of(self, listed: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the entries of tokens."""
        content = [
            {**self._entry(entry.token_id, entry.logprob), "top_logprobs": [self._entry(*pair) for pair in entry.top]}
            for entry in listed
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        data = _bytes_of(self._tokenizer, token, text)
        name = _id_name(token) if self._uses_ids else text
        return {"token": name, "logprob": max(logprob, LEAST), "bytes": list(data)}


class TextLogprobsBuilder:
    """Creates ``choices[].logprobs`` of a growing text; offsets count characters from its beginning.

    ``num_chars``: the length of the echoed prompt before the answer.  ``uses_ids``: tokens are written as
    ``token_id:N`` instead of their texts.

    Tokens are keys of ``top_logprobs``, so at each position every token has its own name: its text; its bytes, if they
    are not text; its id, if a likelier token has the same text.
    """

    def __init__(self, tokenizer: Tokenizer, num_chars: int = 0, uses_ids: bool = False) -> None:
        self._tokenizer, self._uses_ids = tokenizer, uses_ids
        self._detokenizer = tokenizer.detokenizer()
        self._offset = num_chars

    def prompt(self, ids: Sequence[int], listed: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return the log-probabilities of an echoed prompt."""
        before = TextLogprobsBuilder(self._tokenizer, uses_ids=self._uses_ids)
        columns = before.of(ids, listed)
        return columns | {"text_offset": [min(offset, self._offset) for offset in columns["text_offset"]]}

    def of(self, ids: Sequence[int], listed: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens."""
        offsets, tokens, tops = [], [], []
        for token, entry in zip(ids, listed, strict=True):
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token))
            names = self._names([*(other for other, _ in entry.top), token] if entry is not None else [token])
            tokens.append(names[token])
            tops.append(None if entry is None else {names[other]: max(value, LEAST) for other, value in entry.top})
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else max(entry.logprob, LEAST) for entry in listed],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _names(self, tokens: Sequence[int]) -> dict[int, str]:
        """Return a different name for each token; the first one with a text has it."""
        names: dict[int, str] = {}
        for token in dict.fromkeys(tokens):
            name = self._name(token)
            names[token] = _id_name(token) if name in names.values() else name
        return names

    def _name(self, token: int) -> str:
        if self._uses_ids:
            return _id_name(token)
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        data = _bytes_of(self._tokenizer, token, text)
        return text if data == text.encode() else _escaped(data)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate several ``logprobs`` objects."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]} if parts else {}
