"""Norms over the last dimension."""

from __future__ import annotations

from penstock.nn.base import Tensor, nn, torch
from penstock.nn.module import Module
from penstock.ops.call import ops

__all__ = ["BareRMSNorm", "LayerNorm", "RMSNorm"]


class RMSNorm(Module):
    """The norm x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [T, dim] or [T, heads, dim].

    With ``groups`` above 1 the mean is that of each of so many equal parts of x [T, dim].
    """

    def __init__(self, dim: int, eps: float = 1e-6, groups: int = 1) -> None:
        super().__init__()
        self.dim, self.eps, self.groups = dim, eps, groups
        self.weight = nn.Parameter(torch.ones(dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [T, dim] or [T, heads, dim]; the result has the same shape."""
        if self.groups == 1:
            y: Tensor = ops.rms_norm(x, self.weight, eps=self.eps)
            return y
        parts: Tensor = ops.rms_norm(x.view(-1, self.groups, self.dim // self.groups), self.weight, eps=self.eps)
        return parts.view(-1, self.dim)

    def extra_repr(self) -> str:
        """Return sizes, for ``print``."""
        return f"dim={self.dim}, eps={self.eps:g}"


class BareRMSNorm(Module):
    """The norm x / sqrt(mean(x^2) + eps), without weights, over the last dimension of x [T, dim] or [T, heads, dim]."""

    ones: Tensor

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        with torch.device("cpu"):  # a constant, which has values even when the network is on meta tensors
            self.register_buffer("ones", torch.ones(dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [T, dim] or [T, heads, dim]; the result has the same shape."""
        y: Tensor = ops.rms_norm(x, self.ones, eps=self.eps)
        return y

    def extra_repr(self) -> str:
        """Return sizes, for ``print``."""
        return f"dim={self.dim}, eps={self.eps:g}"


class LayerNorm(Module):
    """The norm (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension of x [T, dim]."""

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(dim), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [T, dim]; the result has the same shape."""
        y: Tensor = ops.layer_norm(x, self.weight, self.bias, eps=self.eps)
        return y

    def extra_repr(self) -> str:
        """Return sizes, for ``print``."""
        return f"dim={self.dim}, eps={self.eps:g}, bias={self.bias is not None}"
