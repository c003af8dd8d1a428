"""A ``tokenizer.json`` in the ``tokenizers`` library, whose errors and panics become InvalidFileError."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.checkpoint.tokenizer_frames import TextWindow, WindowRequest
from penstock.checkpoint.tokenizer_limits import check_tokenizer_file
from penstock.errors import InvalidFileError, UnsupportedError

if TYPE_CHECKING:
    import tokenizers

__all__ = [
    "BYTE_ALPHABET", "LibraryTokenizer", "byte_level_bytes", "byte_level_texts", "library_errors", "open_checked_file",
    "open_tokenizer_file",
]  # fmt: skip

_SHOWN_CHARS: Final = 200


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    shifted = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): byte for i, byte in enumerate(shifted)}


BYTE_ALPHABET: Final = _byte_alphabet()
"""The byte of each character by which byte-level tokenizers write bytes (GPT-2's table, inverted)."""
_BYTE_OF_CODE: Final = {ord(char): byte for char, byte in BYTE_ALPHABET.items()}
_BYTE_TABLE: Final = np.array([_BYTE_OF_CODE.get(code, -1) for code in range(max(_BYTE_OF_CODE) + 2)], np.int16)
"""The byte of each code point, or -1; the last entry stands for every greater one."""
_NOT_A_BYTE: Final = re.compile(f"[^{re.escape(''.join(BYTE_ALPHABET))}]")


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes that the ByteLevel decoder returns for a token; of an added token its UTF-8 form."""
    if _NOT_A_BYTE.search(token):
        return token.encode()
    return token.translate(_BYTE_OF_CODE).encode("latin-1")


def byte_level_texts(tokens: Sequence[str]) -> list[bytes]:
    """Return ``byte_level_bytes`` of many tokens, without a call for each."""
    if not tokens:
        return []
    codes = np.frombuffer("".join(tokens).encode("utf-32-le"), "<u4")
    values = _BYTE_TABLE[np.minimum(codes, len(_BYTE_TABLE) - 1)]
    ends = np.cumsum(list(map(len, tokens)))
    data, stops = values.astype(np.uint8).tobytes(), ends.tolist()
    texts = [data[begin:end] for begin, end in zip([0, *stops], stops, strict=False)]
    for token in np.unique(np.searchsorted(ends, np.flatnonzero(values < 0), "right")).tolist():
        texts[token] = tokens[token].encode()
    return texts


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn errors of the tokenizers library into InvalidFileError: only a bad file makes it fail on text and ids."""
    try:
        yield
    except BaseException as error:
        # The library is written in Rust; a panic arrives as a BaseException.
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise InvalidFileError(f"tokenizer.json: {_library_message(error)}") from None


def _library_message(error: BaseException) -> str:
    text = str(error)
    if "retry-limit" in text:
        return "a pattern of the normalizer, pre_tokenizer or decoder backtracks too often on this text"
    line = ascii(" ".join(text.split()))[1:-1]
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 3] + "..."


def _refuse_subword_prefix(model: object) -> None:
    """Refuse such a prefix: the library cuts it off merges by bytes, and aborts when it cuts a character in two."""
    if isinstance(model, dict) and model.get("continuing_subword_prefix") and model.get("type") != "WordPiece":
        raise UnsupportedError("tokenizer.json: model: continuing_subword_prefix is not supported", param="model")


def open_tokenizer_file(data: bytes | memoryview) -> tokenizers.Tokenizer:
    """Return the library's tokenizer, without truncation and padding.  Raises InvalidFileError or UnsupportedError.

    The file is untrusted: a serving process opens it through ``TokenizerProcess`` instead.
    """
    return open_checked_file(data, check_tokenizer_file(data))


def open_checked_file(data: bytes | memoryview, values: Mapping[str, object]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of ``data``, whose ``values`` were checked, as ``open_tokenizer_file`` does."""
    import tokenizers

    _refuse_subword_prefix(values.get("model"))
    with library_errors():
        tokenizer = tokenizers.Tokenizer.from_buffer(bytes(data))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class LibraryTokenizer:
    """The library's tokenizer of a ``tokenizer.json``.  ``specials`` are the ids of special tokens."""

    def __init__(self, data: bytes | memoryview) -> None:
        import tokenizers

        self._tokenizer = open_tokenizer_file(data)
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = frozenset(i for i, token in added.items() if token.special)
        self.is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        with library_errors():
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def windows(self, request: WindowRequest) -> list[TextWindow]:
        """Return the windows of a text; none if the limit leaves no room for a token of the text that is cut."""
        tokenizer, text = self._tokenizer, request.text
        if request.max_len:
            num_special = tokenizer.num_special_tokens_to_add(request.pair is not None)
            if request.stride >= request.max_len - num_special * request.add_special_tokens:
                return []
            tokenizer.enable_truncation(request.max_len, stride=request.stride, strategy=request.cut)
        try:
            with library_errors():
                first = tokenizer.encode(
                    text,
                    request.pair,
                    is_pretokenized=not isinstance(text, str),
                    add_special_tokens=request.add_special_tokens,
                )
        except InvalidFileError as error:
            if "too short" in str(error) or "`stride`" in str(error):
                return []
            raise
        finally:
            tokenizer.no_truncation()
        return [_window_of(encoding) for encoding in (first, *(() if request.first_only else first.overflowing))]

    def join_tokens(self, lists: Sequence[Sequence[str]]) -> list[str]:
        """Return the text that the decoder of the file makes of each list of tokens."""
        decoder = self._tokenizer.decoder
        with library_errors():
            return [" ".join(tokens) if decoder is None else str(decoder.decode(list(tokens))) for tokens in lists]

    @property
    def has_subword_prefix(self) -> bool:
        """True if a token inside a word begins with a mark, such as ``##``."""
        return bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        with library_errors():
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if there is none."""
        value = self._tokenizer.token_to_id(token)
        return None if value is None else int(value)

    def token(self, token: int) -> bytes:
        """Return the bytes that an id of a byte-level tokenizer decodes to; no bytes for an unknown id."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        return byte_level_bytes(text)

    def num_tokens(self) -> int:
        """Return the number of ids up to the largest one."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def longest_token(self) -> int:
        """Return the length in characters of the longest token of the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)


def _window_of(encoding: tokenizers.Encoding) -> TextWindow:
    return TextWindow(
        ids=list(encoding.ids),
        tokens=list(encoding.tokens),
        starts=[start for start, _ in encoding.offsets],
        ends=[end for _, end in encoding.offsets],
        words=[-1 if word is None else word for word in encoding.word_ids],
        parts=[-1 if part is None else part for part in encoding.sequence_ids],
        types=list(encoding.type_ids),
        special=list(encoding.special_tokens_mask),
    )
