"""Write and read bundles (``.psm``); docs/explanation/bundle-format.md specifies the bytes.

A file is a header, the metadata, and page-aligned segments.  It is written under a temporary name in the same folder
and renamed when it is complete, so that the final name never refers to an incomplete bundle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core.metadata import FORMAT_MAJOR, FORMAT_MINOR, read_metadata
from penstock.core.native import Model, crc32, layout_bytes
from penstock.errors import FileAccessError, InvalidArgumentError, PenstockError
from penstock.graph.ir import GENERAL_NETWORK, Graph, Segment, Weight
from penstock.graph.metadata import decode_metadata, encode_metadata, with_segments

__all__ = ["FORMAT_MAJOR", "FORMAT_MINOR", "BundleWriter", "place_weights", "read_graph"]

_MAGIC = b"PENSTOCK"
_HEADER = struct.Struct("<8sHHIQQIIQ16x")
_PAGE_BYTES = 4096
_WEIGHT_ALIGNMENT = 64
_HUGE_PAGE_BYTES = 2 << 20
_WEIGHTS = "weights"
_GENERAL_FEATURE = 1  # of required_features: the graph is a general network

Data: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]


def _align(offset: int, step: int) -> int:
    return -(-offset // step) * step


class BundleWriter:
    """Streams one bundle to ``path``.

    ``segments`` are further files by name (tokenizer.json ...), or functions that return them, which are called when
    all weights are written.  Weights are added in the order of ``graph.weights``,
    each with exactly the bytes of its layout.  As a context manager the writer finishes the file at the end of the
    block, and leaves nothing behind on an error.  With ``validate`` the core opens the file before the rename.  With
    ``durable`` the file is on the disk when it has its name.  Equal arguments give equal bytes.
    """

    def __init__(
        self, path: str | os.PathLike[str], graph: Graph,
        segments: Mapping[str, bytes | Callable[[], bytes]] | None = None, *,
        validate: bool = True, durable: bool = True,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self._validate, self._durable = validate, durable
        self._extra = dict(segments or {})
        if _WEIGHTS in self._extra:
            raise InvalidArgumentError(
                f"segments: expected other names than {_WEIGHTS!r}, which is reserved", param="segments"
            )
        self._graph, weights_bytes = place_weights(graph)
        self._waiting = list(self._graph.weights.values())
        self._waiting.reverse()
        self._begun = 0  # bytes of the next weight that were added
        self._segments = [Segment(name, 0, 0, 0) for name in (_WEIGHTS, *self._extra)]
        self._metadata = encode_metadata(self._graph, self._segments)
        start = _align(_HEADER.size + len(self._metadata), _PAGE_BYTES)
        self._segments[0] = Segment(_WEIGHTS, start, weights_bytes, 0)
        self._file_bytes = start + weights_bytes
        self._crc = 0
        self._position = 0  # within the weights segment
        self._piece = bytearray()  # the begun huge page; _piece_offset is its place in the file
        self._piece_offset = self._segments[0].offset
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}.part")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file: int | None = os.open(self._temporary, flags, 0o666)
        except OSError as error:
            raise FileAccessError(f"{self.path}: {error.strerror}") from error

    def add_weight(self, name: str, data: Data, is_part: bool = False) -> None:
        """Write the next weight: a contiguous buffer of exactly its bytes, or the next part of them, which has more
        behind it."""
        if not self._waiting or self._waiting[-1].name != name:
            expected = repr(self._waiting[-1].name) if self._waiting else "no further weight"
            raise InvalidArgumentError(f"add_weight: expected {expected}, got {name!r}", param="name")
        weight = self._waiting[-1]
        array = np.frombuffer(data, np.uint8)
        missing = weight.num_bytes - self._begun - array.nbytes
        if missing <= 0 if is_part else missing:
            raise InvalidArgumentError(
                f"add_weight {name}: expected {weight.num_bytes} bytes for {weight.layout.name.lower()} "
                f"[{weight.rows}, {weight.cols}], got {self._begun + array.nbytes}{' and more' if is_part else ''}",
                param="data",
            )
        if not self._begun:
            self._append(np.zeros(weight.offset - self._position, np.uint8))
        self._append(array)
        self._begun += array.nbytes
        if not is_part:
            self._waiting.pop()
            self._begun = 0

    def leave_weights(self, crc: int) -> None:
        """Leave a hole in the file for the weights, whose checksum is ``crc``; ``map_weights`` maps them there."""
        self._waiting, self._crc = [], crc

    def _append(self, array: npt.NDArray[np.uint8]) -> None:
        self._crc = crc32(array, self._crc)
        self._position += array.nbytes
        data = array.data
        while data.nbytes:
            room = _HUGE_PAGE_BYTES - (self._piece_offset + len(self._piece)) % _HUGE_PAGE_BYTES
            if not self._piece and data.nbytes >= room:  # a whole huge page, which needs no copy
                self._write(self._piece_offset, data[:room])
                self._piece_offset += room
            else:
                self._piece += data[:room]
                if data.nbytes >= room:
                    self._write_piece()
            data = data[room:]

    def _write_piece(self) -> None:
        """Write a whole aligned huge page.

        Such writes leave huge pages in the page cache if the file system supports them (ext4 since Linux 6.16, xfs),
        and a process that maps the file then reads faster.
        """
        self._write(self._piece_offset, memoryview(self._piece))
        self._piece_offset += len(self._piece)
        self._piece = bytearray()

    def _write(self, offset: int, data: memoryview) -> None:
        if self._file is None:
            raise InvalidArgumentError(f"{self.path}: expected an open writer, got one that is closed", code="closed")
        try:
            while data.nbytes:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            self.abort()
            raise FileAccessError(f"{self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Finish the file and rename it.  After an error, it is removed.

        Raises InvalidArgumentError when a weight is missing, and the error of a segment's function.
        """
        if self._file is None:
            return
        if self._waiting:
            missing = self._waiting[-1].name
            self.abort()
            raise InvalidArgumentError(
                f"{self.path}: expected the weight {missing!r}, which was not added", param=missing
            )
        try:
            self._finish()
        except BaseException:
            self.abort()
            raise
        self._publish()

    def _finish(self) -> None:
        """Write the last weights, the segments and the header."""
        self._write_piece()
        self._segments[0] = dataclasses.replace(self._segments[0], crc32=self._crc)
        for i, (name, content) in enumerate(self._extra.items(), 1):
            data = content() if callable(content) else content
            segment = Segment(name, _align(self._file_bytes, _PAGE_BYTES), len(data), crc32(data))
            self._write(segment.offset, memoryview(data))
            self._segments[i] = segment
            self._file_bytes = segment.offset + segment.num_bytes
        metadata = with_segments(self._metadata, self._segments)
        is_general = self._graph.kind == GENERAL_NETWORK
        minor, features = (FORMAT_MINOR, _GENERAL_FEATURE) if is_general else (0, 0)
        header = _HEADER.pack(
            _MAGIC, FORMAT_MAJOR, minor, _HEADER.size, _HEADER.size, len(metadata), crc32(metadata), features,
            self._file_bytes,
        )  # fmt: skip
        self._write(0, memoryview(header + metadata))

    def _publish(self) -> None:
        if self._file is None:
            return
        try:
            os.ftruncate(self._file, self._file_bytes)
            if self._durable:
                os.fsync(self._file)
            if self._validate:
                Model.open(self._temporary).close()
            os.rename(self._temporary, self.path)
            if self._durable:
                _sync_folder(self.path.parent)
        except PenstockError as error:  # from the core, which knows the temporary name
            self.abort()
            raise error.with_message(str(error).replace(str(self._temporary), str(self.path))) from None
        except OSError as error:
            self.abort()
            raise FileAccessError(f"{self.path}: {error.strerror or error}") from error
        except BaseException:
            self.abort()
            raise
        os.close(self._file)
        self._file = None

    def abort(self) -> None:
        """Remove the incomplete file.  Does nothing after the rename."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
            with contextlib.suppress(FileNotFoundError):
                self._temporary.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abort()


def place_weights(graph: Graph) -> tuple[Graph, int]:
    """Return a graph whose weights have offsets and sizes, and the size of the weights segment in bytes."""
    weights: dict[str, Weight] = {}
    end = 0
    for name, weight in graph.weights.items():
        if weight.segment != _WEIGHTS:
            raise InvalidArgumentError(
                f"weight {name}: expected the segment {_WEIGHTS!r}, got {weight.segment!r}", param="segment"
            )
        offset = _align(end, _WEIGHT_ALIGNMENT)
        num_bytes = layout_bytes(weight.layout, weight.rows, weight.cols)
        weights[name] = dataclasses.replace(weight, offset=offset, num_bytes=num_bytes)
        end = offset + num_bytes
    return dataclasses.replace(graph, weights=weights), end


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_graph(path: str | os.PathLike[str]) -> tuple[Graph, list[Segment]]:
    """Return the graph and the segments of a bundle, which the core validates first.

    Raises InvalidFileError for a damaged file and UnsupportedError for one that is too new; errors name the field.
    """
    with Model.open(path) as model:
        return decode_metadata(read_metadata(path, model.stamp))
