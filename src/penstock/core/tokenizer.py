"""The tokenizer inside a bundle: text to ids and back in the native core, without the ``tokenizers`` library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from penstock.core.context import Handle, address_of
from penstock.core.library import TokenizerInfoStruct, check, library, sized
from penstock.core.native import Model
from penstock.errors import InvalidArgumentError, PenstockError

__all__ = ["TOKENIZER_SEGMENT", "TextStream", "Tokenizer", "TokenizerInfo"]

TOKENIZER_SEGMENT: Final = "tokenizer.bin"
"""The segment of a bundle that holds the compiled tokenizer."""

_ADD_SPECIAL, _PARSE_SPECIAL = 1, 2
_SKIP_SPECIAL, _PARTIAL = 1, 2


@dataclass(frozen=True)
class TokenizerInfo:
    """Ids are below ``num_tokens``; -1 is none; any of ``eos_ids`` ends a text; ``unsupported`` says why it cannot
    encode and decode, "" where it can."""

    num_tokens: int
    bos_id: int
    pad_id: int
    unk_id: int
    eos_ids: tuple[int, ...]
    kind: str
    unsupported: str


class Tokenizer(Handle):
    """The tokenizer of a model; UnsupportedError for a bundle without one.  Any number of threads may use it."""

    _destroy = "ps_tokenizer_close"
    _data: bytes | None = None  # what the tables are part of, unless a model

    def __init__(self, model: Model) -> None:
        out = ctypes.c_void_p()
        check(library().ps_tokenizer_open(model.handle, ctypes.byref(out)))
        super().__init__(address_of(out))

    @classmethod
    def of_segment(cls, data: bytes) -> Tokenizer:
        """The tokenizer of a bundle's segment ``tokenizer.bin``, used where it lies; the errors of a bundle's own."""
        tokenizer, out = cls.__new__(cls), ctypes.c_void_p()
        try:
            check(library().ps_tokenizer_open_data(data, len(data), ctypes.byref(out)))
        except PenstockError as error:
            raise type(error)(f"{TOKENIZER_SEGMENT}: {error}") from None
        Handle.__init__(tokenizer, address_of(out))
        tokenizer._data = data
        return tokenizer

    @property
    def info(self) -> TokenizerInfo:
        """Its special ids, and whether it can encode and decode."""
        out = sized(TokenizerInfoStruct)
        check(library().ps_tokenizer_describe(self.handle, ctypes.byref(out)))
        return TokenizerInfo(
            num_tokens=out.num_tokens,
            bos_id=out.bos_id,
            pad_id=out.pad_id,
            unk_id=out.unk_id,
            eos_ids=tuple(out.eos_ids[: out.num_eos_ids]),
            kind=out.kind.decode(),
            unsupported=out.unsupported.decode(),
        )

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are bytes, which become characters as UTF-8 allows."""
        return self.info.kind == "byte-level BPE"

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        """Token ids of a text: with the tokens that the tokenizer puts around one, and special tokens that are written
        in it as their ids, unless told otherwise.  UnsupportedError where the core cannot, naming the component."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"text holds half a surrogate pair at character {error.start}") from error
        flags = _ADD_SPECIAL * add_special_tokens | _PARSE_SPECIAL * parse_special_tokens
        count, capacity = ctypes.c_int64(), len(data) + 16
        while True:
            ids = np.empty(capacity, np.int32)
            at = (self.handle, data, len(data), flags, ids.ctypes.data, capacity)
            check(library().ps_tokenizer_encode(*at, ctypes.byref(count)))
            if count.value <= capacity:
                found: list[int] = ids[: count.value].tolist()
                return found
            capacity = count.value

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; an id without a token has none."""
        try:
            array = np.array(ids, np.int32)
        except OverflowError as error:
            raise InvalidArgumentError("ids: expected integers of 32 bits") from error
        return self._decode(array, _SKIP_SPECIAL * skip_special_tokens, 0)[0]

    def decode_each(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """The texts of several lists of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists]

    def longest_token(self) -> int:
        """Bytes of the longest token, which has at most as many characters."""
        return int(np.diff(np.asarray(self._tokens[0])).max(initial=1))

    @cached_property
    def _tokens(self) -> tuple[memoryview, memoryview, memoryview]:
        """Where each token begins, the bytes of them all, their flags."""
        begins, text, flags = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        size, count = ctypes.c_int64(), ctypes.c_int32()
        at = (ctypes.byref(one) for one in (begins, text, size, flags, count))
        check(library().ps_tokenizer_tokens(self.handle, *at))
        if count.value == 0:
            return memoryview(b"").cast("I"), memoryview(b""), memoryview(b"")
        places = self._view(begins.value or 0, 4 * (count.value + 1)).cast("I")
        return places, self._view(text.value or 0, size.value), self._view(flags.value or 0, count.value)

    def token(self, token: int) -> tuple[bytes, bool]:
        """What one id decodes to, part of a character as it may be, and whether it is special; nothing for none."""
        begins, text, flags = self._tokens
        if not 0 <= token < len(flags):
            return b"", False
        return bytes(text[begins[token] : begins[token + 1]]), bool(flags[token] & 1)

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A text that grows id by id."""
        return TextStream(self, skip_special_tokens)

    def _decode(self, ids: np.ndarray[tuple[int], np.dtype[np.int32]], flags: int, begin: int) -> tuple[str, int]:
        """The text of the ids from ``begin`` on, and how many ids have been given out."""
        size, moved, capacity = ctypes.c_int64(), ctypes.c_int64(begin), 16 * (len(ids) - begin) + 64
        while True:
            text = ctypes.create_string_buffer(capacity)
            at = (self.handle, ids.ctypes.data, len(ids), flags, ctypes.byref(moved), text, capacity)
            check(library().ps_tokenizer_decode(*at, ctypes.byref(size)))
            if size.value <= capacity:
                return text.raw[: size.value].decode(), moved.value
            capacity = size.value


class TextStream:
    """Ids in, text out that no later id can change: the pieces make up ``decode`` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._flags = _SKIP_SPECIAL * skip_special_tokens
        self._ids: list[int] = []
        self._begin = 0

    def push(self, token: int) -> str:
        """Text that this id completes; often one token's, sometimes nothing yet."""
        self._ids.append(token)
        return self._take(_PARTIAL)

    def flush(self) -> str:
        """What is left at the end."""
        return self._take(0)

    def _take(self, partial: int) -> str:
        text, end = self._tokenizer._decode(np.array(self._ids, np.int32), self._flags | partial, self._begin)
        if end > 1:  # of what has been given out one id stays, which says that the text has begun
            del self._ids[: end - 1]
            end = 1
        self._begin = end
        return text
