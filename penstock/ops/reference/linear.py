"""Matrix products and table look-ups over weights in any layout."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import InvalidArgumentError
from penstock.ops.reference.packing import unpack_weight

__all__ = ["embedding", "linear", "round_rows"]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each row of float32 ``x`` [..., n] to int8: (q [..., n], scale [..., 1]), x = q * scale.

    In float32, for the rounding is part of the op.  A row with a NaN or an infinity gets a NaN scale.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    finite = torch.isfinite(x).all(dim=-1, keepdim=True)
    inverse = torch.where((scale > 0) & finite, 1 / scale, torch.zeros_like(scale))
    q = torch.where(finite, x, torch.zeros_like(x)).mul(inverse).round().clamp(-127, 127)
    return q.to(torch.int8), torch.where(finite, scale, torch.full_like(scale, torch.nan))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, out_features: int, scheme: str) -> Tensor:
    """y = x W^T + b: x [T, K], weight logical [N, K] or packed, bias [N] or None; y [T, N], N = ``out_features``.

    ``scheme`` says how the activation is rounded first: to bf16 ("bf16"), to int8 per token ("w8a8", "w4a8"), else not.
    """
    values = unpack_weight(weight, out_features, x.shape[1])
    if scheme == "bf16":
        rounded = x.bfloat16().double()
    elif scheme in ("w8a8", "w4a8"):
        q, scale = round_rows(x)
        rounded = q.double() * scale.double()
    elif scheme in ("f32", "f16", "w8a16", "w4a16"):
        rounded = x.double()
    else:
        raise InvalidArgumentError(f"[linear] scheme: expected a scheme of the op table, found {scheme!r}")
    y = rounded @ values.T
    if bias is not None:
        y = y + bias.double()
    return y.float()


def embedding(ids: Tensor, weight: Tensor, *, dim: int) -> Tensor:
    """Row ids[t] of weight (logical [V, dim] or packed) for each of ids [T] int32: [T, dim]."""
    rows = weight.shape[0] if weight.ndim == 2 and weight.is_floating_point() else weight.shape[0] * 16
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= rows):
        raise InvalidArgumentError(
            f"[embedding] ids: expected token ids from 0 to {rows - 1}, found {int(ids.min())} to {int(ids.max())}"
        )
    return unpack_weight(weight, rows, dim)[ids.long()].float()
