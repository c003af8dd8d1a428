"""The tensors that a head is made of, as float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import to_float32
from penstock.checkpoint.pooling.head import HeadLayer
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import show
from penstock.errors import InvalidFileError

__all__ = ["Tensors", "read_linear", "read_rows", "read_vector"]


class Tensors(Protocol):
    """Stored tensors by name, as a Checkpoint and a TensorFile have them."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The known facts about each tensor."""

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor in its shape."""


def read_linear(stored: Tensors, name: str, activation: str) -> HeadLayer:
    """Return a linear with its bias, if it has one.  InvalidFileError for a missing tensor or a wrong shape."""
    weight = _read(stored, f"{name}.weight", 2)
    bias = _read(stored, f"{name}.bias", 1) if f"{name}.bias" in stored.tensors else None
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidFileError(
            f"tensor {name}.bias: shape: expected {[weight.shape[0]]}, got {list(bias.shape)}", param=f"{name}.bias"
        )
    return HeadLayer(weight, bias, activation)


def read_vector(stored: Tensors, name: str) -> NDArray[np.float64]:
    """Return a tensor of one dimension."""
    return _read(stored, name, 1)


def read_rows(stored: Tensors, name: str, rows: Mapping[str, int]) -> list[NDArray[np.float64]]:
    """Return rows [1, columns] of a matrix, without reading the others.

    ``rows``: their numbers by the key of the config that has them, which the InvalidFileError names.
    """
    info, weight = _check(stored, name, 2), stored.read(name)
    for key, row in rows.items():
        if not 0 <= row < len(weight):
            raise InvalidFileError(f"{key}: expected a token from 0 to {len(weight) - 1}, got {row}", param=key)
    return [_widen(weight[row : row + 1], info.dtype) for row in rows.values()]


def _read(stored: Tensors, name: str, rank: int) -> NDArray[np.float64]:
    info = _check(stored, name, rank)
    return _widen(stored.read(name), info.dtype)


def _widen(values: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # a signaling NaN
        return to_float32(np.ascontiguousarray(values), dtype).astype(np.float64)


def _check(stored: Tensors, name: str, rank: int) -> TensorInfo:
    info = stored.tensors.get(name)
    if info is None:
        raise InvalidFileError(f"the folder lacks tensor {show(name)}, which its head reads", param=name)
    if len(info.shape) != rank or info.dtype not in ("f32", "f16", "bf16"):
        raise InvalidFileError(
            f"{info.file}: tensor {show(name)}: expected floats in {rank} dimensions, got {info.dtype} "
            f"{list(info.shape)}",
            param=name,
        )
    return info
