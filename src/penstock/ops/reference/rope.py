"""The references of rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rope", "rotary_embedding"]


def rotary_embedding(positions: Tensor, inv_freq: Tensor, *, scaling: float) -> Tensor:
    """Return the cosines, then the sines, of position * inv_freq, times ``scaling``: [T, 2 * half].

    positions [T], inv_freq [half].  The angle is rounded to float32 before its cosine is taken, as in any float32
    implementation.
    """
    angles = (positions.float().unsqueeze(1) * inv_freq.float()).double()
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * scaling).float()


def rope(x: Tensor, cos_sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2 * half dimensions of each head: x [T, heads, head_dim], cos_sin [T, 2 * half].

    The rotated pairs are (i, i + half), or (2i, 2i + 1) when ``interleaved``.  Other dimensions are unchanged.
    """
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.double()[:, None, :half], cos_sin.double()[:, None, half:]
    rotated, unrotated = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, unrotated), dim=-1).float()
