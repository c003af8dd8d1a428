"""A memory-mapped safetensors file; every rule of the format is checked before the data is used.

The safetensors library is not used because it cannot return bfloat16 to numpy and copies every tensor that it reads.
Packing needs the raw bytes in place, and releases the pages that it has read.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.config import is_integer, parse_object, show
from penstock.errors import FileAccessError, InvalidFileError, UnsupportedError
from penstock.quant.tensor_writer import ELEMENT_BYTES

__all__ = ["MAX_TENSORS", "TensorFile", "TensorInfo", "open_regular", "parse_header"]

MAX_HEADER_BYTES: Final = 100_000_000
MAX_TENSORS: Final = 1 << 17
MAX_HEADER_VALUES: Final = 1 << 21
"""The limit on the values of a header: room for MAX_TENSORS entries, each with a name, a type, two offsets and
a few sizes."""
MAX_RANK: Final = 8
MAX_TENSOR_BYTES: Final = 1 << 46

_NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: ``dtype`` is the format's name in lower case, ``offset`` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int


def open_regular(path: Path) -> int:
    """Return a read-only descriptor of a regular file; raise FileAccessError or InvalidFileError otherwise.

    A pipe or a device does not block this call.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FileAccessError(f"{path.name}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidFileError(f"{path.name}: expected a regular file", param="path")
    return descriptor


def _read_entry(name: str, entry: object, file: str) -> tuple[str, tuple[int, ...], int, int]:
    """Return type, shape and offsets of an entry; errors name the tensor and the field."""
    try:
        return _checked_entry(entry)
    except (InvalidFileError, UnsupportedError) as error:
        raise error.with_message(f"{file}: tensor {show(name)}: {error}") from None


def _checked_entry(entry: object) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise InvalidFileError(f"expected dtype, shape and data_offsets, got {show(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise UnsupportedError(f"dtype: expected one of {', '.join(ELEMENT_BYTES)}, got {show(dtype)}", param="dtype")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_count(size) for size in shape):
        raise InvalidFileError(f"shape: expected at most {MAX_RANK} sizes, got {show(shape)}", param="shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise InvalidFileError(f"data_offsets: expected two offsets, got {show(offsets)}", param="data_offsets")
    expected = ELEMENT_BYTES[dtype]
    for size in shape:
        expected *= size
        if expected > MAX_TENSOR_BYTES:
            raise InvalidFileError(
                f"shape: expected at most {MAX_TENSOR_BYTES} bytes, got {show(shape)}", param="shape"
            )
    begin, end = offsets
    if end - begin != expected:
        raise InvalidFileError(f"data_offsets: expected {expected} bytes, got {end - begin}", param="data_offsets")
    return dtype, tuple(shape), begin, end


def _is_count(value: object) -> bool:
    return is_integer(value, 0, MAX_TENSOR_BYTES)


def parse_header(header: bytes, data_start: int, file_bytes: int, file: str) -> dict[str, TensorInfo]:
    """Return the tensors that a header describes, in the order of their bytes.

    The tensors must cover the data from its first byte to the file's last, without overlap or holes, as the format
    requires.  Raises InvalidFileError, which names the tensor and the field.
    """
    if not header.startswith(b"{"):
        raise InvalidFileError(f"{file}: header: expected an object", param="header")
    values = parse_object(header, f"{file}: header", max_bytes=MAX_HEADER_BYTES, max_values=MAX_HEADER_VALUES)
    if len(values) > MAX_TENSORS + 1:
        raise InvalidFileError(
            f"{file}: header: expected at most {MAX_TENSORS} tensors, got {len(values)}", param="header"
        )
    metadata = values.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidFileError(f"{file}: header: __metadata__: expected strings, got {show(metadata)}", param="header")
    entries = sorted(
        ((name, *_read_entry(name, entry, file)) for name, entry in values.items()),
        key=lambda item: (item[3], item[4], item[0]),
    )
    tensors: dict[str, TensorInfo] = {}
    cursor = 0
    for name, dtype, shape, begin, end in entries:
        if begin != cursor:
            kind = "overlaps the tensor before it" if begin < cursor else "leaves a hole before it"
            raise InvalidFileError(
                f"{file}: tensor {show(name)}: data_offsets: expected to begin at {cursor}, got {begin}, which {kind}",
                param="data_offsets",
            )
        cursor = end
        tensors[name] = TensorInfo(dtype.lower(), shape, file, data_start + begin, end - begin)
    if data_start + cursor != file_bytes:
        raise InvalidFileError(
            f"{file}: expected {data_start + cursor} bytes as its header says, got {file_bytes}: "
            f"{'truncated' if data_start + cursor > file_bytes else 'bytes after the last tensor'}"
        )
    return tensors


class TensorFile:
    """A mapped safetensors file: ``tensors`` by name, in the order of their bytes; ``header`` as it is stored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = open_regular(path)
        try:
            file_bytes = os.fstat(descriptor).st_size
            prefix = os.pread(descriptor, 8, 0)
            if len(prefix) < 8:
                raise InvalidFileError(f"{path.name}: expected at least 8 bytes, got {len(prefix)}")
            header_bytes = struct.unpack("<Q", prefix)[0]
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise InvalidFileError(
                    f"{path.name}: header: expected at most {min(MAX_HEADER_BYTES, file_bytes - 8)} bytes, "
                    f"got a length of {header_bytes}",
                    param="header",
                )
            self.header = os.pread(descriptor, header_bytes, 8)
            self.tensors = parse_header(self.header, 8 + header_bytes, file_bytes, path.name)
            # parse_header compared the size with the header, so no view ends beyond the file.
            self._map = mmap.mmap(descriptor, file_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise FileAccessError(f"{path.name}: {error.strerror}") from None
        except ValueError:  # raised by mmap
            raise InvalidFileError(f"{path.name}: the file shrank while it was opened", param="path") from None
        finally:
            os.close(descriptor)

    def read(self, name: str) -> NDArray[Any]:
        """Return a view of the tensor, in its shape: float32, uint16 (the bits of f16 and bf16), int8 or uint8.

        A tensor that is not aligned to its element size is copied.  Raises UnsupportedError for other element types.
        """
        info = self.tensors[name]
        dtype = _NUMPY.get(info.dtype.upper())
        if dtype is None:
            raise UnsupportedError(
                f"{info.file}: tensor {show(name)}: dtype {info.dtype.upper()} is not supported; "
                "expected F32, F16 or BF16",
                param=name,
            )
        if info.num_bytes == 0:
            return np.empty(info.shape, dtype)
        array = np.frombuffer(self._map, dtype, info.num_bytes // dtype.itemsize, info.offset).reshape(info.shape)
        return array if info.offset % dtype.itemsize == 0 else array.copy()

    def read_bytes(self, name: str, begin: int, end: int) -> NDArray[np.uint8]:
        """Return a view of bytes ``begin`` to ``end`` of the tensor, whatever its element type."""
        return np.frombuffer(self._map, np.uint8, end - begin, self.tensors[name].offset + begin)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Release the memory pages that hold bytes ``begin`` to ``end`` of the tensor; reading maps them again."""
        info = self.tensors[name]
        end = info.num_bytes if end is None else end
        if end > begin:
            start = (info.offset + begin) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, info.offset + end - start)
