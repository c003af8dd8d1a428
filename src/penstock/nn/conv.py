"""The short causal convolution, whose last inputs lie in KV pages."""

from __future__ import annotations

from penstock.nn.attention import PagedLayer
from penstock.nn.base import Tensor, nn, torch
from penstock.nn.batch import Batch
from penstock.ops.call import ops

__all__ = ["ShortConv"]

_MAX_HEAD_DIM = 64  # channels that share a scale in int8 pages


class ShortConv(PagedLayer):
    """A causal convolution of each channel over its last ``window`` inputs, times a gate.

    The inputs are stored in pages as keys (the lower half of the channels) and values (the upper half), and read from
    there, those of the current step too.  So they have the pages' precision however a prompt is cut into steps, and
    pages behind the window are free.  ``channels`` is even.
    """

    def __init__(self, channels: int, window: int, bias: bool = False) -> None:
        half = channels // 2
        head_dim = next(dim for dim in range(min(half, _MAX_HEAD_DIM), 0, -1) if half % dim == 0)
        super().__init__(half // head_dim, head_dim, window)
        self.channels = channels
        self.weight = nn.Parameter(torch.empty(channels, window), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(channels), requires_grad=False) if bias else None

    def forward(self, x: Tensor, gate: Tensor, batch: Batch) -> Tensor:
        """Return gate * convolution(x), [T, channels], for x and gate [T, channels]."""
        lower, upper = x.chunk(2, dim=-1)
        k = lower.view(-1, self.num_kv_heads, self.head_dim)
        v = upper.view(-1, self.num_kv_heads, self.head_dim)
        step = (batch.positions, batch.request_starts, batch.page_tables)
        ops.kv_append(k, v, self.state, *step, group=self.group)
        gate = gate.view(-1, 2 * self.num_kv_heads, self.head_dim)
        y: Tensor = ops.short_conv(
            gate, self.state, *step, self.weight, self.bias, group=self.group, window=self.window
        )
        return y.view(-1, self.channels)

    def extra_repr(self) -> str:
        """Return sizes, for ``print``."""
        return f"channels={self.channels}, window={self.window}, group={self.group}, state={list(self.state.shape)}"
