"""Matrix products and table look-ups over weights in any layout."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.core import layouts
from penstock.errors import InvalidArgumentError
from penstock.ops.reference.packing import layout_of_tensor, unpack_integers, unpack_weight

__all__ = ["embedding", "linear", "round_rows"]

_LIMITS: Final = {"w8a8": 127, "w4a8": 127, "w8a16": 32512, "w4a16": 32512}
"""The largest integer of an activation."""
_PLANE_BASE: Final = 255
_MIN_SCALE: Final = 1e-37
"""Below it a row counts as zero, for its inverse must be finite."""


def round_rows(x: Tensor, limit: int = 127) -> tuple[Tensor, Tensor]:
    """Rounds each row of float32 ``x`` [..., n] to integers of at most ``limit``: (q [..., n], scale [..., 1]).

    x = q * scale, in float32, for the rounding is part of the op; q is int8, int32 for a limit beyond it.  A row with
    a NaN or an infinity gets a NaN scale.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / limit
    finite = torch.isfinite(x).all(dim=-1, keepdim=True)
    scale = torch.where(scale < _MIN_SCALE, torch.zeros_like(scale), scale)
    inverse = torch.where((scale > 0) & finite, 1 / scale, torch.zeros_like(scale))
    q = torch.where(finite, x, torch.zeros_like(x)).mul(inverse).round().clamp(-limit, limit)
    return q.to(torch.int8 if limit <= 127 else torch.int32), torch.where(finite, scale, torch.nan)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, out_features: int, scheme: str) -> Tensor:
    """y = x W^T + b: x [T, K], weight logical [N, K] or packed, bias [N] or None; y [T, N], N = ``out_features``.

    ``scheme`` says how the activation is rounded first: to bf16 ("bf16"), per token to int8 ("w8a8", "w4a8") or to 16
    bit ("w8a16", "w4a16"), else not.  Over packed integers the result is that of the kernels bit for bit.
    """
    if scheme in _LIMITS and layout_of_tensor(weight) in (layouts.T16_I8, layouts.T16_I4G32):
        return _integer_linear(x, weight, bias, out_features, _LIMITS[scheme])
    values = unpack_weight(weight, out_features, x.shape[1])
    if scheme == "bf16":
        rounded = x.bfloat16().double()
    elif scheme in _LIMITS:
        q, scale = round_rows(x, _LIMITS[scheme])
        rounded = q.double() * scale.double()
    elif scheme in ("f32", "f16"):
        rounded = x.double()
    else:
        raise InvalidArgumentError(f"[linear] scheme: expected a scheme of the op table, found {scheme!r}")
    y = rounded @ values.T
    if bias is not None:
        y = y + bias.double()
    return y.float()


def _integer_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, limit: int) -> Tensor:
    """Sums of integers, which float64 holds exactly, rounded to float32 once and multiplied by both scales there."""
    unpack_weight(weight, out_features, x.shape[1])  # refuses one that is too small
    integers, scales = (part[:out_features] for part in unpack_integers(weight))
    q, scale = round_rows(x, limit)
    integers = integers[:, : x.shape[1]].T
    if limit == 127:
        total = (q.double() @ integers).float()
    else:  # two int8 planes, high and low; the product and the sum of the fma are exact
        high = (q + 127).div(_PLANE_BASE, rounding_mode="floor").double()
        low = q.double() - _PLANE_BASE * high
        sums = [(plane @ integers).float().double() for plane in (high, low)]
        total = (sums[0] * _PLANE_BASE + sums[1]).float()
    y = total * (scales.float() * scale)
    return y if bias is None else y + bias.float()


def embedding(ids: Tensor, weight: Tensor, *, dim: int) -> Tensor:
    """Row ids[t] of weight (logical [V, dim] or packed) for each of ids [T] int32: [T, dim]."""
    rows = weight.shape[0] if weight.ndim == 2 and weight.is_floating_point() else weight.shape[0] * 16
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= rows):
        raise InvalidArgumentError(
            f"[embedding] ids: expected token ids from 0 to {rows - 1}, found {int(ids.min())} to {int(ids.max())}"
        )
    return unpack_weight(weight, rows, dim)[ids.long()].float()
