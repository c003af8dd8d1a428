"""Activation functions."""

from __future__ import annotations

from penstock.nn.base import Tensor
from penstock.ops.call import ops

__all__ = [
    "clamp", "clamped_swiglu", "elu", "gaussian_topk", "gelu", "match_rms", "relu", "relu_squared", "scale",
    "scale_channels", "sigmoid_mul", "silu_mul", "softcap",
]  # fmt: skip


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return sigmoid(gate) * x; both are [T, dim]."""
    y: Tensor = ops.sigmoid_mul(gate, x)
    return y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up, the gated activation of most decoders; both are [T, dim]."""
    y: Tensor = ops.silu_mul(gate, up)
    return y


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) of pairs of a gate and an up value: [T, dim] of x [T, 2 * dim].

    Gates are at most ``limit``, and up values lie between -limit and limit.
    """
    y: Tensor = ops.clamped_swiglu(x, alpha=alpha, limit=limit)
    return y


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return the Gaussian error linear unit of x [T, dim]; ``approximate`` is "none" (erf) or "tanh"."""
    y: Tensor = ops.gelu(x, approximate=approximate)
    return y


def relu(x: Tensor) -> Tensor:
    """Return the larger one of x and 0, for x [T, dim]."""
    y: Tensor = ops.relu(x)
    return y


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0) squared of x [T, dim] (So et al., arXiv 2109.08668)."""
    y: Tensor = ops.relu_squared(x)
    return y


def clamp(x: Tensor, limit: float) -> Tensor:
    """Return x, [T, dim] or [T, heads, dim], cut to -limit and limit; a limit of 0 adds no op."""
    if limit == 0.0:
        return x
    y: Tensor = ops.clamp(x, limit=limit)
    return y


def elu(x: Tensor) -> Tensor:
    """Return x where it is above 0, otherwise exp(x) - 1, for x [T, dim]."""
    y: Tensor = ops.elu(x)
    return y


def scale(x: Tensor, factor: float) -> Tensor:
    """Return x * factor for x [T, dim] or [T, heads, dim]; a factor of 1 adds no op."""
    if factor == 1.0:
        return x
    y: Tensor = ops.scale(x, factor=factor)
    return y


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) of x [T, dim] or [T, heads, dim]; a cap of 0 adds no op."""
    if cap == 0.0:
        return x
    y: Tensor = ops.softcap(x, cap=cap)
    return y


def scale_channels(x: Tensor, weight: Tensor) -> Tensor:
    """Return x * weight of x [T, dim]; weight is [dim], or [1] for all channels."""
    y: Tensor = ops.scale_channels(x, weight)
    return y


def match_rms(x: Tensor, target: Tensor, floor: float) -> Tensor:
    """Return x [T, dim], each row scaled to the root mean square of the same row of ``target`` [T, dim].

    The mean square of a row of x counts as at least ``floor``.
    """
    y: Tensor = ops.match_rms(x, target, floor=floor)
    return y


def gaussian_topk(x: Tensor, deviations: float) -> Tensor:
    """Return max(x - c, 0) of x [T, dim]: c is a row's mean plus ``deviations`` times its standard deviation."""
    y: Tensor = ops.gaussian_topk(x, deviations=deviations)
    return y
