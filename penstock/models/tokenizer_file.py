"""A ``tokenizer.json`` through the ``tokenizers`` library, whose failures and faults stay errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.config import parse_object
from penstock.errors import InvalidFileError, UnsupportedError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["BYTE_ALPHABET", "library_errors", "open_tokenizer_file"]

_SUBWORD_PREFIX: Final = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
_ESCAPED_ASCII: Final = re.compile(rb"\\u00[2-7]")


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    shifted = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): byte for i, byte in enumerate(shifted)}


BYTE_ALPHABET: Final = _byte_alphabet()
"""The character that byte-level tokenizers write for each byte (GPT-2's table), inverted."""


@contextmanager
def library_errors() -> Iterator[None]:
    """What the tokenizers library raises, as InvalidFileError: only a damaged file makes it fail on text and ids."""
    try:
        yield
    except BaseException as error:
        # The library is Rust: a panic arrives as a BaseException of its own.
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise InvalidFileError(f"tokenizer.json: {error}") from error


def _refuse_subword_prefix(data: bytes) -> None:
    """The library cuts such a prefix off merges by bytes, and ends the process when it cuts a character in two.

    The whole file is parsed only when the key may be there, with a value or behind escapes.
    """
    if not _SUBWORD_PREFIX.search(data) and not (b"\\u00" in data and _ESCAPED_ASCII.search(data)):
        return
    model = parse_object(data, "tokenizer.json", max_bytes=len(data)).get("model")
    if isinstance(model, dict) and model.get("continuing_subword_prefix") and model.get("type") != "WordPiece":
        raise UnsupportedError("tokenizer.json: model: continuing_subword_prefix is not supported")


def open_tokenizer_file(data: bytes | memoryview) -> tokenizers.Tokenizer:
    """The library's tokenizer, which neither truncates nor pads.  Raises InvalidFileError or UnsupportedError."""
    import tokenizers

    data = bytes(data)
    _refuse_subword_prefix(data)
    with library_errors():
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
