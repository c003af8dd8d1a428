"""The gated delta rule, whose recurrent states lie in pages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.nn.attention import PagedLayer
from penstock.nn.batch import Batch
from penstock.nn.module import Module
from penstock.ops.eager import ops
from penstock.ops.reference import delta_state_elements

__all__ = ["ConvWeight", "GatedDelta"]

_STATE_WINDOW = 2  # a token reads the state of the token before it


class ConvWeight(Module):
    """The weight [channels, window] of a convolution of each channel over its last inputs, for an op that convolves."""

    def __init__(self, channels: int, window: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, window), requires_grad=False)


class GatedDelta(PagedLayer):
    """A short convolution with SiLU, and the gated delta rule over its queries, keys and values.

    Each page holds the state after its last token, [key_heads, numbers] in float32: so a full page is the snapshot from
    which another request with the same tokens goes on.  ``heads`` is the number of value heads.
    """

    recurrent = True

    def __init__(self, key_heads: int, heads: int, head_dim: int, value_dim: int, window: int) -> None:
        elements = delta_state_elements(head_dim, heads // key_heads * value_dim, window)
        super().__init__(key_heads, elements, _STATE_WINDOW)
        self.heads, self.key_dim, self.value_dim = heads, head_dim, value_dim
        self.channels = 2 * key_heads * head_dim + heads * value_dim

    def new_pages(self, num_pages: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed pages; ``dtype`` is that of keys and values, which a recurrent state does not follow."""
        return torch.zeros(num_pages, self.num_kv_heads * self.head_dim)

    def forward(
        self, x: Tensor, a: Tensor, b: Tensor, batch: Batch, *, conv: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> Tensor:
        """Return y [T, heads, value_dim] of the channels x [T, channels] and the gates a and b [T, heads]."""
        y: Tensor = ops.gated_delta(
            x,
            a,
            b,
            self.state,
            batch.positions,
            batch.request_starts,
            batch.page_tables,
            conv,
            a_log,
            dt_bias,
            group=self.group,
            key_heads=self.num_kv_heads,
            head_dim=self.key_dim,
        )
        return y

    def extra_repr(self) -> str:
        """Return sizes, for ``print``."""
        return (
            f"key_heads={self.num_kv_heads}, heads={self.heads}, head_dim={self.key_dim}, value_dim={self.value_dim}, "
            f"group={self.group}, state={list(self.state.shape)}"
        )
