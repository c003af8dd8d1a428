"""Open the files of a quantized folder under the names and in the forms of a float checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.quantized.awq import awq_matrices
from penstock.checkpoint.quantized.bitnet import bitnet_matrices
from penstock.checkpoint.quantized.compressed import compressed_matrices
from penstock.checkpoint.quantized.float4 import modelopt_matrices
from penstock.checkpoint.quantized.float8 import float8_matrices
from penstock.checkpoint.quantized.gptq import gptq_matrices
from penstock.checkpoint.quantized.matrix import QuantizedMatrix, to_blocks
from penstock.checkpoint.quantized.stored import StoredTensors
from penstock.checkpoint.tensor_file import TensorFile, TensorInfo
from penstock.config import ConfigReader, show
from penstock.core.native import QuantizedRows
from penstock.errors import InvalidFileError

__all__ = ["QuantizedWeights", "open_quantized", "rounding_note"]

_READERS: Final[dict[str, Callable[[ConfigReader, StoredTensors], dict[str, QuantizedMatrix]]]] = {
    "gptq": gptq_matrices,
    "awq": awq_matrices,
    "compressed-tensors": compressed_matrices,
    "fp8": float8_matrices,
    "modelopt": modelopt_matrices,
    "bitnet": bitnet_matrices,
}


class QuantizedWeights:
    """The tensors of one file: quantized matrices by the names of a float checkpoint, and the others as they are.

    A quantized matrix is float32: ``read`` computes its values, which it does not keep.
    """

    def __init__(self, file: TensorFile, matrices: Mapping[str, QuantizedMatrix], stored: StoredTensors) -> None:
        self.path = file.path
        self._file, self._stored = file, stored
        self._matrices = {name: matrix for name, matrix in matrices.items() if stored.file(matrix.tensors[0]) is file}
        hidden = {name for matrix in matrices.values() for name in matrix.tensors}
        self.tensors: dict[str, TensorInfo] = {n: info for n, info in file.tensors.items() if n not in hidden}
        for name, matrix in self._matrices.items():
            if name in self.tensors:
                raise InvalidFileError(
                    f"{self.path.name}: tensor {show(name)}: found its quantized form too", param=name
                )
            offset = file.tensors[matrix.tensors[0]].offset
            self.tensors[name] = TensorInfo("f32", matrix.shape, self.path.name, offset, 4 * int(np.prod(matrix.shape)))
        self.errors: dict[str, float] = {}
        """The relative error of each matrix that ``read_blocks`` rounded."""

    @property
    def num_matrices(self) -> int:
        """The number of quantized matrices."""
        return len(self._matrices)

    def is_quantized(self, name: str) -> bool:
        """Return True for a quantized matrix."""
        return name in self._matrices

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor in its shape: float32, or what ``TensorFile.read`` returns."""
        matrix = self._matrices.get(name)
        return self._file.read(name) if matrix is None else matrix.values()

    def block_scheme(self, name: str) -> str | None:
        """Return the scheme of a quantized matrix: whose blocks it becomes, or of its rows; None for other tensors."""
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.scheme

    def read_blocks(self, name: str) -> NDArray[np.uint8]:
        """Return the blocks of a matrix that has a ``block_scheme``, uint8 [rows, bytes of a row]."""
        matrix = self._matrices[name]
        blocks = to_blocks(matrix.read(), matrix.scheme or "q8_0")
        if blocks.error:
            self.errors[name] = blocks.error
        return blocks.data

    def read_rows(self, name: str) -> QuantizedRows:
        """Return the integers and scales, as they are stored, of a matrix whose ``block_scheme`` is one of rows."""
        return self._matrices[name].rows()

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Release the memory pages of a tensor, or of what a whole matrix was read from."""
        matrix = self._matrices.get(name)
        if matrix is None:
            self._file.release(name, begin, end)
        elif end is None or end == self.tensors[name].num_bytes:
            self._stored.release(matrix.tensors)


def open_quantized(section: ConfigReader, files: Sequence[TensorFile]) -> list[QuantizedWeights]:
    """Return the files of a folder whose ``quantization_config`` is ``section``, in their order.

    Raises UnsupportedError, which names the key, for a setting that Penstock does not read, and InvalidFileError, which
    names the tensor, for one that is missing or has another type or shape.
    """
    stored = StoredTensors(files)
    matrices = _READERS[section.str("quant_method")](section, stored)
    if not matrices:
        raise InvalidFileError(f"{section.file}: expected quantized tensors in the files, got none")
    return [QuantizedWeights(file, matrices, stored) for file in files]


def rounding_note(files: Sequence[object]) -> str:
    """Return what the blocks that were read differ by from the stored values; "" if they are exact."""
    quantized = [file for file in files if isinstance(file, QuantizedWeights)]
    errors = [error for file in quantized for error in file.errors.values()]
    if not errors:
        return ""
    total = sum(file.num_matrices for file in quantized)
    return (
        f"{len(errors)} of {total} quantized tensors have no exact form here and "
        f"are rounded to 8 bits with a scale for 32 columns: relative error {max(errors):.2g} at most, "
        f"{sum(errors) / len(errors):.2g} on average"
    )
