"""The references of linear and embedding, over weights in any layout."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.core import layouts
from penstock.core.layouts import GROUP_LEN, HADAMARD_FACTORS
from penstock.errors import InvalidArgumentError
from penstock.ops.reference.packing import layout_of_tensor, unpack_integers, unpack_weight
from penstock.ops.table import BLOCK_SCHEMES

__all__ = ["embedding", "linear", "rotate_rows", "round_groups", "round_rows"]

_LIMITS: Final = {"w8a8": 127, "w4a8": 127, "w8a16": 32512, "w4a16": 32512, "w8a8_h32": 127, "w4a8_h32": 127}
"""The largest integer of a rounded activation, by scheme."""
_PLANE_BASE: Final = 255
_MIN_SCALE: Final = 1e-37
"""A row with a smaller scale counts as zero, because the inverse of the scale must be finite."""


def round_rows(x: Tensor, limit: int = 127) -> tuple[Tensor, Tensor]:
    """Round each row of float32 ``x`` [..., n] to integers q [..., n] of magnitude ``limit`` or less.

    Returns (q, scale [..., 1]) with x = q * scale.  Computed in float32, because the rounding is part of the op.  q is
    int8, or int32 for a limit beyond 127.  A row with a NaN or an infinity gets a NaN scale.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / limit
    finite = torch.isfinite(x).all(dim=-1, keepdim=True)
    scale = torch.where(scale < _MIN_SCALE, torch.zeros_like(scale), scale)
    inverse = torch.where((scale > 0) & finite, 1 / scale, torch.zeros_like(scale))
    q = torch.where(finite, x, torch.zeros_like(x)).mul(inverse).round().clamp(-limit, limit)
    return q.to(torch.int8 if limit <= 127 else torch.int32), torch.where(finite, scale, torch.nan)


def round_groups(x: Tensor) -> Tensor:
    """Return float64 ``x`` [..., n], each 32 values rounded to int8 with a scale of their own; n is whole groups."""
    q, scale = round_rows(x.reshape(*x.shape[:-1], -1, 32))
    return (q.double() * scale.double()).flatten(-2)


def rotate_rows(x: Tensor) -> Tensor:
    """Return float32 ``x`` [..., n] with each 32 columns times fixed factors and the Hadamard matrix of Sylvester.

    Sums and differences of values that are 16, 8, 4, 2 and 1 apart, in this order: the order is part of the op.
    """
    x = x.float().clone()
    whole = x.shape[-1] // GROUP_LEN * GROUP_LEN
    blocks = x[..., :whole].reshape(-1, GROUP_LEN) * torch.tensor(HADAMARD_FACTORS)
    for distance in (16, 8, 4, 2, 1):
        low, high = blocks.reshape(len(blocks), 16 // distance, 2, distance).unbind(2)
        blocks = torch.stack((low + high, low - high), 2).reshape(-1, GROUP_LEN)
    x[..., :whole] = blocks.reshape(*x.shape[:-1], whole)
    return x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, out_features: int, scheme: str) -> Tensor:
    """Return y = x W^T + b, [T, N] with N = ``out_features``: x [T, K], weight [N, K] or packed, bias [N] or None.

    ``scheme`` selects the rounding of the activation: to bf16 ("bf16"), per token to int8 ("w8a8", "w4a8"), per token
    to 16-bit integers ("w8a16", "w4a16"), in groups of 32 columns to int8 (the blocks of GGUF), or none.  The schemes
    that end in "_h32" rotate it first (``rotate_rows``); ``weight`` is rotated already.  Over packed integers with a
    scale per row the result equals the kernels' bit for bit.
    """
    if scheme.endswith("_h32"):
        x = rotate_rows(x)
    if scheme in _LIMITS and layout_of_tensor(weight) in (layouts.T16_I8, layouts.T16_I4G32):
        return _integer_linear(x, weight, bias, out_features, _LIMITS[scheme])
    values = unpack_weight(weight, out_features, x.shape[1])
    if scheme == "bf16":
        rounded = x.bfloat16().double()
    elif scheme in _LIMITS:
        q, scale = round_rows(x, _LIMITS[scheme])
        rounded = q.double() * scale.double()
    elif scheme in BLOCK_SCHEMES:
        rounded = round_groups(x)
    elif scheme in ("f32", "f16"):
        rounded = x.double()
    else:
        raise InvalidArgumentError(
            f"[linear] scheme: expected a scheme of the op table, got {scheme!r}", param="scheme"
        )
    y = rounded @ values.T
    if bias is not None:
        y = y + bias.double()
    return y.float()


def _integer_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, limit: int) -> Tensor:
    """Sum integers exactly in float64, round once to float32, and multiply by both scales in float32."""
    unpack_weight(weight, out_features, x.shape[1])  # refuses a weight that is too small
    integers, scales = (part[:out_features] for part in unpack_integers(weight))
    q, scale = round_rows(x, limit)
    integers = integers[:, : x.shape[1]].T
    if limit == 127:
        total = (q.double() @ integers).float()
    else:  # two int8 planes, high and low; the product and the sum of the fma are exact here
        high = (q + 127).div(_PLANE_BASE, rounding_mode="floor").double()
        low = q.double() - _PLANE_BASE * high
        sums = [(plane @ integers).float().double() for plane in (high, low)]
        total = (sums[0] * _PLANE_BASE + sums[1]).float()
    y = total * (scales.float() * scale)
    return y if bias is None else y + bias.float()


def embedding(ids: Tensor, weight: Tensor, *, dim: int) -> Tensor:
    """Return row ids[t] of weight (logical [V, dim] or packed) for each of ids [T] int32: [T, dim]."""
    rows = weight.shape[0] if weight.ndim == 2 and weight.is_floating_point() else weight.shape[0] * 16
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= rows):
        raise InvalidArgumentError(
            f"[embedding] ids: expected token ids from 0 to {rows - 1}, got {int(ids.min())} to {int(ids.max())}",
            param="ids",
        )
    return unpack_weight(weight, rows, dim)[ids.long()].float()
