"""A sharded folder as one checkpoint: its tensors are put together when they are read, so nothing is written."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import show
from penstock.errors import UnsupportedError
from penstock.sharding.folder import MANIFEST, ShardedFolder, is_sharded

__all__ = ["MergedWeights", "open_checkpoint"]

_NUMPY: Final = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16, "i8": np.int8, "u8": np.uint8}

_STACKED_DIMS: Final = 3
_MAX_KEPT: Final = 4
"""The stacked tensors that are kept: the blocks and scales of both projections of the experts of a layer."""


class MergedWeights:
    """The whole tensors of a sharded folder, as a ``WeightFile``.

    Each expert of a stacked tensor is read by itself, so the last few of those are kept, until others are read.
    ``path`` is that of the manifest, which has the checksum of every tensor; ``read`` compares with it.
    """

    def __init__(self, folder: ShardedFolder) -> None:
        self.path = folder.folder / MANIFEST
        self._folder = folder
        self._kept: dict[str, NDArray[Any]] = {}
        self._lock = threading.Lock()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name."""
        return self._folder.tensors

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor in its shape, in memory of this process, which is not written to.

        Raises UnsupportedError for its element type, and InvalidFileError when its bytes are not those that were cut.
        """
        with self._lock:
            kept = self._kept.get(name)
        if kept is not None:
            return kept
        info = self.tensors[name]
        if info.dtype not in _NUMPY:
            raise UnsupportedError(
                f"{info.file}: tensor {show(name)}: dtype: expected F32, F16 or BF16, got {info.dtype.upper()}",
                param=name,
            )
        if len(info.shape) >= _STACKED_DIMS:
            with self._lock:
                while len(self._kept) >= _MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
        data, at = np.empty(info.num_bytes, np.uint8), 0
        for piece in self._folder.stream(name):
            data[at : at + len(piece)] = piece
            at += len(piece)
        values = data.view(_NUMPY[info.dtype]).reshape(info.shape)
        if len(info.shape) >= _STACKED_DIMS:
            values.flags.writeable = False
            with self._lock:
                self._kept[name] = values
        return values

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Do nothing: the memory of a tensor is the caller's, and one that is kept is read again."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder, a GGUF file, or a sharded folder as the whole model that was cut.

    Raises what ``Checkpoint.open`` and ``ShardedFolder.open`` raise.
    """
    if not path.is_dir() or not is_sharded(path):
        return Checkpoint.open(path)
    folder = ShardedFolder.open(path)
    for rank in range(folder.strategy.world):
        folder.file(rank)  # a missing one is named before any work
    return Checkpoint(path, folder.config, [MergedWeights(folder)])
