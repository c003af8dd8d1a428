"""The tensors of a quantized folder as they are stored, each checked for its type and shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import to_float32
from penstock.checkpoint.tensor_file import TensorFile, TensorInfo
from penstock.config import show
from penstock.errors import InvalidFileError

__all__ = ["FLOAT_SCALES", "Shape", "StoredTensors", "unpack_words"]

Shape: TypeAlias = tuple[int, ...]

FLOAT_SCALES: Final = ("f16", "bf16", "f32")
_NUMPY: Final = {
    "f32": "<f4", "f16": "<u2", "bf16": "<u2", "i32": "<u4", "i64": "<i8", "i8": "i1", "u8": "u1", "f8_e4m3": "u1",
    "f8_e8m0": "u1",
}  # fmt: skip
_E8M0_BIAS: Final = 127


class StoredTensors:
    """The tensors of all files of a folder, by name."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self._home = {name: file for file in files for name in file.tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def bases(self, end: str, dtype: str | None = None) -> list[str]:
        """Return the names that end with ``end``, without it; with ``dtype`` only those of tensors of this type."""
        return [
            name.removesuffix(end)
            for name, file in self._home.items()
            if name.endswith(end) and dtype in (None, file.tensors[name].dtype)
        ]

    def file(self, name: str) -> TensorFile:
        """Return the file that has a tensor."""
        return self._home[name]

    def expect(self, name: str, dtypes: Sequence[str], shapes: Sequence[Shape] = (), *, rank: int = 0) -> TensorInfo:
        """Return a tensor's type and shape; InvalidFileError names it if it is missing or has others.

        ``shapes`` are those that it may have; with ``rank`` instead any shape of so many dimensions.
        """
        file = self._home.get(name)
        if file is None:
            raise InvalidFileError(f"expected tensor {show(name)}, which quantized weights need, got none", param=name)
        info = file.tensors[name]
        if info.dtype not in dtypes:
            raise self.error(name, "dtype", " or ".join(dtypes).upper(), info.dtype.upper())
        if rank and len(info.shape) != rank:
            raise self.error(name, "shape", f"{rank} dimensions", list(info.shape))
        if shapes and info.shape not in shapes:
            raise self.error(name, "shape", " or ".join(str(list(shape)) for shape in shapes), list(info.shape))
        return info

    def error(self, name: str, field: str, expected: str, actual: object) -> InvalidFileError:
        """Return the error of a tensor whose ``field`` is not as ``expected``."""
        file = self._home[name].path.name
        return InvalidFileError(
            f"{file}: tensor {show(name)}: {field}: expected {expected}, got {show(actual)}", param=name
        )

    def read(self, name: str) -> NDArray[Any]:
        """Return a view of a tensor: I32 as uint32, F16 and BF16 as their bits, 8-bit floats as bytes."""
        info = self._home[name].tensors[name]
        return self._home[name].read_bytes(name, 0, info.num_bytes).view(_NUMPY[info.dtype]).reshape(info.shape)

    def read_scales(self, name: str) -> NDArray[np.float32]:
        """Return a tensor of scales as float32."""
        dtype, values = self._home[name].tensors[name].dtype, self.read(name)
        if dtype == "f8_e8m0":
            return np.ldexp(np.float32(1), values.astype(np.int32) - _E8M0_BIAS).astype(np.float32)
        return to_float32(values, dtype)

    def release(self, names: Sequence[str]) -> None:
        """Release the memory pages of tensors."""
        for name in names:
            self._home[name].release(name)


def unpack_words(words: NDArray[np.uint32], bits: int, order: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """Return the unsigned integers of ``bits`` bits in words [n, m] as [n, m * 32 / bits], the lowest bits first.

    ``order``: the place among the integers of a word that its bits i*bits... have.
    """
    count = 32 // bits
    out = np.empty((*words.shape, count), np.uint8)
    for index in range(count):
        place = index if order is None else order[index]
        out[..., place] = (words >> np.uint32(bits * index)) & np.uint32((1 << bits) - 1)
    return out.reshape(len(words), words.shape[1] * count)
