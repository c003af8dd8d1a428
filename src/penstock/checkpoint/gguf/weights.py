"""The tensors of a GGUF file under the names and in the row order of a checkpoint folder."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import to_float32
from penstock.checkpoint.gguf.element_types import dequantize
from penstock.checkpoint.gguf.reader import GgufHeader, StoredTensor, read_header
from penstock.checkpoint.tensor_file import TensorInfo, open_regular
from penstock.errors import FileAccessError, InvalidFileError

__all__ = ["GgufFile", "GgufSource", "GgufWeights"]

_Ranges = tuple[tuple[int, int], ...]
_FLOATS: Final[dict[str, str]] = {"f32": "<f4", "f16": "<u2", "bf16": "<u2"}


@dataclass(frozen=True)
class GgufSource:
    """The source of a tensor of the checkpoint.

    ``pair_heads`` is the number of heads whose rows the file has in adjacent pairs of the rotation; 0 keeps the order.
    ``index`` selects a matrix of a tensor of three dimensions.  ``alternate`` names a tensor of the same file whose
    rows (without ``index``, columns) go between those of ``name``, the first behind the first.  ``is_row``: the vector
    is a matrix of one row.  ``rows`` are ranges [start, stop) in the order of the parameter, within the tensor;
    none means all.  ``is_log``: the parameter is the logarithm of the negated values, float32.  ``is_flat``: it
    is a vector, and the tensor a matrix.  ``is_joined``: it has the matrices of a tensor one below another.
    ``is_unit``: every row is divided by its length, in float32.  ``values``, without a ``name``: the parameter itself.
    """

    name: str
    pair_heads: int = 0
    index: int | None = None
    alternate: str = ""
    is_row: bool = False
    rows: _Ranges = ()
    is_log: bool = False
    is_flat: bool = False
    is_joined: bool = False
    is_unit: bool = False
    values: tuple[float, ...] = ()


class GgufFile:
    """A mapped GGUF file: its header, and the bytes of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = open_regular(path)
        try:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes < 4:
                raise InvalidFileError(f"{path.name}: expected a GGUF file, got {num_bytes} bytes")
            self._map = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise FileAccessError(f"{path.name}: {error.strerror}") from None
        except ValueError:  # raised by mmap
            raise InvalidFileError(f"{path.name}: the file shrank while it was opened") from None
        finally:
            os.close(descriptor)
        self.header: GgufHeader = read_header(memoryview(self._map), path.name)

    def raw(self, tensor: StoredTensor, index: int | None = None) -> NDArray[np.uint8]:
        """Return a view of the bytes of a tensor, or of its matrix ``index``."""
        begin, num_bytes = _extent(tensor, index)
        return np.frombuffer(self._map, np.uint8, num_bytes, begin)

    def release(self, tensor: StoredTensor, index: int | None = None) -> None:
        """Release the memory pages of a tensor, or of its matrix ``index``; reading maps them again."""
        begin, num_bytes = _extent(tensor, index)
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, begin + num_bytes - start)


def _extent(tensor: StoredTensor, index: int | None) -> tuple[int, int]:
    """Return the offset in the file and the size, in bytes, of a tensor or of its matrix ``index``."""
    if index is None:
        return tensor.offset, tensor.num_bytes
    num_bytes = tensor.num_bytes // tensor.shape[0]
    return tensor.offset + index * num_bytes, num_bytes


