"""A sharded folder: ``rank_0/``, ``rank_1/`` ... with a rank's rows each, and the files beside them.

``manifest.json`` is written last.  It has the checksum of every tensor, of the whole and of each rank, and the headers
of the files that were cut, so that merging writes those files again, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.folder import Checkpoint, stored_dtype
from penstock.checkpoint.pooling.files import MODULE_FILE, POOLING_INPUTS, pooling_files
from penstock.checkpoint.side_files import (
    SIDE_FILES,
    TEMPLATE_FILE,
    model_folder,
    read_modules,
    read_small_file,
    template_files,
)
from penstock.checkpoint.stored.tied_head import find_tied, may_untie, with_stored_head
from penstock.checkpoint.tensor_file import TensorFile, TensorInfo, parse_header
from penstock.checkpoint.tokenizer_files.names import TOKENIZER_INPUTS
from penstock.config import ConfigReader, check_integer, parse_object, show
from penstock.core.comm import MAX_RANKS
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.sharding.names import MANIFEST, is_sharded, rank_bundle, rank_name
from penstock.sharding.strategy import ParameterCut, Strategy

__all__ = [
    "MANIFEST", "STRATEGY", "WEIGHTS", "Manifest", "ShardedFolder", "is_sharded", "kept_files", "rank_bundle",
    "rank_name", "stream_tensor",
]  # fmt: skip

STRATEGY: Final = "strategy.json"
WEIGHTS: Final = "model.safetensors"
_KEPT_FILES: Final = (
    *SIDE_FILES, *TOKENIZER_INPUTS, *POOLING_INPUTS,
)  # fmt: skip
_FORMAT: Final = "penstock sharded checkpoint"
_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 30
_MAX_VALUES: Final = 1 << 25
_PIECE_BYTES: Final = 8 << 20


def kept_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint folder that a copy keeps beside its weights, by name.

    Those of a module of sentence-transformers and further chat templates have a folder in their names.  The files of a
    first module with a folder of its own, such as 0_Transformer, lie beside the weights of the copy, and modules.json
    says so.  Raises what ``pooling_files`` raises.
    """
    home = model_folder(folder)
    names = [name for name in _KEPT_FILES if (home / name).exists()]
    files = {name: read_small_file(home / name) for name in [*names, *template_files(home)]}
    for name in pooling_files(folder):
        if home == folder or not name.startswith(f"{home.name}/"):
            files[name] = read_small_file(folder / name)
    if home != folder:
        modules = [module.values for module in read_modules(folder)]
        modules[0]["path"] = ""
        files["modules.json"] = (json.dumps(modules, indent=2) + "\n").encode()
    return files


def stream_tensor(file: TensorFile, name: str, begin: int, end: int) -> Iterator[NDArray[np.uint8]]:
    """Yield bytes ``begin`` to ``end`` of a tensor in pieces, whose memory is released when the next is asked for."""
    while begin < end:
        stop = min(end, begin + _PIECE_BYTES)
        yield file.read_bytes(name, begin, stop)
        file.release(name, begin, stop)
        begin = stop


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``.

    ``strategy``: the checksum of strategy.json.  ``headers``: those of the whole files, by name.  ``index``:
    model.safetensors.index.json, or None.  ``sides``: the SHA-256 of each file beside the ranks.  ``wholes``: of each
    tensor.  ``parts``: by rank, of each tensor that the rank has.  ``made``: those of ``sides`` that were made from
    whole tensors, because no rank has these; the source lacks them.
    """

    strategy: str
    headers: Mapping[str, bytes]
    index: bytes | None
    sides: Mapping[str, str]
    wholes: Mapping[str, str]
    parts: tuple[Mapping[str, str], ...]
    made: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Return the file."""
        values = {
            "format": _FORMAT,
            "version": _VERSION,
            "strategy": self.strategy,
            "headers": {name: header.decode() for name, header in self.headers.items()},
            "index": None if self.index is None else self.index.decode(),
            "sides": dict(self.sides),
            **({"made": list(self.made)} if self.made else {}),
            "wholes": dict(self.wholes),
            "parts": [dict(part) for part in self.parts],
        }
        body = json.dumps(values, indent=0).encode()
        return b'{"sha256": "%s",\n"manifest": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read and check the file; InvalidFileError names the field."""
        values = parse_object(data, MANIFEST, max_bytes=_MAX_BYTES, max_values=_MAX_VALUES)
        if set(values) != {"sha256", "manifest"}:
            raise InvalidFileError(
                f"{MANIFEST}: expected the fields sha256 and manifest, got {show(sorted(values))}", param="manifest"
            )
        body = data[data.find(b'"manifest": ') + 12 : -2]
        if hashlib.sha256(body).hexdigest() != values["sha256"]:
            raise InvalidFileError(f"{MANIFEST}: sha256: the file was changed or is incomplete", param="sha256")
        reader = ConfigReader(values, MANIFEST).object("manifest") or ConfigReader({}, MANIFEST)
        if reader.str("format") != _FORMAT:
            raise reader.error("format", show(_FORMAT), reader.values["format"])
        if reader.int("version") != _VERSION:
            raise UnsupportedError(
                f"{MANIFEST}: version: expected {_VERSION}, got {reader.values['version']}", param="version"
            )
        parts = reader.values.get("parts")
        if not isinstance(parts, list) or not 0 < len(parts) <= MAX_RANKS:
            raise reader.error("parts", f"a list of 1 to {MAX_RANKS} ranks", parts)
        index = reader.optional_str("index", max_len=_MAX_BYTES)
        return cls(
            reader.str("strategy"),
            {_file_name(name): header.encode() for name, header in _strings(reader, "headers").items()},
            None if index is None else index.encode(),
            _strings(reader, "sides"),
            _strings(reader, "wholes"),
            tuple(_strings(ConfigReader({"parts": part}, MANIFEST), "parts") for part in parts),
            tuple(reader.text_list("made") or ()),
        )


