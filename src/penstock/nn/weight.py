"""The base of layers with one weight matrix: logical when constructed, packed for the kernels in eager mode."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.errors import InvalidArgumentError
from penstock.nn.base import Tensor, nn, torch
from penstock.nn.module import Module
from penstock.quant.hadamard import restore_weight
from penstock.quant.scheme import find_scheme

__all__ = ["MatrixLayer", "WeightPart"]

MAX_ELEMENTS = 1 << 44


class WeightPart(NamedTuple):
    """The rows of a matrix that one tensor of a checkpoint has."""

    name: str
    row_start: int
    num_rows: int


class MatrixLayer(Module):
    """A layer whose parameter ``weight`` is a matrix [rows, cols].

    After construction ``weight`` is a float parameter (meta under ``torch.device("meta")``).  After ``set_packed`` the
    kernels read the packed bytes, and each access to ``weight`` computes the dequantized float32 matrix.
    """

    scheme: str
    packed_weight: Tensor | None

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        if rows * cols > MAX_ELEMENTS:
            raise InvalidArgumentError(f"weight: expected at most 2^44 elements, got [{rows}, {cols}]", param="weight")
        self.rows, self.cols = rows, cols
        self.scheme = "f32"
        self.weight = nn.Parameter(torch.empty(rows, cols), requires_grad=False)
        self.register_buffer("packed_weight", None, persistent=False)

    def set_packed(self, packed: Tensor, scheme: str) -> None:
        """Replace the logical weight by ``packed``, a tensor in a shape of ``penstock.ops.reference.packing``."""
        self._parameters.pop("weight", None)
        self.packed_weight = packed
        self.scheme = scheme

    def weight_parts(self, path: str) -> tuple[WeightPart, ...]:
        """Return the tensors that the rows of ``weight`` come from, in order; ``path`` is that of the layer."""
        return (WeightPart(f"{path}.weight" if path else "weight", 0, self.rows),)

    @property
    def is_packed(self) -> bool:
        """True if the kernels read packed bytes."""
        return self.packed_weight is not None

    def kernel_weight(self) -> Tensor:
        """Return the tensor that ops read: the packed one, or else the logical matrix."""
        return self.weight if self.packed_weight is None else self.packed_weight

    def __getattr__(self, name: str) -> Any:
        packed = self.__dict__["_buffers"].get("packed_weight") if name == "weight" else None
        if packed is not None:
            from penstock.ops.reference import unpack_weight

            values = unpack_weight(packed, self.rows, self.cols).float()
            return torch.from_numpy(restore_weight(values.numpy())) if find_scheme(self.scheme).hadamard else values
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """Return shape and scheme, for ``print``."""
        return f"weight=[{self.rows}, {self.cols}], scheme={self.scheme}"
