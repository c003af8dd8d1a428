"""Linear layers.

Over several ranks a pass cuts each by its output rows, and gathers the results (docs/explanation/ranks.md).
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.nn.base import Tensor, nn, torch
from penstock.nn.weight import MatrixLayer
from penstock.ops.call import ops

__all__ = ["ColumnParallelLinear", "Linear", "RowParallelLinear"]


class Linear(MatrixLayer):
    """A linear layer, y = x W^T + b, with ``weight`` [out_features, in_features] and ``bias`` [out_features] or None.

    ``adapter``, when set, is called with x [T, in_features], and its result [T, out_features] is added to y.
    """

    adapter: Callable[[Tensor], Tensor] | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(out_features, in_features)
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None
        self.adapter = None

    def forward(self, x: Tensor) -> Tensor:
        """Return y [T, out_features] of x [T, in_features]."""
        y: Tensor = ops.linear(x, self.kernel_weight(), self.bias, out_features=self.rows, scheme=self.scheme)
        if self.adapter is not None:
            y = y + self.adapter(x)
        return y

    def extra_repr(self) -> str:
        """Return shape and scheme, for ``print``."""
        return f"{super().extra_repr()}, bias={self.bias is not None}"


class ColumnParallelLinear(Linear):
    """The same as ``Linear``, under the name that scripts of other frameworks use."""


class RowParallelLinear(Linear):
    """The same as ``Linear``, under the name that scripts of other frameworks use.

    Its input features are not cut: sums over parts would depend on the number of ranks.
    """
