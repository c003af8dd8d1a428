"""The tensors of a GGUF file under the names and in the row order of a checkpoint folder."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.element_types import dequantize
from penstock.checkpoint.gguf.reader import GgufHeader, StoredTensor, read_header
from penstock.checkpoint.tensor_file import TensorInfo, open_regular
from penstock.errors import FileAccessError, InvalidFileError

__all__ = ["GgufFile", "GgufWeights", "Source"]

_FLOATS: Final[dict[str, str]] = {"f32": "<f4", "f16": "<u2", "bf16": "<u2"}


@dataclass(frozen=True)
class Source:
    """Where a tensor of the checkpoint comes from.

    ``pair_heads`` is the number of heads whose rows the file has in adjacent pairs of the rotation; 0 keeps the order.
    """

    name: str
    pair_heads: int = 0


class GgufFile:
    """A mapped GGUF file: its header, and the bytes of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = open_regular(path)
        try:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes < 4:
                raise InvalidFileError(f"{path.name}: expected a GGUF file, found {num_bytes} bytes")
            self._map = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise FileAccessError(f"{path.name}: {error.strerror}") from None
        except ValueError:  # raised by mmap
            raise InvalidFileError(f"{path.name}: the file shrank while it was opened") from None
        finally:
            os.close(descriptor)
        self.header: GgufHeader = read_header(memoryview(self._map), path.name)

    def raw(self, tensor: StoredTensor) -> NDArray[np.uint8]:
        """Return a view of the bytes of a tensor."""
        return np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)

    def release(self, tensor: StoredTensor) -> None:
        """Release the memory pages of a tensor; reading maps them again."""
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.num_bytes - start)


class GgufWeights:
    """The tensors of one file, by the names of a checkpoint folder.

    Floats keep their type.  Quantized tensors are float32: ``read`` computes their values, which it does not keep.
    """

    def __init__(self, file: GgufFile, sources: Mapping[str, Source]) -> None:
        self.path = file.path
        self._file = file
        self._sources = sources
        self.tensors = {name: self._info(source) for name, source in sources.items()}

    def _info(self, source: Source) -> TensorInfo:
        stored = self._stored(source)
        dtype = stored.kind.dtype or "f32"
        num_bytes = int(np.prod(stored.shape, dtype=np.int64)) * (4 if dtype == "f32" else 2)
        return TensorInfo(dtype, stored.shape, self.path.name, stored.offset, num_bytes)

    def _stored(self, source: Source) -> StoredTensor:
        return self._file.header.tensors[source.name]

    def read(self, name: str) -> NDArray[Any]:
        """Return the tensor in its shape: float32, or uint16 (the bits of f16 and bf16).

        Only floats in the order of the file are views.
        """
        source = self._sources[name]
        stored = self._stored(source)
        data = self._file.raw(stored)
        if source.pair_heads:
            data = _rows_in_halves(data, stored.shape[0], source.pair_heads)
        if stored.kind.dtype:
            return data.view(_FLOATS[stored.kind.dtype]).reshape(stored.shape)
        return dequantize(stored.kind, data).reshape(stored.shape)

    def block_scheme(self, name: str) -> str | None:
        """Return the scheme that computes with the tensor's blocks as they are; None for any other tensor."""
        stored = self._stored(self._sources[name])
        return stored.kind.scheme if len(stored.shape) == 2 else None

    def read_blocks(self, name: str) -> NDArray[np.uint8]:
        """Return the blocks of a matrix, uint8 [rows, bytes of a row]."""
        source = self._sources[name]
        stored = self._stored(source)
        data = self._file.raw(stored)
        if source.pair_heads:
            data = _rows_in_halves(data, stored.shape[0], source.pair_heads)
        return data.reshape(stored.shape[0], -1)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Release the memory pages of the tensor, unless only a part of it was read (``begin``, ``end``)."""
        info = self.tensors[name]
        if end is None or end == info.num_bytes:
            self._file.release(self._stored(self._sources[name]))


def _rows_in_halves(data: NDArray[np.uint8], num_rows: int, num_heads: int) -> NDArray[np.uint8]:
    """Return the rows of a query or key projection in the order of a checkpoint folder.

    llama.cpp rotates adjacent pairs of rows, so its converter stores row i of a head's first half before row i of its
    second half.  The networks here rotate row i of one half with row i of the other.  Rows are moved whole, so the
    values of quantized rows do not change.
    """
    rows = data.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
