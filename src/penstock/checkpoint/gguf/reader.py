"""The header of a GGUF file: metadata and the table of tensors, each count and offset checked before it is used.

No value of the file is trusted: lengths are compared with the bytes that are left before anything is allocated, and
arrays of arrays are refused, so that reading needs no recursion.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.element_types import ELEMENT_TYPES, ElementType
from penstock.config import show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["GgufHeader", "StoredTensor", "Texts", "Value", "read_header"]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_KEYS: Final = 1 << 16
MAX_KEY_BYTES: Final = 1 << 16
MAX_STRING_BYTES: Final = 1 << 24
MAX_STRINGS: Final = 1 << 22
MAX_TENSORS: Final = 1 << 17
MAX_NAME_BYTES: Final = 255
MAX_RANK: Final = 4
MAX_TENSOR_BYTES: Final = 1 << 46
MAX_ALIGNMENT: Final = 1 << 20

_LENGTH: Final = struct.Struct("<Q")
_BETWEEN: Final = "\0" * _LENGTH.size
_MANY: Final = 4096
"""Arrays of so many strings, vocabularies, are taken apart where they are read."""
_ZEROS: Final = 5
_EXPECTED_BYTES: Final = 24
"""The bytes that most strings of a vocabulary have on average, with their lengths."""
_MAX_GROWTH: Final = 16
_MAX_SCANNED: Final = 1 << 26
"""Limits on the bytes in which the strings of an array are searched for: times those expected, and in all."""
_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_NUMBERS: Final[dict[int, np.dtype[np.generic]]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

Value: TypeAlias = "int | float | bool | str | list[str] | Texts | NDArray[np.generic]"


class Texts:
    """Many strings, checked but not split yet: most processes that open a file need no vocabulary.

    ``joined`` has zeros before each string, which has none itself.
    """

    def __init__(self, joined: str, count: int) -> None:
        self._joined, self._count = joined, count

    def __len__(self) -> int:
        return self._count

    def split(self) -> list[str]:
        """Split the text into its strings, which takes several times as long as to open the file."""
        return self._joined.split(_BETWEEN)[1:]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the table: ``shape`` has the longest-strided axis first; ``offset`` counts from the file's start."""

    name: str
    kind: ElementType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """``metadata`` by key, ``tensors`` by name in the order of the table."""

    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]


