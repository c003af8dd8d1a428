"""Ops that work element by element or row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import InvalidArgumentError

__all__ = ["add", "all_reduce", "argmax", "gather_rows", "gelu", "mul", "silu_mul", "topk"]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up: both [T, dim]."""
    wide = gate.double()
    return (wide * torch.sigmoid(wide) * up.double()).float()


def gelu(x: Tensor, *, approximate: str) -> Tensor:
    """The Gaussian error linear unit of x [T, dim]; ``approximate`` is "none" (erf) or "tanh"."""
    return torch.nn.functional.gelu(x.double(), approximate=approximate).float()


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b in float32: both [T, dim]."""
    return a.float() + b.float()


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b in float32: both [T, dim]."""
    return a.float() * b.float()


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Row rows[r] of x [T, dim] for each of rows [R] int32: [R, dim]."""
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= x.shape[0]):
        raise InvalidArgumentError(
            f"[gather_rows] rows: expected 0 to {x.shape[0] - 1}, found {int(rows.min())} to {int(rows.max())}"
        )
    return x[rows.long()].float()


def all_reduce(x: Tensor) -> Tensor:
    """The sum of x [T, dim] over the ranks; at world one a copy."""
    return x.float().clone(memory_format=torch.contiguous_format)


def argmax(logits: Tensor) -> Tensor:
    """The index of the first of the largest values of each row: logits [R, vocab]; int32 [R]."""
    largest = logits.amax(dim=1, keepdim=True)
    return (logits == largest).int().argmax(dim=1).int()


def topk(logits: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row, descending, and their indices (ties: smaller first): [R, k], int32 [R, k]."""
    values, indices = logits.float().sort(dim=1, descending=True, stable=True)
    return values[:, :k].contiguous(), indices[:, :k].int()
