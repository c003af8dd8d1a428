"""The two layouts of PyTorch's checkpoints: a ZIP archive, and before 1.6 a row of pickles and then the storages."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from penstock.checkpoint.pickles.decoder import ELEMENT_TYPES, MAX_PICKLE_BYTES, PickleDecoder, PickledTensor, Storage
from penstock.config import show
from penstock.errors import InvalidFileError

__all__ = ["PickledFile", "is_convertible"]

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_MAX_RECORDS: Final = 200_000


@dataclass(frozen=True)
class _ZipRecord:
    start: int
    num_bytes: int


class PickledFile:
    """The value in a file and the bytes of its storages.  ``data`` is the whole file, mapped."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._records: dict[str, _ZipRecord] = {}
        self._types: dict[str, str] = {}
        if bytes(data[:2]) == b"PK":
            self.value = self._read_archive()
        else:
            self.value = self._read_row()

    def _read_archive(self) -> Any:
        try:
            with zipfile.ZipFile(_Reader(self._data)) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, struct.error, ValueError, EOFError, NotImplementedError):
            raise InvalidFileError("expected a ZIP archive of torch.save, got a damaged one") from None
        if len(infos) > _MAX_RECORDS:
            raise InvalidFileError(f"expected at most {_MAX_RECORDS} records, got {len(infos)}")
        records: dict[str, _ZipRecord] = {}
        for info in infos:
            name = info.filename.partition("/")[2]
            if name in records:
                raise InvalidFileError(f"expected each record of the archive once, got {show(name)} again")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise InvalidFileError(
                    f"record {show(name)}: expected one that is stored as it is, got a compressed one. Write the "
                    "file again with torch.save."
                )
            records[name] = self._record_of(name, info)
        _check_apart(infos, records.values())
        if "constants.pkl" in records:
            raise InvalidFileError("expected tensors by name, got a program of TorchScript")
        if "data.pkl" not in records:
            raise InvalidFileError("expected a ZIP archive of torch.save, got one without data.pkl")
        order = records.get("byteorder")
        if order is not None and bytes(self._bytes_of(order)[:8]) != b"little":
            raise InvalidFileError("byteorder: expected 'little', got another order", param="byteorder")
        self._records = {
            name.removeprefix("data/"): record for name, record in records.items() if name.startswith("data/")
        }
        pickle = self._bytes_of(records["data.pkl"])
        if len(pickle) > MAX_PICKLE_BYTES:
            raise InvalidFileError(
                f"data.pkl: expected at most {MAX_PICKLE_BYTES} bytes, got {len(pickle)}", param="data.pkl"
            )
        return PickleDecoder(pickle).decode()

    def _record_of(self, name: str, info: zipfile.ZipInfo) -> _ZipRecord:
        offset, size = info.header_offset, _LOCAL_HEADER.size
        if not 0 <= offset <= len(self._data) - size:
            raise InvalidFileError(f"record {show(name)}: expected its bytes in the file, got none")
        signature, name_len, extra_len = _LOCAL_HEADER.unpack(self._data[offset : offset + size])
        start = offset + size + name_len + extra_len
        if signature != b"PK\x03\x04" or start + info.file_size > len(self._data):
            raise InvalidFileError(f"record {show(name)}: expected its bytes in the file, got a damaged archive")
        return _ZipRecord(start, info.file_size)

    def _bytes_of(self, record: _ZipRecord) -> memoryview:
        return self._data[record.start : record.start + record.num_bytes]

    def _read_row(self) -> Any:
        """Read magic number, version, system, value, keys of the storages, and each one's length and bytes."""
        decoder = PickleDecoder(self._data)
        if decoder.decode() != _MAGIC or decoder.decode() != _PROTOCOL:
            raise InvalidFileError("expected a checkpoint of torch.save, got another file")
        system, value, keys = decoder.decode(), decoder.decode(), decoder.decode()
        if not isinstance(system, dict) or not isinstance(keys, list) or len(keys) > _MAX_RECORDS:
            raise InvalidFileError("expected a checkpoint of torch.save, got a damaged one")
        if system.get("little_endian") is not True:
            raise InvalidFileError("little_endian: expected true, got another order of bytes", param="little_endian")
        if not isinstance(value, dict) or not all(map(is_convertible, value.values())):
            return value
        storages = {item.storage.key: item.storage for item in value.values()}
        position = decoder.position
        for key in keys:
            storage = storages.get(key) if isinstance(key, str) else None
            if storage is None or key in self._records or position + 8 > len(self._data):
                raise InvalidFileError(f"storage {show(key)}: expected each storage of a tensor once")
            size = _element_bytes(storage)
            (count,) = struct.unpack("<q", self._data[position : position + 8])
            position += 8
            if not 0 <= count * size <= len(self._data) - position:
                raise InvalidFileError(f"storage {show(key)}: expected its bytes in the file, got fewer")
            self._records[key] = _ZipRecord(position, count * size)
            position += count * size
        return value

    def place_of(self, tensor: PickledTensor) -> tuple[int, int]:
        """Return the byte at which the storage of a tensor begins, and its length in bytes.

        InvalidFileError for a storage that is missing, that claims more than its record has, or that has two types,
        and for a tensor that reaches beyond its storage.
        """
        storage, size = tensor.storage, ELEMENT_TYPES[tensor.element_type][1]
        record = self._records.get(storage.key)
        if record is None:
            raise InvalidFileError(f"storage {show(storage.key)}: expected its bytes in the file, got none")
        num_bytes = storage.num_elements * _element_bytes(storage)
        if num_bytes > record.num_bytes:
            raise InvalidFileError(
                f"storage {show(storage.key)}: expected at most the {record.num_bytes} bytes of its record, got "
                f"{storage.num_elements} elements in {num_bytes} bytes"
            )
        if self._types.setdefault(storage.key, storage.element_type) != storage.element_type:
            raise InvalidFileError(f"storage {show(storage.key)}: expected one type of elements, got two")
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
        end = 0 if 0 in tensor.shape else tensor.offset + last + 1
        if end * size > num_bytes:
            raise InvalidFileError(
                f"expected a tensor within the {num_bytes} bytes of its storage, got one of {end * size}"
            )
        return record.start, num_bytes


def _check_apart(infos: list[zipfile.ZipInfo], records: Iterable[_ZipRecord]) -> None:
    """Raise InvalidFileError if a record, with its header, reaches into the next one, whose bytes it would read."""
    starts = (info.header_offset for info in infos)
    spans = sorted((start, record.start + record.num_bytes) for start, record in zip(starts, records, strict=True))
    for (_, end), (start, _) in pairwise(spans):
        if end > start:
            raise InvalidFileError(
                f"expected records that do not overlap, got one that ends at byte {end}, after the start of the next "
                f"at byte {start}"
            )


def is_convertible(value: Any) -> bool:
    """Return True for a tensor whose type of elements is converted."""
    return (
        isinstance(value, PickledTensor)
        and value.element_type in ELEMENT_TYPES
        and value.storage.element_type in (*ELEMENT_TYPES, "")
    )


def _element_bytes(storage: Storage) -> int:
    return ELEMENT_TYPES[storage.element_type][1] if storage.element_type else 1


class _Reader(io.RawIOBase):
    """A file that reads from memory without a copy of all of it."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._position = data, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a position."""
        self._position = max(0, offset + (0, self._position, len(self._data))[whence])
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return bytes."""
        end = len(self._data) if size is None or size < 0 else self._position + size
        piece = bytes(self._data[self._position : end])
        self._position += len(piece)
        return piece
