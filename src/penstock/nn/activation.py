"""Activation functions."""

from __future__ import annotations

from torch import Tensor

from penstock.ops.eager import ops

__all__ = ["gelu", "silu_mul"]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up, the gated activation of most decoders; both are [T, dim]."""
    y: Tensor = ops.silu_mul(gate, up)
    return y


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return the Gaussian error linear unit of x [T, dim]; ``approximate`` is "none" (erf) or "tanh"."""
    y: Tensor = ops.gelu(x, approximate=approximate)
    return y
