"""Write a safetensors file as a stream: the header is written before the first tensor is available.

The safetensors library needs every tensor in memory at once; a quantized checkpoint is written in pieces.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FileAccessError, InternalError

__all__ = ["ELEMENT_BYTES", "TensorEntry", "TensorWriter"]

ELEMENT_BYTES: Final = {
    "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1,
    "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""The element types of the format that have whole bytes."""
_ALIGNMENT: Final = 64


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file: ``dtype`` as the format spells it ("F32", "F16", "BF16", "I8", "U8" ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * ELEMENT_BYTES[self.dtype]


class TensorWriter:
    """Writes the tensors of ``entries``, in any order and each in pieces.

    The space of the whole file is allocated at once, so that a full disk is found before the work is done.  Raises
    FileAccessError when the file cannot be written; the caller then removes the incomplete file.
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        # Tensors with the widest elements come first: each is aligned without padding, which the format forbids.
        ordered = sorted(entries, key=lambda entry: (-ELEMENT_BYTES[entry.dtype], entry.name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in ordered:
            end = offset + entry.num_bytes
            header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        start = 8 + len(text)
        ranges = {name: header[name]["data_offsets"] for name in (entry.name for entry in ordered)}
        self._open(path, text, {name: (start + begin, start + end) for name, (begin, end) in ranges.items()})

    @classmethod
    def with_header(cls, path: Path, header: bytes, ranges: Mapping[str, tuple[int, int]]) -> Self:
        """Return a writer of a file with this header; ``ranges`` are the bytes of each tensor within the file."""
        writer = cls.__new__(cls)
        writer._open(path, header, ranges)
        return writer

    def _open(self, path: Path, header: bytes, ranges: Mapping[str, tuple[int, int]]) -> None:
        self.num_bytes = max((end for _, end in ranges.values()), default=8 + len(header))
        self._path = path
        self._cursor = {name: begin for name, (begin, _) in ranges.items()}
        self._end = {name: end for name, (_, end) in ranges.items()}
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            os.posix_fallocate(self._descriptor, 0, self.num_bytes)
        except OSError as error:
            raise FileAccessError(f"{path}: {error.strerror}") from None
        self._write(struct.pack("<Q", len(header)) + header, 0)

    def add(self, name: str, piece: NDArray[Any]) -> None:
        """Write the next piece of tensor ``name``: an array with the bytes that the file stores."""
        if piece.size == 0:
            return
        data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
        at = self._cursor[name]
        if at + len(data) > self._end[name]:
            raise InternalError(f"{self._path.name}: tensor {name!r} has more bytes than its shape allows")
        self._cursor[name] = at + len(data)
        self._write(data, at)

    def _write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._descriptor, view, at)
                at += count
                view = view[count:]
        except OSError as error:
            raise FileAccessError(f"{self._path}: {error.strerror}") from None

    def close(self) -> int:
        """Sync and close the file; return its size in bytes."""
        missing = [name for name, at in self._cursor.items() if at != self._end[name]]
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise FileAccessError(f"{self._path}: {error.strerror}") from None
        finally:
            os.close(self._descriptor)
        if missing:
            raise InternalError(f"{self._path.name}: tensor {missing[0]!r} is incomplete")
        return self.num_bytes
