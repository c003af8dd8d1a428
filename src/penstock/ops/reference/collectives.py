"""The references of the ops of several ranks, for a world of one: other ranks are in other processes."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import UnsupportedError
from penstock.ops.reference.linear import embedding

__all__ = ["all_gather", "sharded_embedding"]


def all_gather(x: Tensor, *, starts: str, rank: int) -> Tensor:
    """Return the rows of all ranks side by side, [T, n], of which rank r has columns starts[r] to starts[r + 1] - 1."""
    _check_world("all_gather", starts)
    return x.float().clone(memory_format=torch.contiguous_format)


def sharded_embedding(ids: Tensor, weight: Tensor, *, dim: int, starts: str, rank: int) -> Tensor:
    """Return the rows of ids [T] of a table of which rank r has rows starts[r] to starts[r + 1] - 1: [T, dim].

    The owner of a row stores it, and the others copy it.
    """
    _check_world("sharded_embedding", starts)
    return embedding(ids, weight, dim=dim)


def _check_world(op: str, starts: str) -> None:
    world = starts.count("|")
    if world != 1:
        raise UnsupportedError(f"[{op}] starts: expected one rank in a reference, found {world}")
