"""A sharded folder as one checkpoint: its tensors are put together when they are read, so nothing is written."""

from __future__ import annotations

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


class MergedWeights:
    """The whole tensors of a sharded folder, as a ``WeightFile``.

    ``path`` is that of the manifest, which has the checksum of every tensor; ``read`` compares with it.
    """

    def __init__(self, folder: ShardedFolder) -> None:
        self.path = folder.folder / MANIFEST
        self._folder = folder

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name."""
        return self._folder.tensors

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor in its shape, in new memory.

        Raises UnsupportedError for its element type, and InvalidFileError when its bytes are not those that were cut.
        """
        info = self.tensors[name]
        if info.dtype not in _NUMPY:
            raise UnsupportedError(
                f"{info.file}: tensor {show(name)}: dtype: expected F32, F16 or BF16, got {info.dtype.upper()}",
                param="dtype",
            )
        data, at = np.empty(info.num_bytes, np.uint8), 0
        for piece in self._folder.stream(name):
            data[at : at + len(piece)] = piece
            at += len(piece)
        return data.view(_NUMPY[info.dtype]).reshape(info.shape)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Do nothing: the memory of a tensor is the caller's."""


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
