"""The references of the ops of a mixture of experts: the choice of experts, their matrices, and the weighted sum."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.ops.reference.linear import linear
from penstock.ops.reference.packing import unpack_weight

__all__ = ["combine", "expert_linear", "head_linear", "route"]

_MIN_SUM: Final = 1e-20
"""A sum of weights counts as at least this when they are divided by it."""


def route(
    logits: Tensor,
    bias: Tensor | None,
    *,
    k: int,
    score: str,
    renormalise: bool,
    factor: float,
    groups: int,
    kept_groups: int,
    group_rule: str,
) -> tuple[Tensor, Tensor]:
    """Return the weights [T, k] and the ids [T, k] int32 of the experts that each row of logits [T, experts] chooses.

    ``score`` makes scores of logits: "softmax" or "sigmoid"; with "softmax_of_chosen" the logits choose, and the
    weights are the softmax of the chosen ones.  ``bias`` [experts] changes only the choice, not the weights.  The
    experts lie in ``groups`` of equal size; the ``kept_groups`` that have the greatest maximum ("max") or sum of the
    best two ("best_two") take part.  Of equals the lower index is chosen.  ``renormalise`` divides the weights by their
    sum, and ``factor`` multiplies them.
    """
    x = logits.float()
    scores = {"softmax": torch.softmax(x, 1), "sigmoid": torch.sigmoid(x), "softmax_of_chosen": x}[score]
    choice = scores if bias is None else scores + bias.float()
    if kept_groups < groups:
        parts = choice.view(len(x), groups, -1)
        best = parts.sort(dim=2, descending=True).values[..., : 1 if group_rule == "max" else 2].sum(dim=2)
        kept = best.sort(dim=1, descending=True, stable=True).indices[:, :kept_groups]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        choice = parts.masked_fill(~mask[..., None], -torch.inf).reshape(choice.shape)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if score == "softmax_of_chosen":
        weights = torch.softmax(weights, 1)
    if renormalise:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=_MIN_SUM)
    return weights * factor, ids.int()


def expert_linear(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    *,
    num_experts: int,
    out_features: int,
    scheme: str,
) -> Tensor:
    """Return y[t, s] = x W[ids[t, s]]^T + b[ids[t, s]]: [T, k, N] for ids [T, k] int32.

    x is [T, K], the same row for every slot, or [T, k, K].  ``weight`` stacks the rows of the experts: [experts * N, K]
    or packed.  ``bias`` is [experts, N] or None.  ``scheme`` is that of ``linear``.
    """
    slots, cols = ids.shape[1], x.shape[-1]
    rows = (x if x.ndim == 3 else x[:, None].expand(-1, slots, -1)).reshape(-1, cols)
    flat = ids.reshape(-1)
    y = torch.zeros(len(rows), out_features)
    for expert in sorted(set(flat.tolist())):
        chosen = flat == expert
        own = _expert_weight(weight, expert * out_features, out_features, cols)
        own_bias = None if bias is None else bias[expert]
        y[chosen] = linear(rows[chosen], own, own_bias, out_features=out_features, scheme=scheme)
    return y.view(-1, slots, out_features)


def head_linear(x: Tensor, weight: Tensor, *, num_heads: int, out_features: int, scheme: str) -> Tensor:
    """Return y[t, h] = x[t, h] W[h]^T: [T, heads, N] for x [T, heads, K].

    ``weight`` stacks the rows of the heads: [heads * N, K] or packed.  ``scheme`` is that of ``linear``.
    """
    ids = torch.arange(num_heads, dtype=torch.int32).expand(len(x), -1)
    return expert_linear(x, weight, ids, None, num_experts=num_heads, out_features=out_features, scheme=scheme)


def _expert_weight(weight: Tensor, start: int, rows: int, cols: int) -> Tensor:
    """Return rows of a stacked weight as a weight of its own; of packed ones, whole tiles when they begin at one."""
    if start % 16 == 0 and weight.ndim > 2 - (weight.dtype == torch.uint8):
        return weight[start // 16 : -(-(start + rows) // 16)]
    return unpack_weight(weight, start + rows, cols)[start:].float()


def combine(x: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over s, in ascending order, of weights[t, s] * x[t, s]: [T, N] for x [T, k, N], weights [T, k]."""
    y = weights[:, :1].float() * x[:, 0].float()
    for slot in range(1, x.shape[1]):
        y = y + weights[:, slot : slot + 1].float() * x[:, slot].float()
    return y
