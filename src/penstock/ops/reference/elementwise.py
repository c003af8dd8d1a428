"""The references of the ops that work element by element or row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import InvalidArgumentError

__all__ = [
    "add",
    "argmax",
    "clamp",
    "clamped_swiglu",
    "elu",
    "gather_rows",
    "gaussian_topk",
    "gelu",
    "match_rms",
    "mul",
    "relu",
    "relu_squared",
    "scale",
    "scale_channels",
    "sigmoid_mul",
    "silu_mul",
    "softcap",
    "topk",
]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up; both are [T, dim]."""
    wide = gate.double()
    return (wide * torch.sigmoid(wide) * up.double()).float()


def clamped_swiglu(x: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate): [T, dim] of x [T, 2 * dim], pairs of a gate and an up value.

    Gates above ``limit`` count as ``limit``, and up values lie in [-limit, limit] (gpt-oss, arXiv 2508.10925).
    """
    wide = x.double()
    gate, up = wide[:, 0::2].clamp(max=limit), wide[:, 1::2].clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).float()


def gelu(x: Tensor, *, approximate: str) -> Tensor:
    """Return the Gaussian error linear unit of x [T, dim]; ``approximate`` is "none" (erf) or "tanh"."""
    return torch.nn.functional.gelu(x.double(), approximate=approximate).float()


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b in float32; both are [T, dim]."""
    return a.float() + b.float()


def mul(a: Tensor, b: Tensor) -> Tensor:
    """Return a * b in float32; both are [T, dim]."""
    return a.float() * b.float()


def relu(x: Tensor) -> Tensor:
    """Return the larger one of x and 0, for x [T, dim]."""
    return torch.relu(x.float())


def clamp(x: Tensor, *, limit: float) -> Tensor:
    """Return x cut to -limit and limit, with the limit rounded to float32; x is [T, dim] or [T, heads, dim]."""
    bound = torch.tensor(limit, dtype=torch.float32)
    return x.float().clamp(-bound, bound)


def elu(x: Tensor) -> Tensor:
    """Return x where it is above 0, otherwise exp(x) - 1, for x [T, dim] (Clevert et al., arXiv 1511.07289)."""
    return torch.nn.functional.elu(x.double()).float()


def scale(x: Tensor, *, factor: float) -> Tensor:
    """Return x * factor in float32, with the factor rounded to float32; x is [T, dim] or [T, heads, dim]."""
    return x.float() * torch.tensor(factor, dtype=torch.float32)


def softcap(x: Tensor, *, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), which lies between -cap and cap; x is [T, dim] or [T, heads, dim].

    Gemma 2 caps its logits so (arXiv 2408.00118, section 2).
    """
    return (cap * torch.tanh(x.double() / cap)).float()


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0) squared in float32; x is [T, dim] (So et al., arXiv 2109.08668)."""
    return x.float().relu().square()


def scale_channels(x: Tensor, weight: Tensor) -> Tensor:
    """Return x * weight in float32: x [T, dim], weight [dim], or [1] for all channels."""
    return x.float() * weight.float()


def match_rms(x: Tensor, target: Tensor, *, floor: float) -> Tensor:
    """Return x, each row scaled to the root mean square of the same row of ``target``; both are [T, dim].

    The mean square of a row of x counts as at least ``floor``.
    """
    wide = x.double()
    own = wide.square().mean(dim=-1, keepdim=True).clamp(min=floor).sqrt()
    return (wide * target.double().square().mean(dim=-1, keepdim=True).sqrt() / own).float()


def gaussian_topk(x: Tensor, *, deviations: float) -> Tensor:
    """Return max(x - c, 0) of x [T, dim]: c is a row's mean plus ``deviations`` times its standard deviation.

    The rows of Gemma 3n's sparse layers keep their largest values so, if these are normally distributed.
    """
    wide = x.double()
    deviation = wide.std(dim=-1, correction=0, keepdim=True)
    return torch.relu(wide - wide.mean(dim=-1, keepdim=True) - deviations * deviation).float()


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return sigmoid(gate) * x; both are [T, dim]."""
    return (torch.sigmoid(gate.double()) * x.double()).float()


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of x [T, dim] that ``rows`` [R] int32 selects: [R, dim]."""
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= x.shape[0]):
        raise InvalidArgumentError(
            f"[gather_rows] rows: expected 0 to {x.shape[0] - 1}, got {int(rows.min())} to {int(rows.max())}",
            param="rows",
        )
    return x[rows.long()].float()


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest value of each row of logits [R, vocab], the first on a tie: int32 [R]."""
    largest = logits.amax(dim=1, keepdim=True)
    return (logits == largest).int().argmax(dim=1).int()


def topk(logits: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row [R, k], descending, and their indices int32 [R, k].

    On a tie the smaller index comes first.
    """
    values, indices = logits.float().sort(dim=1, descending=True, stable=True)
    return values[:, :k].contiguous(), indices[:, :k].int()