def _strings(reader: ConfigReader, key: str) -> dict[str, str]:
    section = reader.values.get(key)
    if not isinstance(section, dict) or not all(isinstance(value, str) for value in section.values()):
        raise reader.error(key, "strings by name", section)
    return section


def _file_name(name: str) -> str:
    """Return the name of a file of whole weights, which lies in the folder itself."""
    if not name.endswith(".safetensors") or name.startswith(".") or "/" in name or not name.isprintable():
        raise InvalidFileError(
            f"{MANIFEST}: headers: expected names of .safetensors files, got {show(name)}", param="headers"
        )
    return name


class ShardedFolder:
    """An open sharded folder: ``config``, ``strategy``, ``manifest``, ``tensors`` (of the whole, by name).

    Only the files of the ranks that are read must exist.
    """

    def __init__(self, folder: Path, config: ConfigReader, strategy: Strategy, manifest: Manifest) -> None:
        self.folder, self.config, self.strategy, self.manifest = folder, config, strategy, manifest
        self._files: dict[int, TensorFile] = {}
        self.tensors = self._whole_tensors()

    @classmethod
    def open(cls, path: Path) -> ShardedFolder:
        """Open and check a folder.  Raises InvalidFileError, which names the file and the field, and UnsupportedError.

        The bytes of tensors are checked when they are read.
        """
        if not (path / MANIFEST).exists():
            raise InvalidFileError(
                f"{path}: expected {MANIFEST}, got none: `penstock shard` did not finish, or did not make this folder",
                param="path",
            )
        manifest = Manifest.parse(read_small_file(path / MANIFEST, _MAX_BYTES))
        if not (path / STRATEGY).exists():
            raise InvalidFileError(f"{path}: expected {STRATEGY}, got no file", param="path")
        strategy = Strategy.read(path / STRATEGY)
        if strategy.checksum != manifest.strategy:
            raise InvalidFileError(
                f"{path / STRATEGY}: expected the one that {MANIFEST} was written with, got another", param="strategy"
            )
        if len(manifest.parts) != strategy.world:
            raise InvalidFileError(
                f"{MANIFEST}: parts: expected {strategy.world} ranks, got {len(manifest.parts)}", param="parts"
            )
        config = ConfigReader.parse(read_small_file(path / "config.json"), "config.json")
        config = with_stored_head(config, lambda: _has_own_head(strategy.parameters, manifest.wholes))
        folder = cls(path, config, strategy, manifest)
        folder.check_sides()
        strategy.check_model(config, folder.tensors, path)
        folder.check_names()
        return folder

    def _whole_tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors that the headers of the whole files describe."""
        tensors: dict[str, TensorInfo] = {}
        for file, header in self.manifest.headers.items():
            tensors |= parse_header(header, 8 + len(header), _file_bytes(header, file), file)
        return tensors

    def check_names(self) -> None:
        """Check that the manifest has a checksum for each tensor."""
        expected = [(self.manifest.wholes, set(self.strategy.parameters))]
        for rank, part in enumerate(self.manifest.parts):
            expected.append((part, set(self.strategy.shapes_of(rank))))
        for checksums, names in expected:
            wrong = next(iter(checksums.keys() ^ names), None)
            if wrong is not None:
                raise InvalidFileError(
                    f"{MANIFEST}: expected the tensors of {STRATEGY}, got {show(wrong)} in one only", param=wrong
                )

    def check_sides(self) -> None:
        """Check the files beside the ranks against the manifest."""
        for name, checksum in self.manifest.sides.items():
            if name not in _KEPT_FILES and not any(form.fullmatch(name) for form in (MODULE_FILE, TEMPLATE_FILE)):
                raise InvalidFileError(f"{MANIFEST}: sides: {show(name)} is not a file of a checkpoint", param="sides")
            if not (self.folder / name).exists():
                raise InvalidFileError(f"{self.folder}: expected {name}, got no file", param="sides")
            if hashlib.sha256(read_small_file(self.folder / name)).hexdigest() != checksum:
                raise InvalidFileError(
                    f"{name}: expected the checksum in {MANIFEST}, got another: it was changed", param="sides"
                )

        wrong = next((name for name in self.manifest.made if name not in self.manifest.sides), None)
        if wrong is not None:
            raise InvalidFileError(f"{MANIFEST}: made: {show(wrong)} is not one of sides", param="made")

    def file(self, rank: int) -> TensorFile:
        """Return the open file of a rank.  InvalidFileError names a tensor that differs from the strategy."""
        if rank not in self._files:
            path = self.folder / rank_name(rank) / WEIGHTS
            if not path.exists():
                raise InvalidFileError(
                    f"{self.folder}: expected {rank_name(rank)}/{WEIGHTS}, got no file", param="path"
                )
            file = TensorFile(path)
            where = f"{rank_name(rank)}/{WEIGHTS}"
            parameters = self.strategy.parameters
            expected = {name: (parameters[name].dtype, shape) for name, shape in self.strategy.shapes_of(rank).items()}
            for name in sorted(expected.keys() ^ file.tensors.keys()):
                kind = "lacks" if name in expected else "has"
                raise InvalidFileError(f"{where} {kind} tensor {show(name)}, unlike {STRATEGY}", param=name)
            for name, (dtype, shape) in expected.items():
                info = file.tensors[name]
                if (info.dtype, info.shape) != (dtype, shape):
                    raise InvalidFileError(
                        f"{where}: tensor {show(name)}: expected {dtype} of {list(shape)}, got {info.dtype} of "
                        f"{list(info.shape)}",
                        param=name,
                    )
            self._files[rank] = file
        return self._files[rank]

    def rank(self, rank: int, *, verify: bool = True) -> Checkpoint:
        """Return a rank's part as a checkpoint; with ``verify`` its bytes are compared with the manifest."""
        check_integer("rank", rank, 0, self.strategy.world - 1)
        file = self.file(rank)
        for name, checksum in self.manifest.parts[rank].items() if verify else ():
            digest = hashlib.sha256()
            for piece in stream_tensor(file, name, 0, file.tensors[name].num_bytes):
                digest.update(piece.data)
            if digest.hexdigest() != checksum:
                raise _damaged(f"{rank_name(rank)}/{WEIGHTS}", name)
        checkpoint = Checkpoint(self.folder, self.config, [file])
        checkpoint.config = self.config  # a rank's part of the embedding does not say whether the head equals it
        checkpoint.keeps_mxfp4 = self.config.has_mxfp4() and any(name.endswith("_blocks") for name in self.tensors)
        if checkpoint.scheme is None:
            checkpoint.dtype = stored_dtype(self.config, self.tensors)
        return checkpoint

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The header of each whole file, by its name."""
        return self.manifest.headers

    @property
    def index(self) -> bytes | None:
        """model.safetensors.index.json, if there were several files."""
        return self.manifest.index

    def redundant_names(self) -> set[str]:
        """Return the names of tensors that no network reads."""
        return {name for name, own in self.strategy.parameters.items() if own.cut in ("same", "owner")}

    def choose_scheme(self, scheme: str | None) -> str:
        """Return the requested scheme, or that of the weights."""
        return self.rank(0, verify=False).choose_scheme(scheme)

    def stream(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of a whole tensor in pieces, in the order of its rows.

        Raises InvalidFileError at the end if they differ from those that were cut.
        """
        own = self.strategy.parameters[name]
        if own.cut == "same":
            yield from self.stream(own.name)
            return
        digest = hashlib.sha256()
        pieces = self._stream_columns(name, own) if own.cut == "columns" else self._stream_rows(name, own)
        for piece in pieces:
            digest.update(piece.data)
            yield piece
        if digest.hexdigest() != self.manifest.wholes[name]:
            raise _damaged(str(self.folder), name)

    def _stream_rows(self, name: str, own: ParameterCut) -> Iterator[NDArray[np.uint8]]:
        for rank, begin, end in _spans(own, self.strategy.layout, self.tensors[name].num_bytes):
            yield from stream_tensor(self.file(rank), name, begin, end)

    def _stream_columns(self, name: str, own: ParameterCut) -> Iterator[NDArray[np.uint8]]:
        """Yield blocks of whole rows, which the columns of the ranks make up."""
        num_rows, layout = own.shape[0], self.strategy.layout
        row_bytes = self.tensors[name].num_bytes // max(num_rows, 1)
        if not row_bytes:
            return
        element_bytes = row_bytes // own.size
        ranks = [layout.rank_of(own.stages[0], place) for place in range(layout.stage_ranks)]
        step = max(1, _PIECE_BYTES // row_bytes)
        for start in range(0, num_rows, step):
            stop = min(num_rows, start + step)
            block = np.empty((stop - start, row_bytes), np.uint8)
            for rank, columns in zip(ranks, own.ranges, strict=True):
                width, at = element_bytes * sum(last - first for first, last in columns), 0
                part = self.file(rank).read_bytes(name, start * width, stop * width).reshape(-1, width)
                for first, last in columns:
                    own_bytes = (last - first) * element_bytes
                    block[:, first * element_bytes : last * element_bytes] = part[:, at : at + own_bytes]
                    at += own_bytes
                self.file(rank).release(name, start * width, stop * width)
            yield block.reshape(-1)

    def read_sides(self) -> dict[str, bytes]:
        """Return the files beside the ranks that the whole folder has."""
        made = self.manifest.made
        return {name: read_small_file(self.folder / name) for name in self.manifest.sides if name not in made}

    def make_sides(self) -> dict[str, bytes]:
        """Return the files beside the ranks that were made from whole tensors."""
        return {name: read_small_file(self.folder / name) for name in self.manifest.made}


def _has_own_head(parameters: Mapping[str, ParameterCut], wholes: Mapping[str, str]) -> bool:
    """Return True if the folder that was cut has an output head that differs from its embedding."""
    tied = find_tied(parameters)
    if tied is None or not may_untie(parameters):
        return False
    embedding, head = ((parameters[name].dtype, parameters[name].shape, wholes.get(name)) for name in tied)
    return embedding != head


def _damaged(where: str, name: str) -> InvalidFileError:
    return InvalidFileError(
        f"{where}: tensor {show(name)}: expected the checksum in {MANIFEST}, got another", param=name
    )


def _file_bytes(header: bytes, file: str) -> int:
    """Return the size of the file that a header describes."""
    values: dict[str, Any] = parse_object(header, f"{MANIFEST}: headers: {file}", max_bytes=_MAX_BYTES)
    entries = (entry for name, entry in values.items() if name != "__metadata__" and isinstance(entry, dict))
    ends = [entry.get("data_offsets") for entry in entries]
    last = [pair[1] for pair in ends if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int)]
    return 8 + len(header) + max(last, default=0)


def _spans(own: ParameterCut, layout: RankLayout, num_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, begin, end): the bytes of a rank's part that make the whole, row by row."""
    if own.cut != "rows":
        yield (own.rank if own.cut == "owner" else layout.rank_of(own.stages[0], 0), 0, num_bytes)
        return
    row_bytes = num_bytes // own.size if own.size else 0
    places = []
    for place, rows in enumerate(own.ranges):
        local = 0
        for start, stop in rows:
            places.append((start, stop, layout.rank_of(own.stages[0], place), local))
            local += stop - start
    done = 0
    for start, stop, rank, local in sorted(places):
        if stop > done:
            begin = local + max(done, start) - start
            yield rank, begin * row_bytes, (local + stop - start) * row_bytes
            done = stop
