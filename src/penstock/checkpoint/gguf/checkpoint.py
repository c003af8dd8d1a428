"""Open a GGUF file, or the first of the files that a model is split into, as the parts of a checkpoint."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.gguf.architectures.table import find_architecture
from penstock.checkpoint.gguf.file_name import MAX_SPLITS, split_names
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.network import config_values, constant_sources, tensor_sources
from penstock.checkpoint.gguf.pooling import pooling_head
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.rope import ROPE_TENSORS
from penstock.checkpoint.gguf.tokenizer import TOKENIZER_FILES, has_tokenizer, tokenizer_files
from penstock.checkpoint.gguf.weights import GgufFile, GgufSource, GgufWeights
from penstock.checkpoint.pooling.head import POOLING_FILE
from penstock.config import ConfigReader, show
from penstock.errors import InvalidFileError

if TYPE_CHECKING:
    from penstock.checkpoint.pooling.head import PoolingHead

__all__ = ["GgufParts", "GgufSideFiles", "open_gguf"]


@dataclass(frozen=True)
class GgufParts:
    """The configuration, the weights of each file, and the files beside the weights."""

    config: ConfigReader
    weights: list[GgufWeights]
    side_files: GgufSideFiles


def open_gguf(path: Path) -> GgufParts:
    """Open and check a GGUF file.

    Raises InvalidFileError (damaged), UnsupportedError (an architecture, a key, a tokenizer or an element type that
    Penstock does not read, by name) or FileAccessError.
    """
    files = _open_files(path)
    metadata = Metadata(files[0].header.metadata, path.name)
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in file.header.tensors.items():
            if name in stored:
                raise InvalidFileError(
                    f"{file.path.name}: tensor {show(name)}: found in another file of the model too", param=name
                )
            stored[name] = tensor
    factors = {}
    for file, name in itertools.product(files, ROPE_TENSORS):
        if name in file.header.tensors:
            weights = GgufWeights(file, {name: GgufSource(name)})
            if weights.tensors[name].dtype != "f32":
                raise InvalidFileError(f"{file.path.name}: tensor {name}: expected F32", param=name)
            factors[name] = weights.read(name).reshape(-1)
    values = config_values(metadata, stored, factors)
    config = json.dumps(values).encode()
    sources = tensor_sources(metadata, stored)
    sources |= constant_sources(metadata)
    homes = [
        GgufWeights(
            file,
            {
                name: source
                for name, source in sources.items()
                if source.name in file.header.tensors or (file is files[0] and not source.name)
            },
        )
        for file in files
    ]

    return GgufParts(ConfigReader.parse(config, path.name), homes, GgufSideFiles(config, metadata, files))


class GgufSideFiles:
    """The files beside the weights, which are made of the metadata; ``config`` is the configuration."""

    def __init__(self, config: bytes, metadata: Metadata, files: list[GgufFile]) -> None:
        self._config, self._metadata, self._files = config, metadata, files

    @cached_property
    def _head(self) -> PoolingHead | None:
        name, architecture = find_architecture(self._metadata)
        return pooling_head(self._metadata, name, self._files, architecture.head_parts)

    def names(self) -> list[str]:
        """Return the names, without making the tokenizer."""
        head = [] if self._head is None else [POOLING_FILE]
        return ["config.json", *(TOKENIZER_FILES if has_tokenizer(self._metadata) else ()), *head]

    def make(self) -> dict[str, bytes]:
        """Return the files by name."""
        vocab_size = json.loads(self._config)["vocab_size"]
        made = {"config.json": self._config, **tokenizer_files(self._metadata, vocab_size)}
        return made if self._head is None else {**made, POOLING_FILE: self._head.to_bytes()}


def _open_files(path: Path) -> list[GgufFile]:
    """Open the file, and the others that its model is split into."""
    first = GgufFile(path)
    metadata = Metadata(first.header.metadata, path.name)
    count = metadata.integer("split.count", 1, max=MAX_SPLITS)
    if count <= 1:
        return [first]
    names = split_names(path.name)
    if len(names) != count:
        raise InvalidFileError(
            f"{path.name}: expected a name that ends in -00001-of-{count:05d}.gguf, because the model is split into "
            f"{count} files"
        )
    if metadata.integer("split.no") != 0:
        raise InvalidFileError(f"{path.name}: expected the first of {count} files, {names[0]}")
    files = [first]
    for number, name in enumerate(names[1:], 1):
        file = GgufFile(path.parent / name)
        if Metadata(file.header.metadata, name).integer("split.no") != number:
            raise InvalidFileError(f"{name}: split.no: expected {number}", param="split.no")
        files.append(file)
    total = sum(len(file.header.tensors) for file in files)
    if metadata.integer("split.tensors.count", total) != total:
        raise metadata.error("split.tensors.count", f"{total}, the tensors of all files")
    return files
