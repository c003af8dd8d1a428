"""Bundles: one ``.psm`` file with graph, packed weights, tokenizer and chat template (docs/bundle-format.md).

The writer streams: every size follows from the graph's layouts, so weights go to disk as they are packed, and the
checksums are filled in at the end.  The file appears under its name whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from penstock.errors import FileAccessError, InternalError, InvalidArgumentError
from penstock.graph.ir import Graph, Segment
from penstock.graph.metadata import decode, encode
from penstock.lite import core

__all__ = ["FORMAT_MAJOR", "FORMAT_MINOR", "BundleWriter", "read_graph"]

FORMAT_MAJOR: Final = 1
FORMAT_MINOR: Final = 0
WEIGHTS_SEGMENT: Final = "weights"
_MAGIC: Final = b"PENSTOCK"
_HEADER: Final = struct.Struct("<8sHHIQQIIQ16x")
_PAGE_BYTES: Final = 4096
_WEIGHT_ALIGNMENT: Final = 64


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class BundleWriter:
    """Write a bundle: ``add_weight`` for every weight of ``graph`` in its order, then ``close``.

    ``segments`` maps names to bytes (``tokenizer.json`` ...), kept in sorted order before the weights.  As a context
    manager it closes on success and discards on an exception.  The same input makes the same bytes.  Raises
    InvalidArgumentError for a weight out of order or of the wrong size, FileAccessError when the system refuses.
    """

    def __init__(self, path: Path | str, graph: Graph, segments: Mapping[str, bytes] | None = None) -> None:
        self._path = Path(path)
        self._graph = graph
        self._texts = dict(sorted((segments or {}).items()))
        if WEIGHTS_SEGMENT in self._texts:
            raise InvalidArgumentError(f"segments: the name {WEIGHTS_SEGMENT!r} is taken")
        self._lay_out()
        self._pending = list(graph.weights)
        self._crc = 0
        self._written = 0
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.part")
        try:
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FileAccessError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._temporary: Path | None = temporary
        self._file = os.fdopen(handle, "wb")
        try:
            self._write_texts()
        except BaseException:
            self.discard()
            raise

    def _lay_out(self) -> None:
        """Offsets of weights in their segment, and of segments in the file."""
        end = 0
        for weight in self._graph.weights.values():
            weight.segment = WEIGHTS_SEGMENT
            weight.offset = _round_up(end, _WEIGHT_ALIGNMENT)
            weight.num_bytes = core.layout_bytes(int(weight.layout), weight.rows, weight.cols)
            end = weight.offset + weight.num_bytes
        sizes = [(name, len(data)) for name, data in self._texts.items()] + [(WEIGHTS_SEGMENT, end)]
        blank = [Segment(name, 0, size, 0) for name, size in sizes]
        self._metadata_bytes = len(encode(self._graph, blank))
        at = _HEADER.size + self._metadata_bytes
        self._segments = []
        for segment in blank:
            at = _round_up(at, _PAGE_BYTES)
            self._segments.append(replace(segment, offset=at))
            at += segment.num_bytes
        self._file_bytes = at

    def _write_texts(self) -> None:
        for index, data in enumerate(self._texts.values()):
            self._write_at(self._segments[index].offset, data)
            self._segments[index] = replace(self._segments[index], crc32=zlib.crc32(data))
        self._seek(self._segments[-1].offset)

    def _write_at(self, offset: int, data: bytes) -> None:
        self._seek(offset)
        self._write(data)

    def _seek(self, offset: int) -> None:
        try:
            self._file.seek(offset)
        except OSError as error:
            raise FileAccessError(f"{self._path}: cannot be written: {error.strerror}") from error

    def _write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise FileAccessError(f"{self._path}: cannot be written: {error.strerror}") from error

    def add_weight(self, name: str, data: object) -> None:
        """The packed bytes of the next weight; ``data`` is any contiguous buffer of exactly its size."""
        expected = self._pending[0] if self._pending else None
        if name != expected:
            raise InvalidArgumentError(f"weight {name}: expected {expected} next")
        weight = self._graph.weights[name]
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        if view.nbytes != weight.num_bytes:
            raise InvalidArgumentError(f"weight {name}: expected {weight.num_bytes} bytes, found {view.nbytes}")
        gap = bytes(weight.offset - self._written)
        for piece in (gap, view):
            self._write(piece)
            self._crc = core.crc32(piece, self._crc)
        self._written = weight.offset + weight.num_bytes
        self._pending.pop(0)

    def close(self) -> None:
        """Fill in checksums, metadata and header, then give the file its name."""
        if self._temporary is None:
            return
        if self._pending:
            missing = self._pending[0]
            self.discard()
            raise InvalidArgumentError(f"weight {missing}: was not added")
        try:
            self._finish(self._temporary)
        except BaseException:
            self.discard()
            raise
        self._temporary = None

    def _finish(self, temporary: Path) -> None:
        self._segments[-1] = replace(self._segments[-1], crc32=self._crc)
        metadata = encode(self._graph, self._segments)
        if len(metadata) != self._metadata_bytes:
            raise InternalError(f"{self._path}: metadata of {self._metadata_bytes} bytes grew to {len(metadata)}")
        header = _HEADER.pack(
            _MAGIC, FORMAT_MAJOR, FORMAT_MINOR, _HEADER.size, _HEADER.size, len(metadata), zlib.crc32(metadata), 0,
            self._file_bytes,
        )  # fmt: skip
        self._write_at(0, header + metadata)
        try:
            self._file.flush()
            os.ftruncate(self._file.fileno(), self._file_bytes)
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(temporary, self._path)
        except OSError as error:
            raise FileAccessError(f"{self._path}: cannot be written: {error.strerror}") from error

    def discard(self) -> None:
        """Leave nothing behind."""
        if self._temporary is None:
            return
        with contextlib.suppress(OSError):  # a full disk refuses the buffered rest; the file goes anyway
            self._file.close()
        self._temporary.unlink(missing_ok=True)
        self._temporary = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def read_graph(path: Path | str) -> tuple[Graph, list[Segment]]:
    """The graph and the segments of a bundle, validated by the core first.

    Raises InvalidFileError, UnsupportedError or FileAccessError, naming file and field.
    """
    with core.Model.open(path), open(path, "rb") as file:
        fields = _HEADER.unpack(file.read(_HEADER.size))
        file.seek(fields[4])
        return decode(file.read(fields[5]))
