"""Attention with a bias by distance, over the prefix of a request or over what follows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.nn.attention import Attention, PagedLayer
from penstock.nn.base import Tensor, nn, torch
from penstock.nn.batch import Batch
from penstock.nn.module import Module
from penstock.ops.call import ops
from penstock.ops.pages import PREFIX_ELEMENTS

__all__ = [
    "DisentangledAttention", "DistanceBias", "PrefixLengths", "RelativeAttention", "TokenShift", "prefix_positions",
]  # fmt: skip

_STATE_WINDOW = 2  # a token reads the state of the token before it
_NO_TOKEN, _OTHER_TOKEN = -1e4, -2e4  # scores beside 0: exp(x) of either is 0, and so is exp of their difference


class DistanceBias(Module):
    """The bias ``weight`` [num_heads, 2 * reach + 1] of each head by key position - query position from -reach on."""

    def __init__(self, num_heads: int, reach: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, 2 * reach + 1), requires_grad=False)


class PrefixLengths(PagedLayer):
    """Finds the length of each request's prefix: its tokens before the first ``token``, those of the encoder.

    A page holds [PREFIX_ELEMENTS] float32 numbers, from which the next step of a request goes on.
    """

    recurrent = True

    def __init__(self, token: int) -> None:
        super().__init__(1, PREFIX_ELEMENTS, _STATE_WINDOW)
        self.token = token

    def new_pages(self, num_pages: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed pages; ``dtype`` is that of keys and values, which a recurrent state does not follow."""
        return torch.zeros(num_pages, PREFIX_ELEMENTS)

    def forward(self, batch: Batch) -> Tensor:
        """Return for each token the length of its request's prefix, [T] int32."""
        step = (batch.positions, batch.request_starts, batch.page_tables)
        y: Tensor = ops.prefix_lengths(batch.token_ids, self.state, *step, group=self.group, token=self.token)
        return y


def prefix_positions(positions: Tensor, prefix: Tensor, *, behind: bool) -> Tensor:
    """Return the positions in the prefix, or ``behind`` it, of tokens at ``positions``: [T] int32.

    ``prefix`` [T] are the lengths that PrefixLengths returns.  Tokens behind the prefix have the position of its last
    token, and are counted from 1; tokens of the prefix are 0 behind it.
    """
    y: Tensor = ops.prefix_positions(positions, prefix, behind=behind)
    return y


class RelativeAttention(Attention):
    """Attention whose scores may get a bias by distance.  ``scale`` is that of the scores, by default 1.

    ``keys``: "all" attends to every position of the request, or up to that of the query if ``causal``; "prefix" to the
    prefix only; "rest" to what follows the prefix, up to the position of the query; "span" to the prefix and up to the
    position of the query.
    """

    def __init__(self, num_heads: int, head_dim: int, *, causal: bool, keys: str = "all", scale: float = 1.0) -> None:
        super().__init__(num_heads, num_heads, head_dim, scale=scale, causal=causal or keys != "all")
        self.keys, self.is_causal = keys, causal

    def store_and_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        *,
        bias: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> Tensor:
        """Store k and v and attend: q, k and v [T, heads * head_dim].

        ``bias`` is the weight of a DistanceBias; ``prefix`` [T], the lengths that PrefixLengths returns, is needed
        unless ``keys`` is "all".  Returns [T, heads * head_dim].
        """
        q, k, v = (x.view(-1, self.num_heads, self.head_dim) for x in (q, k, v))
        step = (batch.positions, batch.request_starts, batch.page_tables)
        ops.kv_append(k, v, self.state, *step, group=self.group)
        y: Tensor = ops.relative_attention(
            q,
            self.state,
            *step,
            None,
            None,
            bias,
            prefix,
            scale=self.scale,
            group=self.group,
            causal=self.is_causal,
            window=0,
            softcap=0.0,
            keys=self.keys,
        )
        return y.view(-1, self.num_heads * self.head_dim)


class TokenShift(PagedLayer):
    """The rows of the tokens ``offset`` positions later in the same request (earlier, if negative).

    It is attention with fixed scores, so that it needs no op of its own: the key at that distance gets all weight.  A
    sink gets it where the request has no such position, and the row is 0.  Rows have the precision of the pages.
    """

    bias: Tensor
    sinks: Tensor
    causal = False

    def __init__(self, num_heads: int, head_dim: int, offset: int) -> None:
        super().__init__(num_heads, head_dim, 0)
        reach = abs(offset) + 1  # the outermost columns are those of all larger distances
        bias = np.full((num_heads, 2 * reach + 1), _OTHER_TOKEN, np.float32)
        bias[:, reach + offset] = 0.0
        self.register_buffer("bias", torch.from_numpy(bias), persistent=False)
        self.register_buffer("sinks", torch.from_numpy(np.full(num_heads, _NO_TOKEN, np.float32)), persistent=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the rows [T, heads * head_dim] for x [T, heads * head_dim]; requests are whole in the step."""
        x = x.view(-1, self.num_kv_heads, self.head_dim)
        step = (batch.positions, batch.request_starts, batch.page_tables)
        ops.kv_append(x, x, self.state, *step, group=self.group)
        y: Tensor = ops.relative_attention(
            x,
            self.state,
            *step,
            None,
            self.sinks,
            self.bias,
            None,
            scale=0.0,
            group=self.group,
            causal=False,
            window=0,
            softcap=0.0,
            keys="all",
        )
        return y.view(-1, self.num_kv_heads * self.head_dim)


class DisentangledAttention(Attention):
    """Attention over all keys of a request, whose scores have parts by distance (DeBERTa, arXiv 2006.03654).

    ``buckets``: by key position - query position, from the smallest distance on, the column of ``c2p`` and ``p2c`` that
    is read.  Distances beyond the table count as its ends.  ``scale`` is that of the sum of all parts.
    """

    buckets: Tensor

    def __init__(self, num_heads: int, head_dim: int, buckets: Sequence[int], *, scale: float) -> None:
        super().__init__(num_heads, num_heads, head_dim, scale=scale, causal=False)
        columns = torch.from_numpy(np.array(buckets, np.float32))  # has values on the meta device, too
        self.register_buffer("buckets", columns, persistent=False)

    def store_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, *, c2p: Tensor | None, p2c: Tensor | None
    ) -> Tensor:
        """Store k and v and attend: q, k and v [T, heads, head_dim].

        ``c2p`` and ``p2c`` [T, heads, columns] are what a query, and a key, adds to the score for each bucket; None: it
        adds nothing.  Returns [T, heads * head_dim].
        """
        step = (batch.positions, batch.request_starts, batch.page_tables)
        ops.kv_append(k, v, self.state, *step, group=self.group)
        y: Tensor = ops.disentangled_attention(
            q,
            self.state,
            *step,
            c2p,
            p2c,
            self.buckets,
            scale=self.scale,
            group=self.group,
            causal=False,
            window=0,
            softcap=0.0,
        )
        return y.view(-1, self.num_heads * self.head_dim)
