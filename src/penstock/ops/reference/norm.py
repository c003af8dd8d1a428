"""The references of the norms over the last dimension."""

from __future__ import annotations

from torch import Tensor

__all__ = ["add_rms_norm", "layer_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight: x [T, dim] or [T, heads, dim], weight [dim] or [heads * dim]."""
    wide = x.double()
    root = (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    own = weight if weight.shape[0] == x.shape[-1] else weight.view(x.shape[1:])
    return (wide / root * own.double()).float()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(s), s) with s = x + residual in float32: x and residual [T, dim], weight [dim]."""
    total = x.float() + residual.float()
    return rms_norm(total, weight, eps=eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias: x [T, dim], weight and bias [dim]."""
    centred = x.double() - x.double().mean(dim=-1, keepdim=True)
    root = (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    y = centred / root * weight.double()
    if bias is not None:
        y = y + bias.double()
    return y.float()
