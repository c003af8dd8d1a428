"""The compiled tokenizer of a bundle: text to ids and back in the native core, without the ``tokenizers`` library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from penstock.core.context import Handle, address_of
from penstock.core.library import TokenizerInfoStruct, check, library, sized
from penstock.core.native import Model
from penstock.errors import InvalidArgumentError, PenstockError

__all__ = ["TOKENIZER_SEGMENT", "NativeTextStream", "NativeTokenizer", "TokenizerInfo"]

TOKENIZER_SEGMENT: Final = "tokenizer.bin"
"""The name of the segment that holds the compiled tokenizer."""

_ADD_SPECIAL, _PARSE_SPECIAL = 1, 2
_SKIP_SPECIAL, _PARTIAL = 1, 2


@dataclass(frozen=True)
class TokenizerInfo:
    """The description of a tokenizer.

    Ids are below ``num_tokens``; -1 means that there is none.  Any of ``eos_ids`` ends a text.  ``unsupported`` is the
    reason why it cannot encode and decode, "" when it can.
    """

    num_tokens: int
    bos_id: int
    pad_id: int
    unk_id: int
    eos_ids: tuple[int, ...]
    kind: str
    unsupported: str


class NativeTokenizer(Handle):
    """The tokenizer of a model.  Any number of threads may use it.

    Raises UnsupportedError for a bundle without one.
    """

    _destroy = "ps_tokenizer_close"
    _data: bytes | None = None  # keeps the memory of the tables alive when they are not part of a model

    def __init__(self, model: Model) -> None:
        out = ctypes.c_void_p()
        check(library().ps_tokenizer_open(model.handle, ctypes.byref(out)))
        super().__init__(address_of(out))

    @classmethod
    def of_segment(cls, data: bytes) -> NativeTokenizer:
        """Return the tokenizer of a segment ``tokenizer.bin``, used in place.  Raises the errors of the constructor."""
        tokenizer, out = cls.__new__(cls), ctypes.c_void_p()
        try:
            check(library().ps_tokenizer_open_data(data, len(data), ctypes.byref(out)))
        except PenstockError as error:
            raise error.with_message(f"{TOKENIZER_SEGMENT}: {error}") from None
        Handle.__init__(tokenizer, address_of(out))
        tokenizer._data = data
        return tokenizer

    @property
    def info(self) -> TokenizerInfo:
        """The special ids, and whether the core can encode and decode."""
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
        """True if tokens are sequences of bytes, which may end inside a UTF-8 character."""
        return self.info.kind == "byte-level BPE"

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        ``add_special_tokens`` adds the tokens that the tokenizer puts around a text.  ``parse_special_tokens`` turns
        special tokens that are written in the text into their ids.  Raises UnsupportedError, naming the component, when
        the core cannot encode.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"text: found half a surrogate pair at character {error.start}", param="text"
            ) from error
        flags = _ADD_SPECIAL * add_special_tokens | _PARSE_SPECIAL * parse_special_tokens
        count, capacity = ctypes.c_int64(), len(data) + 16
        while True:
            ids = np.empty(capacity, np.int32)
            at = (self.handle, data, len(data), flags, ids.ctypes.data, capacity)
            check(library().ps_tokenizer_encode(*at, ctypes.byref(count)))
            if count.value <= capacity:
                token_ids: list[int] = ids[: count.value].tolist()
                return token_ids
            capacity = count.value

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.  An id without a token adds no text."""
        try:
            array = np.array(ids, np.int32)
        except OverflowError as error:
            raise InvalidArgumentError("ids: expected 32-bit integers", param="ids") from error
        return self._decode(array, _SKIP_SPECIAL * skip_special_tokens, 0)[0]

    def decode_each(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists]

    def longest_token(self) -> int:
        """Return the length of the longest token in bytes, which is at least its length in characters."""
        return int(np.diff(np.asarray(self._tokens[0])).max(initial=1))

    @cached_property
    def _tokens(self) -> tuple[memoryview, memoryview, memoryview]:
        """The offset of each token, the bytes of all tokens, and the flags of each token."""
        begins, text, flags = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        size, count = ctypes.c_int64(), ctypes.c_int32()
        out = (ctypes.byref(result) for result in (begins, text, size, flags, count))
        check(library().ps_tokenizer_tokens(self.handle, *out))
        if count.value == 0:
            return memoryview(b"").cast("I"), memoryview(b""), memoryview(b"")
        places = self._view(begins.value or 0, 4 * (count.value + 1)).cast("I")
        return places, self._view(text.value or 0, size.value), self._view(flags.value or 0, count.value)

    def token(self, token: int) -> tuple[bytes, bool]:
        """Return the bytes that one id decodes to, and whether it is special.

        The bytes may be part of a character.  An id without a token gives no bytes.
        """
        begins, text, flags = self._tokens
        if not 0 <= token < len(flags):
            return b"", False
        return bytes(text[begins[token] : begins[token + 1]]), bool(flags[token] & 1)

    def vocabulary(self) -> tuple[list[bytes], list[int]]:
        """Return the bytes of each token by its id, and the ids of special tokens."""
        begins, text, flags = (bytes(view) for view in self._tokens)
        ends = np.frombuffer(begins, np.uint32).tolist()
        specials = np.flatnonzero(np.frombuffer(flags, np.uint8) & 1).tolist()
        return [text[start:end] for start, end in pairwise(ends)], specials

    def stream(self, *, skip_special_tokens: bool = True) -> NativeTextStream:
        """Return a stream that decodes id by id."""
        return NativeTextStream(self, skip_special_tokens)

    def _decode(self, ids: np.ndarray[tuple[int], np.dtype[np.int32]], flags: int, begin: int) -> tuple[str, int]:
        """Return the text of the ids from ``begin`` on, and how many ids are decoded."""
        size, moved, capacity = ctypes.c_int64(), ctypes.c_int64(begin), 16 * (len(ids) - begin) + 64
        while True:
            text = ctypes.create_string_buffer(capacity)
            at = (self.handle, ids.ctypes.data, len(ids), flags, ctypes.byref(moved), text, capacity)
            check(library().ps_tokenizer_decode(*at, ctypes.byref(size)))
            if size.value <= capacity:
                return text.raw[: size.value].decode(), moved.value
            capacity = size.value


class NativeTextStream:
    """An incremental decoder.  It returns only text that no later id can change; joined, this is ``decode`` of all."""

    def __init__(self, tokenizer: NativeTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._flags = _SKIP_SPECIAL * skip_special_tokens
        self._ids: list[int] = []
        self._begin = 0

    def push(self, token: int) -> str:
        """Add an id and return the text that it completes: often that of one token, sometimes none."""
        self._ids.append(token)
        return self._take(_PARTIAL)

    def flush(self) -> str:
        """Return the text that is left at the end."""
        return self._take(0)

    def _take(self, partial: int) -> str:
        text, end = self._tokenizer._decode(np.array(self._ids, np.int32), self._flags | partial, self._begin)
        if end > 1:  # keep one decoded id, which tells the core that the text has begun
            del self._ids[: end - 1]
            end = 1
        self._begin = end
        return text


Tokenizer = NativeTokenizer
"""The name that earlier versions document."""
