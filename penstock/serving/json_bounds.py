"""Bodies that are small and yet dear to read: counted before they are parsed.

The parser makes an object of every value without letting another thread run: eight megabytes of ``[],[],`` held the
event loop for 0.9 s.  Counting what stands between texts costs a tenth of that, in slices.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import InvalidFileError

__all__ = ["MAX_NESTS", "MAX_VALUES", "check_counts"]

MAX_VALUES: Final = 1 << 20
MAX_NESTS: Final = 1 << 16
"""Lists and objects."""
_SLICE: Final = 1 << 16


def check_counts(data: bytes, file: str) -> None:
    """InvalidFileError for JSON with more values, or more lists and objects, than may be.  What texts hold is free.

    Text that is no JSON may pass: the parser refuses it.
    """
    if data.count(b",") < MAX_VALUES and data.count(b"[") + data.count(b"{") <= MAX_NESTS:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quote begins or ends a text
    values, nests, is_inside = 1, 0, 0
    for start in range(0, len(plain), _SLICE):
        parts = plain[start : start + _SLICE].split(b'"')
        between = b"".join(parts[is_inside::2])
        is_inside ^= (len(parts) - 1) & 1
        values += between.count(b",")
        nests += between.count(b"[") + between.count(b"{")
    if values > MAX_VALUES or nests > MAX_NESTS:
        raise InvalidFileError(
            f"{file}: expected at most {MAX_VALUES} values, {MAX_NESTS} of them lists and objects, "
            f"found {values} and {nests}"
        )
