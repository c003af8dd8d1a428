"""Write GGUF files, version 3: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.element_types import ELEMENT_TYPES
from penstock.errors import InternalError

__all__ = ["FILE_TYPES", "GgufEntry", "GgufWriter", "quantize_q8_0"]

FILE_TYPES: Final = {"f32": 0, "f16": 1, "q8_0": 7, "q4_k": 14, "q6_k": 18, "bf16": 32}
"""The values of general.file_type of the element types that are written."""
_ALIGNMENT: Final = 32
_NUMBERS: Final = {kind.name.lower(): number for number, kind in ELEMENT_TYPES.items()}
_STRING, _ARRAY = 8, 9
_SCALARS: Final[dict[type, tuple[int, str]]] = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
_ITEMS: Final[dict[type, tuple[int, str]]] = {bool: (7, "?"), int: (5, "<i4"), float: (6, "<f4")}


@dataclass(frozen=True)
class GgufEntry:
    """A tensor of the table: its name, its element type (of FILE_TYPES) and its shape."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the tensor's data."""
        own = ELEMENT_TYPES[_NUMBERS[self.kind]]
        return int(np.prod(self.shape, dtype=np.int64)) // own.block_len * own.block_bytes


class GgufWriter:
    """Writes a file: the header at once, then the data of every entry in the order of ``entries``."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], entries: Sequence[GgufEntry]) -> None:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata))
        head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
        offset = 0
        for entry in entries:
            sizes = struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape))
            head += _text(entry.name) + struct.pack("<I", len(entry.shape)) + sizes
            head += struct.pack("<IQ", _NUMBERS[entry.kind], offset)
            offset += _padded(entry.num_bytes)
        self._file = path.open("xb")
        self._file.write(head + bytes(_padded(len(head)) - len(head)))
        self._ends: list[int] = []
        for entry in entries:
            self._ends.append((self._ends[-1] if self._ends else 0) + _padded(entry.num_bytes))
        self._entries, self._at, self._written = list(entries), 0, 0

    def add(self, data: NDArray[Any]) -> None:
        """Append data of the next tensor, or a part of it."""
        if self._at == len(self._entries):
            raise InternalError("GGUF: more data than the table of tensors has")
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self._file.write(raw.data)
        self._written += len(raw)
        entry = self._entries[self._at]
        if self._written > entry.num_bytes:
            raise InternalError(f"GGUF: tensor {entry.name}: expected {entry.num_bytes} bytes, got {self._written}")
        if self._written == entry.num_bytes:
            self._file.write(bytes(_padded(entry.num_bytes) - entry.num_bytes))
            self._at, self._written = self._at + 1, 0

    def close(self) -> None:
        """Close the file; InternalError if data is missing."""
        self._file.close()
        if self._at != len(self._entries):
            raise InternalError(f"GGUF: tensor {self._entries[self._at].name}: expected more data")


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if not isinstance(value, list):
        kind, form = _SCALARS[type(value)]
        return struct.pack("<I", kind) + struct.pack(form, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    kind, form = _ITEMS[type(value[0])] if value else (5, "<i4")
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + np.array(value, form).tobytes()


def quantize_q8_0(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return rows as Q8_0 blocks, byte for byte as ggml's reference.  The row length is a multiple of 32."""
    groups = rows.reshape(-1, 32)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    scaled = groups * inverse
    whole = np.trunc(scaled)
    rounded = whole + np.trunc(2 * (scaled - whole))  # ties away from zero
    blocks = np.empty((len(groups), 34), np.uint8)
    blocks[:, :2] = scale.astype("<f2").view(np.uint8)
    blocks[:, 2:] = rounded.astype(np.int8).view(np.uint8)
    return blocks.reshape(len(rows), -1)