class _Cursor:
    """Reads values one after another from ``data``; an error names what was read.

    ``field``: the key, the tensor or the number of the header that is read, for errors.
    """

    def __init__(self, data: memoryview, file: str) -> None:
        self.data = data
        self.file = file
        self.at = 0
        self.num_strings = 0
        self.field: str | None = None

    def error(self, message: str) -> InvalidFileError:
        return InvalidFileError(f"{self.file}: {message}", param=self.field)

    def take(self, num_bytes: int, what: str) -> int:
        """Step over ``num_bytes`` and return where they begin."""
        left = len(self.data) - self.at
        if num_bytes > left:
            raise self.error(f"{what}: expected {num_bytes} bytes, got {left}")
        begin = self.at
        self.at += num_bytes
        return begin

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_LENGTH.unpack_from(self.data, self.take(8, what))[0])

    def string(self, what: str, max_bytes: int) -> str:
        length = self.u64(what)
        if length > max_bytes:
            raise self.error(f"{what}: expected at most {max_bytes} bytes, got {length}")
        begin = self.take(length, what)
        try:
            return str(self.data[begin : begin + length], "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what}: expected UTF-8") from None

    def numbers(self, kind: int, count: int, what: str) -> NDArray[np.generic]:
        dtype = _NUMBERS[kind]
        begin = self.take(count * dtype.itemsize, what)
        array = np.frombuffer(self.data, dtype, count, begin) if count else np.empty(0, dtype)
        if kind == _BOOL:
            if count and int(array.max()) > 1:
                raise self.error(f"{what}: expected booleans of 0 or 1")
            return array.astype(np.bool_)
        return array

    def value(self, what: str) -> Value:
        kind = self.u32(what)
        if kind == _STRING:
            return self.string(what, MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _NUMBERS:
            raise self.error(f"{what}: expected a value type from 0 to 12, got {kind}")
        number: int | float | bool = self.numbers(kind, 1, what)[0].item()
        return number

    def _array(self, what: str) -> Value:
        kind, count = self.u32(what), self.u64(what)
        if kind == _ARRAY:
            raise UnsupportedError(f"{self.file}: {what}: arrays of arrays are not supported", param=self.field)
        if kind != _STRING:
            if kind not in _NUMBERS:
                raise self.error(f"{what}: expected an element type from 0 to 12, got {kind}")
            return self.numbers(kind, count, what)
        left = len(self.data) - self.at
        self.num_strings += count
        if count > left // 8 or self.num_strings > MAX_STRINGS:
            raise self.error(f"{what}: expected at most {min(left // 8, MAX_STRINGS)} strings, got {count}")
        return self._strings(count, what)

    def _strings(self, count: int, what: str) -> list[str] | Texts:
        """Read ``count`` strings, as ``string`` does: a vocabulary has hundreds of thousands, so it is read as a whole.

        Reading one at a time, as some need, names the one at fault.
        """
        rest = self.data[self.at :]
        begins = _find_begins(rest, count) if count else None
        strings = None if begins is None else _decode(rest, begins)
        if begins is None or strings is None:
            return [self.string(what, MAX_STRING_BYTES) for _ in range(count)]
        self.at += int(begins[-1])
        return strings if count >= _MANY else strings.split()


def _find_begins(data: memoryview, count: int) -> NDArray[np.int64] | None:
    """Return where each of ``count`` strings begins with its length, and where the last one ends; None if unknown.

    A length, of 8 bytes and below 1 << 24, ends in five zeros, and no text begins with one.  So the ends of runs of
    zeros tell where lengths may be, and those are right if each leads to the next.
    """
    limit = min(len(data), _MAX_GROWTH * _EXPECTED_BYTES * count, _MAX_SCANNED)
    num_bytes = min(limit, _EXPECTED_BYTES * count + _LENGTH.size)
    while True:
        values = np.frombuffer(data, np.uint8, num_bytes)
        begins = _run_ends(values == 0)[:count] - (_LENGTH.size - 1)
        if not len(begins) or begins[0] != 0:
            return None
        if len(begins) == count or num_bytes == limit:
            break
        num_bytes = min(limit, 4 * num_bytes)
    if len(begins) < count:
        return None
    lengths = sum(values[begins + i].astype(np.int64) << (8 * i) for i in range(_LENGTH.size - _ZEROS))
    stops = begins + _LENGTH.size + lengths
    if stops[-1] > len(data) or not np.array_equal(stops[:-1], begins[1:]):
        return None
    return np.append(begins, stops[-1])


def _run_ends(zeros: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where the runs of at least ``_ZEROS`` zeros end; most of the memory is two bytes for each of ``zeros``."""
    ends = zeros[_ZEROS - 1 :].copy()
    for i in range(1, _ZEROS):
        ends &= zeros[_ZEROS - 1 - i : len(zeros) - i]
    ends[:-1] &= ~zeros[_ZEROS:]
    return np.flatnonzero(ends) + (_ZEROS - 1)


def _decode(data: memoryview, begins: NDArray[np.int64]) -> Texts | None:
    """Return the strings of ``_find_begins``, decoded as one text; None for some that have zeros or are no UTF-8."""
    text = np.frombuffer(data, np.uint8, int(begins[-1])).copy()
    for i in range(_LENGTH.size):
        text[begins[:-1] + i] = 0
    if len(text) - np.count_nonzero(text) != _LENGTH.size * (len(begins) - 1):
        return None
    try:
        return Texts(str(text.data, "utf-8"), len(begins) - 1)
    except UnicodeDecodeError:
        return None


def read_header(data: memoryview, file: str) -> GgufHeader:
    """Read the header of a file of which ``data`` is all bytes.

    Raises InvalidFileError (damaged; names the key or the tensor) or UnsupportedError (a version, a byte order or an
    element type that Penstock does not read).
    """
    cursor = _Cursor(data, file)
    if bytes(data[:4]) != MAGIC:
        raise InvalidFileError(f"{file}: expected a GGUF file, got other first bytes")
    cursor.at, cursor.field = 4, "version"
    version = cursor.u32("version")
    if version not in VERSIONS:
        order = "a file in big-endian byte order" if version and version & 0xFFFF == 0 else f"version {version}"
        raise UnsupportedError(f"{file}: expected GGUF version 2 or 3, got {order}")
    cursor.field = "tensor_count"
    num_tensors = cursor.u64("the number of tensors")
    if num_tensors > MAX_TENSORS:
        raise cursor.error(f"expected at most {MAX_TENSORS} tensors, got {num_tensors}")
    cursor.field = "metadata_kv_count"
    num_keys = cursor.u64("the number of keys")
    if num_keys > MAX_KEYS:
        raise cursor.error(f"expected at most {MAX_KEYS} keys, got {num_keys}")
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        cursor.field = None
        cursor.field = key = cursor.string("a key", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"{show(key)}: expected each key once, got it twice")
        metadata[key] = cursor.value(show(key))
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    return GgufHeader(version, metadata, _place(entries, _data_start(cursor, metadata), cursor))


def _read_entry(cursor: _Cursor) -> StoredTensor:
    """Return an entry of the table, whose offset still counts from the start of the data."""
    cursor.field = None
    cursor.field = name = cursor.string("a tensor's name", MAX_NAME_BYTES)
    what = f"tensor {show(name)}"
    rank = cursor.u32(what)
    if not 1 <= rank <= MAX_RANK:
        raise cursor.error(f"{what}: expected 1 to {MAX_RANK} dimensions, got {rank}")
    sizes = [cursor.u64(what) for _ in range(rank)]
    number, offset = cursor.u32(what), cursor.u64(what)
    kind = ELEMENT_TYPES.get(number)
    if kind is None or not kind.is_supported:
        actual = f"type {number}" if kind is None else kind.name
        names = ", ".join(entry.name for entry in ELEMENT_TYPES.values() if entry.is_supported)
        remedy = (
            ""
            if kind is None
            else (
                f". Use a file of another type, such as {kind.instead}: `llama-quantize ORIGINAL.gguf NEW.gguf "
                f"{kind.instead}` makes one from the original in F16 or BF16"
            )
        )
        raise UnsupportedError(f"{cursor.file}: {what}: expected one of {names}, got {actual}{remedy}", param=name)
    if sizes[0] % kind.block_len:
        raise cursor.error(f"{what}: expected rows of a multiple of {kind.block_len} values, got {sizes[0]}")
    num_bytes = kind.block_bytes
    for size in (sizes[0] // kind.block_len, *sizes[1:]):
        if not 0 < size <= MAX_TENSOR_BYTES:
            raise cursor.error(f"{what}: expected sizes from 1 to {MAX_TENSOR_BYTES}, got {show(sizes)}")
        num_bytes *= size
        if num_bytes > MAX_TENSOR_BYTES:
            raise cursor.error(f"{what}: expected at most {MAX_TENSOR_BYTES} bytes, got sizes {show(sizes)}")
    return StoredTensor(name, kind, tuple(reversed(sizes)), offset, num_bytes)


def _data_start(cursor: _Cursor, metadata: Mapping[str, Value]) -> tuple[int, int]:
    """Return where the data begins, and the alignment of tensors."""
    cursor.field = "general.alignment"
    alignment = metadata.get("general.alignment", 32)
    valid = type(alignment) is int and 8 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not isinstance(alignment, int) or not valid:
        raise cursor.error(
            f"general.alignment: expected a power of two from 8 to {MAX_ALIGNMENT}, got {show(alignment)}"
        )
    return -(-cursor.at // alignment) * alignment, alignment


def _place(entries: list[StoredTensor], data: tuple[int, int], cursor: _Cursor) -> dict[str, StoredTensor]:
    """Return the tensors with offsets from the start of the file; they lie inside it, aligned and without overlap."""
    start, alignment = data
    tensors: dict[str, StoredTensor] = {}
    for entry in entries:
        what, cursor.field = f"tensor {show(entry.name)}", entry.name
        if entry.name in tensors:
            raise cursor.error(f"{what}: expected each tensor once, got it twice")
        if entry.offset % alignment:
            raise cursor.error(f"{what}: expected an offset that is a multiple of {alignment}, got {entry.offset}")
        if start + entry.offset + entry.num_bytes > len(cursor.data):
            raise cursor.error(
                f"{what}: expected the file to have at least {start + entry.offset + entry.num_bytes} bytes, got "
                f"{len(cursor.data)}: it is truncated"
            )
        tensors[entry.name] = StoredTensor(entry.name, entry.kind, entry.shape, start + entry.offset, entry.num_bytes)
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            cursor.field = after.name
            raise cursor.error(f"tensor {show(after.name)}: overlaps tensor {show(before.name)}")
    return tensors
