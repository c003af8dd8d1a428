"""The references of the ops of several ranks, for a world of one: other ranks are in other processes."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from penstock.errors import UnsupportedError
from penstock.ops.reference.attention import AttentionAttrs, attention
from penstock.ops.reference.linear import embedding

__all__ = [
    "all_gather", "all_gather_rounded", "barrier", "broadcast", "context_attention", "recv", "send",
    "sharded_embedding",
]  # fmt: skip


def all_gather(x: Tensor, *, starts: str, rank: int) -> Tensor:
    """Return the rows of all ranks side by side, [T, n], of which rank r has columns starts[r] to starts[r + 1] - 1.

    Of x [T, k, own] the columns of each of the k slots: [T, k, n].
    """
    return _single_rank("all_gather", x, starts.count("|"))


def all_gather_rounded(x: Tensor, *, starts: str, rank: int, bits: int) -> Tensor:
    """Return what ``all_gather`` returns, rounded as a linear with integer activations of ``bits`` 8 or 16 rounds it.

    The scale of a row [own], of its whole length, is its largest magnitude / 127, or / 32512.  An element of the result
    is its integer times the scale; the largest integer stands for the magnitude itself.  Rounded again, the result has
    the same scales and integers, so the linear that reads it computes the same bits.
    """
    whole = _single_rank("all_gather_rounded", x, starts.count("|")).float()
    limit = 127.0 if bits == 8 else 32512.0
    magnitude = whole.abs().amax(-1, keepdim=True)
    scale = magnitude / limit
    integers = (whole * (1 / scale)).clamp(-limit, limit).round()
    rounded = torch.where(integers.abs() == limit, integers.sign() * magnitude, integers * scale)
    return torch.where(scale < 1e-37, 0.0, rounded)


def sharded_embedding(ids: Tensor, weight: Tensor, *, dim: int, starts: str, rank: int) -> Tensor:
    """Return the rows of ids [T] of a table of which rank r has rows starts[r] to starts[r + 1] - 1: [T, dim].

    The owner of a row stores it, and the others copy it.
    """
    return _single_rank("sharded_embedding", embedding(ids, weight, dim=dim), starts.count("|"))


def broadcast(x: Tensor, *, root: int, world: int, rank: int) -> Tensor:
    """Return the x [T, n] of rank ``root`` on every rank."""
    return _single_rank("broadcast", x, world)


def send(x: Tensor, *, target: int, world: int, rank: int) -> Tensor:
    """Send x [T, n] to rank ``target``, where ``recv`` returns it.  The result is x; to itself a rank sends nothing."""
    return _single_rank("send", x, world)


def recv(rows: Tensor, *, width: int, source: int, world: int, rank: int) -> Tensor:
    """Return [T, width] that rank ``source`` sends, where ``rows`` is any value with T rows.

    If the source is the rank itself, the result is ``rows``.
    """
    return _single_rank("recv", rows, world)


def barrier(x: Tensor, *, world: int, rank: int) -> Tensor:
    """Return x [T, n] after every rank has come to this op."""
    return _single_rank("barrier", x, world)


def context_attention(
    q: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    alibi: Tensor | None,
    *,
    world: int,
    rank: int,
    **attrs: Unpack[AttentionAttrs],
) -> Tensor:
    """Return what ``attention`` returns, [T, heads, head_dim], of pages that are dealt out to ranks.

    Eight pages, a partition of 256 positions, lie on one rank, and the partitions of a request on the ranks in turn.
    """
    out = attention(q, state, positions, request_starts, page_tables, alibi, **attrs)
    return _single_rank("context_attention", out, world)


def _single_rank(op: str, x: Tensor, world: int) -> Tensor:
    """Return what a rank without others has."""
    if world != 1:
        raise UnsupportedError(f"[{op}] expected a world of 1 in a reference, got {world}")
    return x.float().clone(memory_format=torch.contiguous_format)
