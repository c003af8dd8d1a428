"""Read the metadata of a bundle that the core has validated: its tables, segments and weights.

Field numbers are positions in core/bundle.fbs.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from flatbuffers import number_types as types
from flatbuffers.table import Table

from penstock.errors import FileAccessError, InvalidFileError

__all__ = [
    "FORMAT_MAJOR", "FORMAT_MINOR", "FlatTable", "StoredPart", "StoredWeight", "check_same", "open_again",
    "read_metadata", "stamp_of", "state_groups", "stored_properties", "stored_segments", "stored_weights",
]  # fmt: skip

FORMAT_MAJOR, FORMAT_MINOR = 1, 1
"""The newest version of the format.  A bundle of a language model has the minor version 0."""

_OFFSET_AT, _SIZE_AT, _HEADER_BYTES = 16, 24, 64
_SEGMENTS, _WEIGHTS, _STATES, _PROPERTIES = 13, 7, 8, 14


class FlatTable:
    """A FlatBuffers table of metadata that the core has validated.  Methods read a field by its number."""

    def __init__(self, data: bytes, position: int) -> None:
        self.table = Table(data, position)

    def _at(self, field: int) -> int:
        return int(self.table.Offset(4 + 2 * field))

    def number(self, field: int, flags: Any = types.Int32Flags, otherwise: int = 0) -> Any:
        at = self._at(field)
        return self.table.Get(flags, self.table.Pos + at) if at else otherwise

    def long(self, field: int) -> int:
        return int(self.number(field, types.Int64Flags))

    def replace(self, data: bytearray, field: int, form: str, number: int) -> None:
        """Write a number that the table has into ``data``, a copy of its bytes; ``form`` is that of ``struct``."""
        struct.pack_into(form, data, self.table.Pos + self._at(field), number)

    def string(self, field: int) -> str:
        at = self._at(field)
        return self.table.String(self.table.Pos + at).decode() if at else ""

    def rows(self, field: int) -> list[FlatTable]:
        at = self._at(field)
        if not at:
            return []
        first = self.table.Vector(at)
        positions = [self.table.Indirect(first + 4 * i) for i in range(self.table.VectorLen(at))]
        return [FlatTable(self.table.Bytes, position) for position in positions]

    def structs(self, field: int, size: int, members: Sequence[tuple[int, Any]]) -> list[tuple[int, ...]]:
        at = self._at(field)
        if not at:
            return []
        first = self.table.Vector(at)
        count = self.table.VectorLen(at)
        return [
            tuple(int(self.table.Get(flags, first + size * i + offset)) for offset, flags in members)
            for i in range(count)
        ]

    def ints(self, field: int) -> list[int]:
        return [number for (number,) in self.structs(field, 4, [(0, types.Int32Flags)])]


class StoredPart(NamedTuple):
    """The rows of a weight that hold one checkpoint tensor.  In a fused vector, rows count elements."""

    name: str
    row_start: int
    num_rows: int


class StoredWeight(NamedTuple):
    """A weight as it is stored: ``layout`` is a ``ps_layout``, ``offset`` counts bytes within ``segment``."""

    name: str
    rows: int
    cols: int
    layout: int
    segment: str
    offset: int
    num_bytes: int
    parts: tuple[StoredPart, ...]
    shape: tuple[int, ...] = ()  # of a constant


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what identifies a file even if another takes its name: device, inode, size, modification time in ns."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def check_same(path: str | os.PathLike[str], stamp: Sequence[int]) -> None:
    """Raise InvalidFileError unless the file at ``path`` is the one that a model opened, by its ``stamp``."""
    try:
        current = stamp_of(Path(path).stat())
    except (OSError, ValueError):  # ValueError: a NUL character in the name
        current = ()
    _compare(path, current, stamp)


@contextlib.contextmanager
def open_again(path: str | os.PathLike[str], stamp: Sequence[int]) -> Iterator[BinaryIO]:
    """Open the file of a model again, to read parts of it that the core does not return.

    Raises InvalidFileError when the file was replaced or changed, FileAccessError when it cannot be opened.
    """
    try:
        file = Path(path).open("rb")  # noqa: SIM115
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror}") from error
    with file:
        _compare(path, stamp_of(os.fstat(file.fileno())), stamp)
        yield file


def _compare(path: str | os.PathLike[str], current: Sequence[int], stamp: Sequence[int]) -> None:
    if tuple(current) != tuple(stamp):
        raise InvalidFileError(f"{path}: file: replaced or changed after it was opened", param="file")


def read_metadata(path: str | os.PathLike[str], stamp: Sequence[int]) -> bytes:
    """Return the metadata bytes of a bundle that the core has open; raises what ``open_again`` raises."""
    with open_again(path, stamp) as file:
        header = file.read(_HEADER_BYTES)
        offset, size = (int.from_bytes(header[at : at + 8], "little") for at in (_OFFSET_AT, _SIZE_AT))
        file.seek(offset)
        return file.read(size)


def stored_properties(metadata: bytes) -> dict[str, str]:
    """Return the properties of a bundle."""
    root = FlatTable(metadata, int.from_bytes(metadata[:4], "little"))
    return {row.string(0): row.string(1) for row in root.rows(_PROPERTIES)}


def stored_segments(metadata: bytes) -> dict[str, tuple[int, int]]:
    """Return the offset and the size in bytes of each segment of a bundle, by name."""
    root = FlatTable(metadata, int.from_bytes(metadata[:4], "little"))
    return {row.string(0): (row.long(1), row.long(2)) for row in root.rows(_SEGMENTS)}


def state_groups(metadata: bytes) -> list[int]:
    """Return the page group of each state of a bundle, in the order of its table."""
    root = FlatTable(metadata, int.from_bytes(metadata[:4], "little"))
    return [row.number(3) for row in root.rows(_STATES)]


def stored_weights(metadata: bytes) -> list[StoredWeight]:
    """Return the weights of a bundle in the order of its table."""
    root = FlatTable(metadata, int.from_bytes(metadata[:4], "little"))
    segments = [row.string(0) for row in root.rows(_SEGMENTS)]
    return [_stored_weight(row, segments) for row in root.rows(_WEIGHTS)]


def _stored_weight(row: FlatTable, segments: Sequence[str]) -> StoredWeight:
    parts = tuple(StoredPart(part.string(0), part.long(1), part.long(2)) for part in row.rows(7))
    at = (segments[row.number(4)], row.long(5), row.long(6))
    shape = tuple(size for (size,) in row.structs(8, 8, [(0, types.Int64Flags)]))
    return StoredWeight(row.string(0), row.long(1), row.long(2), row.number(3), *at, parts, shape)
