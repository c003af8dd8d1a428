"""KV pages of int4: keys and values of 4 bits after a rotation of each head, for the references of attention.

A head is rotated by orthonormal Hadamard matrices (Ashkboos et al., QuaRot, arXiv 2404.00456), which spreads a
dimension that is far larger than the others: scores do not change when queries are rotated too, and the output of
attention is rotated back.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.core.layouts import HADAMARD_FACTORS, PAGE_TOKENS
from penstock.errors import InvalidArgumentError
from penstock.ops.pages import page_elements
from penstock.ops.reference.linear import round_rows

__all__ = ["NibblePages", "restore_heads", "rotate_heads"]

_LANES: Final = 16
_LIMIT: Final = 15
"""The largest of the odd integers that a nibble stands for."""


def rotate_heads(x: Tensor) -> Tensor:
    """Return ``x`` [..., dim] times an orthonormal matrix.

    Blocks of the largest power of two that is left, at least 16 dimensions, are multiplied by signs and the Hadamard
    matrix of their size.  Fewer than 16 dimensions at the end stay as they are.  Sums and differences of dimensions
    that are 8, 4, 2, 1, 16, 32 and so on apart, in this order: the order is part of the op.
    """
    y = x.clone()
    for at, size in _blocks(x.shape[-1]):
        lanes = _add(x[..., at : at + size] * _signs(size).to(x.dtype) * 0.25, (8, 4, 2, 1))
        y[..., at : at + size] = _add(lanes * _far_factors(size).to(x.dtype), _far(size))
    return y


def restore_heads(x: Tensor) -> Tensor:
    """Undo ``rotate_heads``."""
    y = x.clone()
    for at, size in _blocks(x.shape[-1]):
        lanes = _add(_add(x[..., at : at + size], _far(size)), (8, 4, 2, 1))
        y[..., at : at + size] = lanes * (_signs(size).to(x.dtype) * 0.25) * _far_factors(size).to(x.dtype)
    return y


def _blocks(dim: int) -> list[tuple[int, int]]:
    """Return the start and the size of each block that is rotated."""
    blocks, at = [], 0
    while dim - at >= _LANES:
        blocks.append((at, 1 << ((dim - at).bit_length() - 1)))
        at += blocks[-1][1]
    return blocks


def _far(size: int) -> list[int]:
    return [_LANES << i for i in range((size // _LANES).bit_length() - 1)]


def _signs(size: int) -> Tensor:
    return torch.tensor(HADAMARD_FACTORS[:_LANES]).sign().repeat(size // _LANES)


def _far_factors(size: int) -> Tensor:
    """Return what each dimension is multiplied by beside 1/4 and its sign: the sign of its 16, and the norm."""
    each = size // _LANES
    signs = torch.tensor(HADAMARD_FACTORS[:_LANES]).sign().repeat(-(-each // _LANES))[:each]
    return (signs * torch.tensor(each, dtype=torch.float64).rsqrt().float()).repeat_interleave(_LANES)


def _add(x: Tensor, distances: tuple[int, ...] | list[int]) -> Tensor:
    for distance in distances:
        low, high = torch.unflatten(x, -1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
    return x


class NibblePages:
    """Views into a state [num_pages, page_elements] of uint8.

    ``k`` is [pages, heads, dim / 2, 32] and ``v`` [pages, heads, 32, dim / 2], both rounded up.  A byte has two
    dimensions; nibble n stands for 2 n - 15 times the scale.
    """

    def __init__(self, op: str, state: Tensor, num_kv_heads: int, head_dim: int) -> None:
        expected = page_elements(state.dtype, num_kv_heads, head_dim)
        if state.shape[1] != expected:
            raise InvalidArgumentError(
                f"[{op}] state: expected uint8 pages of {expected} elements, got {state.shape[1]}", param="state"
            )
        heads = state.view(state.shape[0], num_kv_heads, -1)
        self.head_dim = head_dim
        row_bytes = -(-head_dim // 2)
        sizes = [PAGE_TOKENS * row_bytes, 4 * PAGE_TOKENS] * 2
        keys, key_scales, values, value_scales = torch.split_with_sizes(heads, sizes, dim=2)
        self.k = torch.unflatten(keys, 2, (row_bytes, PAGE_TOKENS))
        self.v = torch.unflatten(values, 2, (PAGE_TOKENS, row_bytes))
        self.k_scale = key_scales.view(torch.float32)
        self.v_scale = value_scales.view(torch.float32)

    def write(self, page: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values [heads, dim] of one token."""
        self.k[page, :, :, slot], self.k_scale[page, :, slot] = self._round(k)
        self.v[page, :, slot], self.v_scale[page, :, slot] = self._round(v)

    def _round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes [heads, dim / 2, rounded up] and scales [heads] of rows; a nibble over is as of a zero."""
        x = rotate_heads(x.float())
        _, scale = round_rows(x, _LIMIT)
        inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
        x = torch.nn.functional.pad(x, (0, self.head_dim % 2))
        q = (x * (0.5 * inverse) - 0.5).nan_to_num(nan=7.0).clamp(-8, 7).round() + 8
        q = q.to(torch.uint8)
        return q[:, 0::2] | q[:, 1::2] << 4, scale[:, 0]

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a list of pages [n] in float64, both [heads, n * 32, dim]."""
        k, v = self.k[pages], self.v[pages]
        k = torch.stack((k & 15, k >> 4), 3).flatten(2, 3).transpose(2, 3)  # [n, heads, 32, dim]
        v = torch.stack((v & 15, v >> 4), 4).flatten(3, 4)
        rows = []
        for q, scale in ((k, self.k_scale), (v, self.v_scale)):
            rotated = (2 * q[..., : self.head_dim].double() - 15) * scale[pages].double().unsqueeze(3)
            rows.append(restore_heads(rotated).transpose(0, 1).flatten(1, 2))
        return rows[0], rows[1]
