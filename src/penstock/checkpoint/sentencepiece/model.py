"""Read a SentencePiece model: the protobuf message ModelProto of ``tokenizer.model``.

The wire format is that of https://protobuf.dev/programming-guides/encoding/, the fields those of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.  The file is untrusted: sizes and
counts are bounded, every access is checked, and messages are read in a loop, not by recursion.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.checkpoint.tokenizer_limits import MAX_TOKENIZER_BYTES, MAX_VOCAB
from penstock.config import show
from penstock.errors import InvalidFileError

__all__ = [
    "BPE", "BYTE", "CONTROL", "NORMAL", "UNKNOWN", "USER_DEFINED", "SentencePieceModel", "read_sentencepiece",
]  # fmt: skip

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE: Final = 2
"""The value of ``model_type`` of byte pair encoding; 1 is Unigram."""

MAX_PIECE_CHARS: Final = 128

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES: Final = {_FIXED64: 8, _FIXED32: 4}
_FLOAT: Final = struct.Struct("<f")
Value = int | bytes


@dataclass(frozen=True)
class SentencePieceModel:
    """The vocabulary by id, and the parts of the specification that decide how a text becomes pieces.

    ``texts``, ``scores`` and ``kinds`` (NORMAL to BYTE) have the same length.  ``charsmap`` is the compiled
    normalisation, empty for none.  ``file``: the name of the file, for errors.
    """

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    model_type: int = 1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    treat_whitespace_as_suffix: bool = False
    file: str = "tokenizer.model"


class _DamageError(ValueError):
    """The field of a model that is damaged, without the name of the file."""


def read_sentencepiece(data: bytes, file: str = "tokenizer.model") -> SentencePieceModel:
    """Return the model; InvalidFileError says what is damaged, and names ``file``."""
    try:
        return replace(_read_model(data), file=file)
    except _DamageError as error:
        raise InvalidFileError(f"{file}: {error}") from None


def _read_model(data: bytes) -> SentencePieceModel:
    if len(data) > MAX_TOKENIZER_BYTES:
        raise _DamageError(f"expected at most {MAX_TOKENIZER_BYTES} bytes, got {len(data)}")
    texts: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer, normalizer = b"", b""
    for number, value in _fields(data):
        if number == 1:
            text, score, kind = _read_piece(_message(value, "pieces"), len(texts))
            texts.append(text)
            scores.append(score)
            kinds.append(kind)
            if len(texts) > MAX_VOCAB:
                raise _DamageError(f"pieces: expected at most {MAX_VOCAB}, got more")
        elif number == 2:
            trainer += _message(value, "trainer_spec")  # parts of a message that is there twice are merged
        elif number == 3:
            normalizer += _message(value, "normalizer_spec")
    if not texts:
        raise _DamageError("pieces: expected at least one, got none")
    if len(set(texts)) != len(texts):
        raise _DamageError("pieces: two have the same text")
    training, normalizing = dict(_fields(trainer)), dict(_fields(normalizer))
    return SentencePieceModel(
        texts,
        scores,
        kinds,
        model_type=_integer(training, 3, 1, "model_type"),
        charsmap=_message(normalizing.get(2, b""), "precompiled_charsmap"),
        add_dummy_prefix=bool(_integer(normalizing, 3, 1, "add_dummy_prefix")),
        remove_extra_whitespaces=bool(_integer(normalizing, 4, 1, "remove_extra_whitespaces")),
        escape_whitespaces=bool(_integer(normalizing, 5, 1, "escape_whitespaces")),
        treat_whitespace_as_suffix=bool(_integer(training, 24, 0, "treat_whitespace_as_suffix")),
    )


def _read_piece(data: bytes, token: int) -> tuple[str, float, int]:
    """Return the text, the score and the kind of a piece."""
    fields = dict(_fields(data))
    try:
        text = _message(fields.get(1, b""), "piece").decode()
    except UnicodeDecodeError:
        raise _DamageError(f"pieces: expected UTF-8 in token {token}") from None
    if not 0 < len(text) <= MAX_PIECE_CHARS:
        raise _DamageError(f"pieces: expected 1 to {MAX_PIECE_CHARS} characters, got token {token} of {len(text)}")
    stored = fields.get(2, b"\0\0\0\0")
    if not isinstance(stored, bytes) or len(stored) != 4:
        raise _DamageError(f"score: expected 32 bits in token {token}, got {show(stored)}")
    score = float(_FLOAT.unpack(stored)[0])
    kind = _integer(fields, 3, NORMAL, "type")
    if not math.isfinite(score) or not NORMAL <= kind <= BYTE:
        raise _DamageError(
            f"pieces: expected a finite score and a type from 1 to 6 in token {token}, got {score}, {kind}"
        )
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of each field of a message: an integer, or the bytes of what is no varint."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0 or kind not in (_VARINT, _FIXED64, _BYTES, _FIXED32):
            raise _DamageError(f"expected a field, got key {key}")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        size, at = _varint(data, at) if kind == _BYTES else (_SIZES[kind], at)
        if size > end - at:
            raise _DamageError(f"field {number}: expected {size} bytes, got {end - at}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at a place, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _DamageError("expected an integer, got the end of the message")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise _DamageError("expected an integer of at most 10 bytes, got a longer one")


def _message(value: Value, name: str) -> bytes:
    if not isinstance(value, bytes):
        raise _DamageError(f"{name}: expected bytes, got the integer {value}")
    return value


def _integer(fields: dict[int, Value], number: int, default: int, name: str) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise _DamageError(f"{name}: expected an integer, got {len(value)} bytes")
    return value
