"""The references of prefix_lengths, which finds where a prefix ends, and of the positions inside and behind it."""

from __future__ import annotations

from itertools import pairwise
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from penstock.core.layouts import PAGE_TOKENS
from penstock.errors import InvalidArgumentError

__all__ = ["PrefixAttrs", "prefix_lengths", "prefix_positions"]


class PrefixAttrs(TypedDict):
    """The attributes of the prefix_lengths op."""

    group: int
    token: int


def prefix_lengths(
    ids: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    **attrs: Unpack[PrefixAttrs],
) -> Tensor:
    """Return for each token the number of tokens in its request's prefix: [T] int32.

    The prefix are the tokens before the first ``token`` behind position 0: those of the encoder in a request whose
    decoder begins with ``token``.  In a request without one all tokens so far are its prefix.  ``state``
    [num_pages, PREFIX_ELEMENTS] is written in place: the page of a token remembers the length.
    """
    lengths = torch.empty(len(ids), dtype=torch.int32)
    for request, (start, end) in enumerate(pairwise(request_starts.tolist())):
        table = page_tables[attrs["group"], request]
        first = int(positions[start]) if end > start else 0
        length = _length_before(state, table, first)
        for token in range(start, end):
            place = int(positions[token])
            if length == 0 and place > 0 and int(ids[token]) == attrs["token"]:
                length = place
            cell = state[table[place // PAGE_TOKENS]]
            cell[0], cell[-1] = length, place + 1
        lengths[start:end] = length or first + end - start
    return lengths


def _length_before(state: Tensor, table: Tensor, position: int) -> int:
    """Return the length of the prefix of a request that goes on at ``position``; 0 at position 0."""
    if position == 0:
        return 0
    cell = state[table[(position - 1) // PAGE_TOKENS]]
    if cell[-1] != position or cell[0] == 0:
        raise InvalidArgumentError(
            f"[prefix_lengths] positions: expected a request whose prefix ran in one step, got position {position}",
            param="positions",
        )
    return int(cell[0])


def prefix_positions(positions: Tensor, prefix: Tensor, *, behind: bool) -> Tensor:
    """Return the positions [T] int32 of tokens in their prefixes; all tokens behind one have that of its last token.

    ``prefix`` [T] is the length of each token's prefix.  With ``behind`` the positions are those behind it: 1 for the
    first token there, and 0 for the prefix (the two positions of GLM, arXiv 2103.10360).
    """
    inside = torch.minimum(positions.long(), prefix.long().clamp(min=1) - 1)
    return (positions.long() - inside if behind else inside).int()
