"""The gated delta rule and selective state spaces, whose recurrent states lie in pages."""

from __future__ import annotations

from penstock.nn.attention import PagedLayer
from penstock.nn.base import Tensor, nn, torch
from penstock.nn.batch import Batch
from penstock.nn.module import Module
from penstock.ops.call import ops
from penstock.ops.pages import state_elements

__all__ = ["ConvWeight", "GatedDelta", "SsmScan"]

_STATE_WINDOW = 2  # a token reads the state of the token before it
_MIN_BLOCKS = 16  # of heads, which threads share; more of them repeat more of the convolution


class ConvWeight(Module):
    """The weight [channels, window] of a convolution of each channel over its last inputs, for an op that convolves.

    ``bias`` [channels] is None without one.
    """

    def __init__(self, channels: int, window: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, window), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(channels), requires_grad=False) if bias else None


class RecurrentLayer(PagedLayer):
    """A layer with a recurrent state in each page, [heads, numbers] in float32, instead of keys and values."""

    recurrent = True

    def __init__(self, num_heads: int, elements: int) -> None:
        super().__init__(num_heads, elements, _STATE_WINDOW)

    def new_pages(self, num_pages: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed pages; ``dtype`` is that of keys and values, which a recurrent state does not follow."""
        return torch.zeros(num_pages, self.num_kv_heads * self.head_dim)


class GatedDelta(RecurrentLayer):
    """A short convolution with SiLU, and the gated delta rule over its queries, keys and values.

    Each page holds the state after its last token, [key_heads, numbers] in float32: so a full page is the snapshot from
    which another request with the same tokens goes on.  ``heads`` is the number of value heads.  ``tiled``: the result
    has the first value head of every key head, then the second of every one.
    """

    def __init__(
        self, key_heads: int, heads: int, head_dim: int, value_dim: int, window: int, tiled: bool = False
    ) -> None:
        elements = state_elements(head_dim, heads // key_heads * value_dim, window)
        super().__init__(key_heads, elements)
        self.heads, self.key_dim, self.value_dim, self.tiled = heads, head_dim, value_dim, tiled
        self.channels = 2 * key_heads * head_dim + heads * value_dim

    def forward(
        self, x: Tensor, a: Tensor, b: Tensor, batch: Batch, *, conv: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> Tensor:
        """Return y [T, heads, value_dim] of the channels x [T, channels] and the gates a and b [T, heads]."""
        rule = ops.gated_delta_tiled if self.tiled else ops.gated_delta
        y: Tensor = rule(
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


class SsmScan(RecurrentLayer):
    """A short convolution with SiLU, and the selective state space (Mamba-2) over its channels.

    Each page holds the state after its last token, as of ``GatedDelta``.  The channels are those of all heads, then B
    and C, each ``state_dim`` of every group; ``groups`` divides ``heads``.  ``dt_limits`` bound the step of a token.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        groups: int,
        state_dim: int,
        window: int,
        dt_limits: tuple[float, float],
    ) -> None:
        blocks = _num_blocks(heads, groups)
        super().__init__(blocks, state_elements(state_dim, heads // blocks * head_dim, window))
        self.heads, self.groups, self.state_dim, self.dt_limits = heads, groups, state_dim, dt_limits
        self.channels = heads * head_dim + 2 * groups * state_dim

    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        batch: Batch,
        conv: ConvWeight,
        *,
        a_log: Tensor,
        dt_bias: Tensor,
        d: Tensor,
    ) -> Tensor:
        """Return y [T, heads, head_dim] of the channels x [T, channels] and the steps dt [T, heads].

        ``a_log``, ``dt_bias`` and ``d`` are [heads].
        """
        y: Tensor = ops.ssm_scan(
            x,
            dt,
            self.state,
            batch.positions,
            batch.request_starts,
            batch.page_tables,
            conv.weight,
            conv.bias,
            a_log,
            dt_bias,
            d,
            group=self.group,
            groups=self.groups,
            blocks=self.num_kv_heads,
            state_dim=self.state_dim,
            dt_min=self.dt_limits[0],
            dt_max=self.dt_limits[1],
        )
        return y

    def extra_repr(self) -> str:
        """Return sizes, for ``print``."""
        return (
            f"heads={self.heads}, blocks={self.num_kv_heads}, groups={self.groups}, state_dim={self.state_dim}, "
            f"group={self.group}, state={list(self.state.shape)}"
        )


def _num_blocks(heads: int, groups: int) -> int:
    """Return the number of blocks of heads: the least that threads can share, each of heads of one group."""
    choices = range(groups, heads, groups)
    return next((blocks for blocks in choices if blocks >= _MIN_BLOCKS and heads % blocks == 0), heads)