class GgufWeights:
    """The tensors of one file, by the names of a checkpoint folder.

    Floats keep their type.  Quantized tensors are float32: ``read`` computes their values, which it does not keep.
    """

    def __init__(self, file: GgufFile, sources: Mapping[str, GgufSource]) -> None:
        self.path = file.path
        self._file = file
        self._sources = sources
        self.tensors = {name: self._info(source) for name, source in sources.items()}

    def _info(self, source: GgufSource) -> TensorInfo:
        if not source.name:
            return TensorInfo("f32", (len(source.values),), self.path.name, 0, 4 * len(source.values))
        parts = self._stored(source)
        first, shape = parts[0], parts[0].shape if source.index is None else parts[0].shape[1:]
        if len(parts) > 1:
            if parts[1].shape != first.shape or len(shape) != 2:
                raise InvalidFileError(
                    f"{self.path.name}: tensor {source.alternate}: expected the shape of {source.name}, "
                    f"{list(first.shape)}, got {list(parts[1].shape)}",
                    param=source.alternate,
                )
            shape = (shape[0], 2 * shape[1]) if source.index is None else (2 * shape[0], shape[1])
        if source.is_flat:
            shape = (math.prod(shape),)
        if source.is_joined and len(shape) > 2:
            shape = (math.prod(shape[:-1]), shape[-1])
        if source.rows:
            shape = (sum(stop - start for start, stop in source.rows), *shape[1:])
        if source.is_row and len(shape) == 1:
            shape = (1, *shape)
        dtypes = {part.kind.dtype or "f32" for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 and not (source.is_log or source.is_unit) else "f32"
        num_bytes = math.prod(shape) * (4 if dtype == "f32" else 2)
        return TensorInfo(dtype, shape, self.path.name, _extent(first, source.index)[0], num_bytes)

    def _stored(self, source: GgufSource) -> list[StoredTensor]:
        """Return the tensor, and the one that alternates with it if there is one."""
        tensors = self._file.header.tensors
        if source.alternate and source.alternate not in tensors:
            raise InvalidFileError(
                f"{self.path.name}: expected tensor {source.alternate} beside {source.name}", param=source.alternate
            )
        return [tensors[name] for name in (source.name, source.alternate) if name]

    def origins(self, name: str) -> list[StoredTensor]:
        """Return the tensors of the file that a parameter comes from; [] for one whose values are those of keys."""
        source = self._sources[name]
        return self._stored(source) if source.name else []

    def file_bytes(self, name: str) -> int:
        """Return the bytes that the values of a parameter take in the file."""
        kinds = [tensor.kind for tensor in self.origins(name)]
        num_values = math.prod(self.tensors[name].shape)
        return num_values * kinds[0].block_bytes // kinds[0].block_len if kinds else 0

    def read(self, name: str) -> NDArray[Any]:
        """Return the tensor in its shape: float32, or uint16 (the bits of f16 and bf16).

        Only floats in the order of the file are views.
        """
        source, info = self._sources[name], self.tensors[name]
        if not source.name:
            return np.array(source.values, np.float32)
        arrays = []
        for stored in self._stored(source):
            data = self._file.raw(stored, source.index)
            if source.pair_heads:
                data = _rows_in_halves(data, stored.shape[0], source.pair_heads)
            if source.rows:
                data = _chosen(data.reshape(_num_rows(stored, source), -1), source.rows).reshape(-1)
            if stored.kind.dtype:
                values = data.view(_FLOATS[stored.kind.dtype])
                arrays.append(values if stored.kind.dtype == info.dtype else to_float32(values, stored.kind.dtype))
            else:
                arrays.append(dequantize(stored.kind, data))
        result = _alternating(arrays, source, info.shape).reshape(info.shape)
        if source.is_unit:
            lengths: NDArray[np.float32] = np.linalg.norm(result, axis=-1, keepdims=True)
            unit: NDArray[np.float32] = np.divide(result, lengths, out=np.zeros_like(result), where=lengths > 0)
            return unit
        return self._logarithm(source, result) if source.is_log else result

    def _logarithm(self, source: GgufSource, values: NDArray[Any]) -> NDArray[Any]:
        """Return the logarithm of the negated values, computed in float64 and rounded to float32."""
        if not (np.isfinite(values) & (values < 0)).all():
            raise InvalidFileError(
                f"{self.path.name}: tensor {source.name}: expected finite numbers below 0", param=source.name
            )
        return np.log(-values.astype(np.float64)).astype(np.float32)

    def block_scheme(self, name: str) -> str | None:
        """Return the scheme that computes with the tensor's blocks as they are; None for any other tensor."""
        source = self._sources[name]
        if source.is_unit or not source.name:
            return None
        schemes = {stored.kind.scheme for stored in self._stored(source)}
        return schemes.pop() if len(self.tensors[name].shape) == 2 and len(schemes) == 1 else None

    def widening_reason(self, name: str) -> str:
        """Return why a matrix is float32 although the file has it in fewer bits; "" for any other tensor."""
        source, info = self._sources[name], self.tensors[name]
        kinds = {stored.kind.name: stored.kind for stored in self.origins(name)}
        if len(info.shape) < 2 or self.block_scheme(name) is not None or all(k.dtype == "f32" for k in kinds.values()):
            return ""
        if source.is_unit:
            return "each row is divided by its length"
        if len(kinds) > 1:
            return f"its rows alternate with those of {source.alternate}, which has another type"
        if next(iter(kinds.values())).dtype:
            return ""
        return "it is no matrix"

    def read_blocks(self, name: str) -> NDArray[np.uint8]:
        """Return the blocks of a matrix, uint8 [rows, bytes of a row]."""
        source, shape = self._sources[name], self.tensors[name].shape
        arrays = []
        for stored in self._stored(source):
            data = self._file.raw(stored, source.index)
            if source.rows:
                data = _chosen(data.reshape(_num_rows(stored, source), -1), source.rows).reshape(-1)
            arrays.append(_rows_in_halves(data, shape[0], source.pair_heads) if source.pair_heads else data)
        blocks = _alternating(arrays, source, shape).reshape(shape[0], -1)
        kind = self._stored(source)[0].kind
        if kind.repacked is None:
            return blocks
        return kind.repacked(blocks.reshape(-1, kind.block_bytes)).reshape(shape[0], -1)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Release the memory pages of the tensor, unless only a part of it was read (``begin``, ``end``)."""
        info = self.tensors[name]
        if end is None or end == info.num_bytes:
            for stored in self._stored(self._sources[name]):
                self._file.release(stored, self._sources[name].index)


def _num_rows(stored: StoredTensor, source: GgufSource) -> int:
    """Return the number of rows of the tensor, or of its matrix that the source selects."""
    return stored.shape[0] if source.index is None else stored.shape[1]


def _chosen(values: NDArray[Any], ranges: _Ranges) -> NDArray[Any]:
    """Return the ranges of the rows of a matrix, in their order; a view of one range."""
    parts = [values[start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _alternating(arrays: list[NDArray[Any]], source: GgufSource, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the only array, or the rows of two in turn (of biases the values); ``shape`` is that of the result."""
    if len(arrays) == 1:
        return arrays[0]
    num_units = shape[0] // 2 if source.index is not None else math.prod(shape) // 2
    return np.stack([array.reshape(num_units, -1) for array in arrays], axis=1)


def _rows_in_halves(data: NDArray[np.uint8], num_rows: int, num_heads: int) -> NDArray[np.uint8]:
    """Return the rows of a query or key projection in the order of a checkpoint folder.

    llama.cpp rotates adjacent pairs of rows, so its converter stores row i of a head's first half before row i of its
    second half.  The networks here rotate row i of one half with row i of the other.  Rows are moved whole, so the
    values of quantized rows do not change.
    """
    rows = data.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
