"""Cut a checkpoint into a sharded folder, cut a sharded folder in another way, and merge one.

Tensors stream in pieces of 8 MB, so memory use does not depend on the model.  The result appears complete or not at
all: it is written beside its final name, compared with the source by checksums, synced and renamed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.side_files import write_side_files
from penstock.checkpoint.tensor_file import TensorFile
from penstock.config import show
from penstock.errors import InternalError, InvalidArgumentError, InvalidFileError
from penstock.quant.folder import new_folder
from penstock.quant.tensor_writer import TensorEntry, TensorWriter
from penstock.sharding.folder import (
    MANIFEST,
    STRATEGY,
    WEIGHTS,
    Manifest,
    ShardedFolder,
    is_sharded,
    rank_name,
    stream_tensor,
)
from penstock.sharding.source import INDEX, WholeTensors, open_whole
from penstock.sharding.strategy import ParameterCut, RowRanges, Strategy

__all__ = ["Progress", "ShardReport", "merge_folder", "shard_folder"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ShardReport:
    """The result: ``checksums`` is the SHA-256 of each tensor, equal in source and result; ``num_bytes`` of the files
    written."""

    checksums: Mapping[str, str]
    num_bytes: int
    seconds: float

    @property
    def checksum(self) -> str:
        """The SHA-256 of the names and checksums of all tensors."""
        lines = "".join(f"{name} {checksum}\n" for name, checksum in sorted(self.checksums.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


def shard_folder(
    source: Path, out: Path, strategy: Strategy, *, previous: Strategy | None = None, progress: Progress | None = None
) -> ShardReport:
    """Write the sharded folder ``out``, which must not exist, from a checkpoint folder or a sharded one.

    ``previous``: the strategy that ``source`` must be cut with.  ``progress(done, total)`` counts bytes of tensors.
    Raises what ``Checkpoint.open`` and ``ShardedFolder.open`` raise, and InvalidArgumentError (``strategy``)
    for the strategy of another model.
    """
    start = time.monotonic()
    source_tensors = open_whole(source)
    _check_previous(source_tensors, previous, source)
    strategy.check_model(source_tensors.config, source_tensors.tensors, source)
    with new_folder(out) as folder:
        cutter = _Cutter(strategy, source_tensors, folder)
        cutter.run(progress)
        made = source_tensors.make_sides()
        sides = {**source_tensors.read_sides(), **made}
        _write_sides(folder, {**sides, STRATEGY: strategy.to_json()})
        manifest = Manifest(
            strategy.checksum,
            source_tensors.headers,
            source_tensors.index,
            {name: hashlib.sha256(data).hexdigest() for name, data in sides.items()},
            cutter.wholes,
            tuple(cutter.parts),
            tuple(made),
        )
        _write_synced(folder / MANIFEST, manifest.to_json())
        written = ShardedFolder.open(folder)
        _compare(cutter.wholes, written)
        num_bytes = sum((folder / rank_name(rank) / WEIGHTS).stat().st_size for rank in range(strategy.world))
        _sync_folder(folder)
    _sync_folder(out.parent)
    return ShardReport(cutter.wholes, num_bytes, time.monotonic() - start)


def merge_folder(source: Path, out: Path, progress: Progress | None = None) -> ShardReport:
    """Write the checkpoint folder ``out``, which must not exist, from a sharded folder: the files that were cut."""
    start = time.monotonic()
    if not is_sharded(source):
        raise InvalidArgumentError(
            f"{source}: expected a sharded folder, got none of {MANIFEST} and rank_0", param="source"
        )
    whole = ShardedFolder.open(source)
    total, done, num_bytes = sum(info.num_bytes for info in whole.tensors.values()), 0, 0
    with new_folder(out) as folder:
        for file, writer, names in _whole_files(whole, folder):
            for name in names:
                for piece in whole.stream(name):
                    writer.add(name, piece)
                    done += len(piece)
                    if progress is not None:
                        progress(done, total)
            num_bytes += writer.close()
            _compare({name: whole.manifest.wholes[name] for name in names}, _OneFile(folder / file))
        sides = whole.read_sides()
        if whole.manifest.index is not None:
            sides[INDEX] = whole.manifest.index
        _write_sides(folder, sides)
        _sync_folder(folder)
    _sync_folder(out.parent)
    return ShardReport(whole.manifest.wholes, num_bytes, time.monotonic() - start)


def _whole_files(whole: ShardedFolder, folder: Path) -> Iterator[tuple[str, TensorWriter, list[str]]]:
    for file, header in whole.manifest.headers.items():
        infos = {name: info for name, info in whole.tensors.items() if info.file == file}
        ranges = {name: (info.offset, info.offset + info.num_bytes) for name, info in infos.items()}
        yield file, TensorWriter.with_header(folder / file, header, ranges), list(infos)


class _OneFile:
    """The tensors of one file, to compare them."""

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)

    def stream(self, name: str) -> Iterator[NDArray[np.uint8]]:
        return stream_tensor(self._file, name, 0, self._file.tensors[name].num_bytes)


class _Streams(Protocol):
    def stream(self, name: str) -> Iterator[NDArray[np.uint8]]: ...


def _compare(checksums: Mapping[str, str], written: _Streams) -> None:
    """Compare the written tensors with the source."""
    for name, checksum in checksums.items():
        digest = hashlib.sha256()
        for piece in written.stream(name):
            digest.update(piece.data)
        if digest.hexdigest() != checksum:
            raise InternalError(f"tensor {show(name)}: the file that was written has other bytes than the source")


def _check_previous(whole: WholeTensors, previous: Strategy | None, source: Path) -> None:
    if previous is None:
        return
    if not isinstance(whole, ShardedFolder):
        raise InvalidArgumentError(f"from: expected a sharded folder, got the checkpoint folder {source}", param="from")
    if previous.checksum != whole.strategy.checksum:
        raise InvalidArgumentError(
            f"from: expected the strategy that {source} was cut with, {whole.strategy.checksum[:16]}, got "
            f"{previous.checksum[:16]}",
            param="from",
        )


class _Cutter:
    """Writes the files of all ranks in one pass over the source; ``wholes`` and ``parts`` are for the manifest."""

    def __init__(self, strategy: Strategy, whole: WholeTensors, folder: Path) -> None:
        self._strategy, self._whole = strategy, whole
        self.wholes: dict[str, str] = {}
        self.parts: list[dict[str, str]] = [{} for _ in range(strategy.world)]
        self._writers = []
        for rank in range(strategy.world):
            own = folder / rank_name(rank)
            own.mkdir()
            entries = [
                TensorEntry(name, strategy.parameters[name].dtype.upper(), shape)
                for name, shape in strategy.shapes_of(rank).items()
            ]
            self._writers.append(TensorWriter(own / WEIGHTS, entries))
            self._folder = folder

    def run(self, progress: Progress | None) -> None:
        """Write all files and close them."""
        total, done = sum(info.num_bytes for info in self._whole.tensors.values()), 0
        for name, info in self._whole.tensors.items():
            self._cut(name, self._strategy.parameters[name], info.num_bytes)
            done += info.num_bytes
            if progress is not None:
                progress(done, total)
        for name, own in self._strategy.parameters.items():
            if own.cut == "same" and self.wholes[name] != self.wholes[own.name]:
                raise InvalidFileError(f"{STRATEGY}: {show(name)}: name: {show(own.name)} has other bytes", param=name)
        for rank, writer in enumerate(self._writers):
            writer.close()
            _sync_folder(self._folder / rank_name(rank))

    def _cut(self, name: str, own: ParameterCut, num_bytes: int) -> None:
        ranks = range(len(self._writers))
        parts = {rank: part for rank in ranks if (part := self._strategy.part_of(name, rank)) is not None}
        whole, digests = hashlib.sha256(), {rank: hashlib.sha256() for rank in parts}
        select = _Columns(own, num_bytes) if own.cut == "columns" else _RowFilter(own, num_bytes)
        for piece in select.blocks(self._whole.stream(name)):
            whole.update(piece.data)
            for rank, part in parts.items():
                for cut in select.parts(piece, part):
                    self._writers[rank].add(name, cut)
                    digests[rank].update(np.ascontiguousarray(cut).data)
        self.wholes[name] = whole.hexdigest()
        for rank, digest in digests.items():
            self.parts[rank][name] = digest.hexdigest()


class _RowFilter:
    """Selects rows from the bytes of a tensor, which come in pieces."""

    def __init__(self, own: ParameterCut, num_bytes: int) -> None:
        self._row_bytes = num_bytes // own.size if own.size else 0
        self._begin = self._end = 0

    def blocks(self, pieces: Iterator[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
        """Yield the pieces."""
        for piece in pieces:
            self._begin, self._end = self._end, self._end + len(piece)
            yield piece

    def parts(self, piece: NDArray[np.uint8], rows: RowRanges) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of the rows that the piece has."""
        for start, stop in rows:
            begin = max(start * self._row_bytes, self._begin)
            end = min(stop * self._row_bytes, self._end)
            if begin < end:
                yield piece[begin - self._begin : end - self._begin]


class _Columns:
    """Selects columns from the bytes of a matrix, which come in pieces."""

    def __init__(self, own: ParameterCut, num_bytes: int) -> None:
        self._row_bytes = num_bytes // max(own.shape[0], 1)
        self._element_bytes = self._row_bytes // max(own.size, 1)

    def blocks(self, pieces: Iterator[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
        """Yield pieces of whole rows."""
        rest = np.zeros(0, np.uint8)
        for piece in pieces:
            data = np.concatenate([rest, piece]) if len(rest) else piece
            end = len(data) // self._row_bytes * self._row_bytes
            rest = data[end:].copy()
            yield data[:end]

    def parts(self, piece: NDArray[np.uint8], columns: RowRanges) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of the columns, row by row."""
        rows = piece.reshape(-1, self._row_bytes)
        ranges = [(start * self._element_bytes, stop * self._element_bytes) for start, stop in columns]
        yield np.concatenate([rows[:, start:stop] for start, stop in ranges], axis=1).reshape(-1)


def _write_sides(folder: Path, sides: Mapping[str, bytes]) -> None:
    """Write files beside the weights to the disk."""
    write_side_files(folder, sides, _write_synced)
    for home in {(folder / name).parent for name in sides} - {folder}:
        _sync_folder(home)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
