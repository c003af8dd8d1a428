"""The whole tensors of a model, from a checkpoint folder or from a sharded one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.pooling.files import make_pooling_head
from penstock.checkpoint.pooling.head import POOLING_FILE
from penstock.checkpoint.side_files import model_folder, read_small_file
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import ConfigReader
from penstock.sharding.folder import WEIGHTS, ShardedFolder, is_sharded, kept_files, stream_tensor

__all__ = ["INDEX", "PlainFolder", "WholeTensors", "open_whole"]

INDEX: Final = "model.safetensors.index.json"
_INDEX_BYTES: Final = 64 << 20


class WholeTensors(Protocol):
    """The tensors of a model by name, as the files of a checkpoint folder have them."""

    @property
    def config(self) -> ConfigReader:
        """The reader of config.json."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The type, shape and place of each tensor."""

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The header of each file of weights, by its name."""

    @property
    def index(self) -> bytes | None:
        """model.safetensors.index.json, if there are several files and it exists."""

    def redundant_names(self) -> set[str]:
        """Return the names of tensors that no network reads."""

    def choose_scheme(self, scheme: str | None) -> str:
        """Return the requested scheme, or that of the weights; raises what ``Checkpoint.choose_scheme`` raises."""

    def stream(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of a tensor in pieces."""

    def read_sides(self) -> dict[str, bytes]:
        """Return the files beside the weights."""

    def make_sides(self) -> dict[str, bytes]:
        """Return files that ranks need beside those, because they are made from whole tensors: a pooling head."""


class PlainFolder:
    """The tensors of a checkpoint folder."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = Checkpoint.open(path)
        self.config = self.checkpoint.config
        self._files = {name: file for file in self.checkpoint.tensor_files for name in file.tensors}
        self.tensors = {name: file.tensors[name] for name, file in self._files.items()}

    @property
    def headers(self) -> dict[str, bytes]:
        """The header of each file of weights, by its name."""
        return {file.path.name: file.header for file in self.checkpoint.tensor_files}

    @property
    def index(self) -> bytes | None:
        """model.safetensors.index.json, if there are several files and it exists."""
        path = model_folder(self.checkpoint.folder) / INDEX
        if list(self.headers) == [WEIGHTS] or not path.exists():
            return None
        return read_small_file(path, _INDEX_BYTES)

    def redundant_names(self) -> set[str]:
        """Return the names of tensors that no network reads."""
        return self.checkpoint.redundant_names()

    def choose_scheme(self, scheme: str | None) -> str:
        """Return the requested scheme, or that of the weights."""
        return self.checkpoint.choose_scheme(scheme)

    def stream(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of a tensor in pieces."""
        return stream_tensor(self._files[name], name, 0, self.tensors[name].num_bytes)

    def read_sides(self) -> dict[str, bytes]:
        """Return the files beside the weights."""
        return kept_files(self.checkpoint.folder)

    def make_sides(self) -> dict[str, bytes]:
        """Return the pooling head that the files beside the weights and the tensors describe, if they do."""
        folder = self.checkpoint.folder
        if (folder / POOLING_FILE).exists():
            return {}
        head = make_pooling_head(folder, self.config, self.checkpoint)
        return {} if head is None else {POOLING_FILE: head.to_bytes()}


def open_whole(path: Path) -> WholeTensors:
    """Open a checkpoint folder or a sharded one; raises what ``Checkpoint.open`` and ``ShardedFolder.open`` raise."""
    return ShardedFolder.open(path) if is_sharded(path) else PlainFolder(path)
