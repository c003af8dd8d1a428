"""Limits on the number of fields of a client's message: two bytes on the wire can become a hundred in memory."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["MAX_FIELDS", "MAX_NUMBERS", "BadMessageError", "check_fields"]

MAX_FIELDS: Final = 16_384
MAX_NUMBERS: Final = 1 << 20
"""The most numbers in all packed varint fields together: each takes one byte or more on the wire, and eight parsed."""
_MESSAGE: Final = 11
"""The descriptor type of a field that is a message."""
_VARINTS: Final = frozenset({3, 4, 5, 8, 13, 14, 17, 18})
_GO_ON: Final = bytes(range(128, 256))
"""All bytes of a varint except its last."""
_MAX_DEPTH: Final = 16


class BadMessageError(Exception):
    """Raised for bytes that are not a message, or a message with too many fields."""


def check_fields(data: bytes, descriptor: Any) -> None:
    """Refuse a message with more than MAX_FIELDS fields, nested messages included, before it is parsed.

    A packed field counts as one field; all packed fields may have MAX_NUMBERS numbers.  The check stops at the first
    field above the limit, so its time is bounded.
    """
    numbers = 0
    left, todo = MAX_FIELDS, [(0, len(data), descriptor, 0)]
    while todo:
        at, end, kind, depth = todo.pop()
        if depth > _MAX_DEPTH:
            raise BadMessageError("it is nested too deeply")
        while at < end:
            left -= 1
            if left < 0:
                raise BadMessageError(f"it has more than {MAX_FIELDS} fields")
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
                        raise BadMessageError(f"it has more than {MAX_NUMBERS} packed numbers; use raw_input_contents")
                if field is not None and field.type == _MESSAGE:
                    if at + size > end:
                        raise _cut_off()
                    todo.append((at, at + size, field.message_type, depth + 1))
                at += size
            else:
                raise BadMessageError("it has a field of an unknown wire type")
        if at != end:
            raise _cut_off()


def _cut_off() -> BadMessageError:
    """Return a new error each time, because a raised error holds its frames, and so the message."""
    return BadMessageError("it is truncated inside a field")


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
