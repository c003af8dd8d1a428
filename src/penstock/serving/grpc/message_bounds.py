"""How many fields a message of a client's may have: two bytes can make a hundred once they are parsed."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["MAX_FIELDS", "MAX_NUMBERS", "BadMessageError", "check_fields"]

MAX_FIELDS: Final = 16_384
MAX_NUMBERS: Final = 1 << 20
"""In packed fields of varints, all together: a byte each on the wire, up to eight once they are parsed in one call."""
_MESSAGE: Final = 11
"""The type of a field that is a message, in a descriptor."""
_VARINTS: Final = frozenset({3, 4, 5, 8, 13, 14, 17, 18})
_GO_ON: Final = bytes(range(128, 256))
"""Bytes of a varint but its last."""
_MAX_DEPTH: Final = 16


class BadMessageError(Exception):
    """Bytes that are no such message, or one of too many fields."""


def check_fields(data: bytes, descriptor: Any) -> None:
    """Refuse a message of more than MAX_FIELDS fields, those of the messages in it included, before it is parsed.

    Packed numbers are one field, and MAX_NUMBERS in all.  Time goes with the fields, of which no more are looked at
    than may be.
    """
    numbers = 0
    left, todo = MAX_FIELDS, [(0, len(data), descriptor, 0)]
    while todo:
        at, end, kind, depth = todo.pop()
        if depth > _MAX_DEPTH:
            raise BadMessageError("the message nests too deep")
        while at < end:
            left -= 1
            if left < 0:
                raise BadMessageError(f"the message has more than {MAX_FIELDS} fields")
            tag = data[at]
            if tag < 128:  # most are a byte
                at += 1
            else:
                tag, at = _varint(data, at, end)
            wire_type = tag & 7
            if wire_type == 0:
                _, at = _varint(data, at, end)
            elif wire_type == 1:
                at += 8
            elif wire_type == 5:
                at += 4
            elif wire_type == 2:
                if at < end and data[at] < 128:
                    size, at = data[at], at + 1
                else:
                    size, at = _varint(data, at, end)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.type in _VARINTS:
                    numbers += len(data[at : min(end, at + size)].translate(None, _GO_ON))
                    if numbers > MAX_NUMBERS:
                        raise BadMessageError(f"the message has more than {MAX_NUMBERS} packed numbers: send them raw")
                if field is not None and field.type == _MESSAGE:
                    if at + size > end:
                        raise _cut_off()
                    todo.append((at, at + size, field.message_type, depth + 1))
                at += size
            else:
                raise BadMessageError("the message has a field of a type that is not known here")
        if at != end:
            raise _cut_off()


def _cut_off() -> BadMessageError:
    """A new one each time: a raised error holds what it went through, the message included."""
    return BadMessageError("the message ends inside of a field")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _cut_off()
