"""The references of latent_append and latent_attention: one row per token in pages, which is key and value.

This is the cache of multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434): a row is the
latent, from which keys and values of all heads are made, and the rotary part of the key that all heads share.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Unpack

import torch
from torch import Tensor

from penstock.core.layouts import PAGE_TOKENS
from penstock.errors import InvalidArgumentError
from penstock.ops.pages import page_elements
from penstock.ops.reference.attention import AttentionAttrs, attend, find_page, round_half
from penstock.ops.reference.linear import round_rows

__all__ = ["latent_append", "latent_attention"]


class _LatentPages:
    """Views into a state [num_pages, page_elements] of rows of ``dim`` numbers, the first ``latent_dim`` the value.

    ``rows`` is [pages, dim / n, 32, n], where n is 2 for bfloat16, else 1.
    """

    def __init__(self, op: str, state: Tensor, dim: int, latent_dim: int) -> None:
        expected = page_elements(state.dtype, 1, dim, latent_dim)
        if state.dtype not in (torch.float32, torch.bfloat16, torch.int8) or state.shape[1] != expected:
            raise InvalidArgumentError(
                f"[{op}] state: expected float32, bfloat16 or int8 pages of {expected} elements, "
                f"got {state.dtype} of {state.shape[1]}",
                param="state",
            )
        self.dim, together = dim, 2 if state.dtype == torch.bfloat16 else 1
        num_rows = -(-dim // together) * PAGE_TOKENS * together
        self.rows = torch.unflatten(state[:, :num_rows], 1, (-1, PAGE_TOKENS, together))
        self.scales = state[:, num_rows:].view(torch.float32) if state.dtype == torch.int8 else None  # [pages, 32]

    def write(self, page: int, slot: int, row: Tensor) -> None:
        """Store the row [dim] of one token."""
        if self.scales is not None:
            row, scale = round_rows(row)
            self.scales[page, slot] = scale[0]
        elif self.rows.dtype == torch.bfloat16:
            row = round_half(torch.nn.functional.pad(row, (0, self.dim % 2)))
        self.rows[page, :, slot] = torch.unflatten(row, 0, (-1, self.rows.shape[3])).to(self.rows.dtype)

    def read(self, pages: Tensor) -> Tensor:
        """Return the rows of a list of pages [n] in float64, [n * 32, dim]."""
        rows = self.rows[pages].double().permute(0, 2, 1, 3).flatten(2)[:, :, : self.dim]  # [n, 32, dim]
        if self.scales is not None:
            rows = rows * self.scales[pages].double().unsqueeze(2)
        return rows.flatten(0, 1)


def latent_append(
    latent: Tensor,
    rope: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    *,
    group: int,
) -> None:
    """Write each token's row, latent [T, latent_dim] and then rope [T, rope_dim], into its slot of a page, in place.

    A float32 state stores the values unchanged, bfloat16 rounds them, and int8 rounds them with one scale per token.
    """
    rows = torch.cat((latent, rope), dim=1)
    pages = _LatentPages("latent_append", state, rows.shape[1], latent.shape[1])
    starts, table, places = request_starts.tolist(), page_tables[group].tolist(), positions.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        for token in range(start, end):
            page, slot = find_page("latent_append", table[request], places[token], state.shape[0])
            pages.write(page, slot, rows[token])


def latent_attention(
    q: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    q_rope: Tensor,
    **attrs: Unpack[AttentionAttrs],
) -> Tensor:
    """Return softmax attention of q [T, heads, latent_dim] and q_rope [T, heads, rope_dim]: [T, heads, latent_dim].

    A query is q and then q_rope, a key the row that latent_append stored, and a value its first latent_dim numbers.
    All else is as in ``attention``.
    """
    whole, latent_dim = torch.cat((q, q_rope), dim=2), q.shape[2]
    pages = _LatentPages("latent_attention", state, whole.shape[2], latent_dim)
    out = torch.empty(q.shape, dtype=torch.float32)
    for request, (start, end) in enumerate(pairwise(request_starts.tolist())):
        places = positions[start:end].long()
        num_tiles = int(places.max()) // PAGE_TOKENS + 1
        k = pages.read(page_tables[attrs["group"], request, :num_tiles].long().clamp(min=0))[None]
        queries = whole[start:end] if state.dtype == torch.float32 else round_half(whole[start:end])
        out[start:end] = attend(queries.double(), k, k[:, :, :latent_dim], places, (None, None), attrs)
    return out
