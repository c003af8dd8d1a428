"""The attention layer, and the states that hold the KV pages of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.nn.base import Tensor, nn, torch
from penstock.nn.batch import Batch
from penstock.nn.module import Module
from penstock.ops.call import ops
from penstock.ops.pages import page_elements

__all__ = [
    "Attention",
    "PageGroup",
    "PagedLayer",
    "alibi_slopes",
    "allocate_states",
    "assign_page_groups",
    "paged_layers",
]


class PageGroup(NamedTuple):
    """The key of a page group: layers with equal window, heads and kind of pages share page tables."""

    window: int
    num_kv_heads: int
    head_dim: int
    recurrent: bool = False
    latent_dim: int = 0


class PagedLayer(Module):
    """A layer that stores a row of keys and a row of values per token, each [num_kv_heads, head_dim], in pages.

    ``state`` [num_pages, page_elements] has one page until ``allocate_states`` sizes it.  ``window`` is the number of
    positions that a token reads, including its own; 0 is every position.  With ``latent_dim`` above 0 the layer stores
    one row per token, [head_dim], whose first ``latent_dim`` numbers are the value.
    """

    state: Tensor
    causal = True
    recurrent = False

    def __init__(self, num_kv_heads: int, head_dim: int, window: int, latent_dim: int = 0) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.window = num_kv_heads, head_dim, window
        self.latent_dim, self.group = latent_dim, 0
        self.register_buffer("state", self.new_pages(1, torch.float32), persistent=False)

    def new_pages(self, num_pages: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed pages for keys and values of ``dtype``, on the device of the context."""
        elements = page_elements(dtype, self.num_kv_heads, self.head_dim, self.latent_dim)
        return torch.zeros(num_pages, elements, dtype=dtype)

    def page_group(self) -> PageGroup:
        """Return the page group of this layer."""
        return PageGroup(self.window, self.num_kv_heads, self.head_dim, self.recurrent, self.latent_dim)


class Attention(PagedLayer):
    """Stores a step's keys and values in pages, and attends over the pages of each token's request.

    ``slopes``, one per head, are those of ALiBi: slope times (key position - query position) is added to each score
    after its scale.
    """

    slopes: Tensor | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int = 0,
        scale: float | None = None,
        causal: bool = True,
        softcap: float = 0.0,
        slopes: Sequence[float] = (),
    ) -> None:
        super().__init__(num_kv_heads, head_dim, window)
        self.num_heads, self.causal, self.softcap = num_heads, causal, softcap
        self.scale = head_dim**-0.5 if scale is None else scale
        values = torch.from_numpy(np.array(slopes, np.float32)) if slopes else None  # not on the meta device
        self.register_buffer("slopes", values, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
        """Attend: q [T, heads * head_dim], k and v [T, kv_heads * head_dim], or with heads as a separate dimension.

        ``sinks`` [heads] are scores that enter only the denominator of the softmax.  Returns [T, heads * head_dim].
        """
        k = k.view(-1, self.num_kv_heads, self.head_dim)
        v = v.view(-1, self.num_kv_heads, self.head_dim)
        step = (batch.positions, batch.request_starts, batch.page_tables)
        ops.kv_append(k, v, self.state, *step, group=self.group)
        return self.attend(q, batch, sinks)

    def attend(self, q: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
        """Attend as ``forward`` does, over pages that have the step's keys and values already.

        A later layer that shares them calls it.
        """
        q = q.view(-1, self.num_heads, self.head_dim)
        step = (batch.positions, batch.request_starts, batch.page_tables)
        attention, own = (ops.attention, ()) if sinks is None else (ops.sink_attention, (sinks,))
        y: Tensor = attention(
            q,
            self.state,
            *step,
            self.slopes,
            *own,
            scale=self.scale,
            group=self.group,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
        )
        return y.view(-1, self.num_heads * self.head_dim)

    def extra_repr(self) -> str:
        """Return heads and window, for ``print``."""
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"window={self.window}, group={self.group}, state={list(self.state.shape)}"
        )


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head (Press et al., arXiv 2108.12409).

    For a power of two they are 2^(-8 i / n), i from 1; other numbers of heads add every second slope of 2n heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]


def paged_layers(network: nn.Module) -> dict[str, PagedLayer]:
    """Return the layers with KV pages by module path, in order."""
    return {name: module for name, module in network.named_modules() if isinstance(module, PagedLayer)}


def assign_page_groups(network: nn.Module) -> list[PageGroup]:
    """Number the page groups of a network in order of first use, and set the ``group`` of each layer with pages."""
    groups: list[PageGroup] = []
    for layer in paged_layers(network).values():
        group = layer.page_group()
        if group not in groups:
            groups.append(group)
        layer.group = groups.index(group)
    return groups


def allocate_states(
    network: nn.Module, num_pages: int, dtype: torch.dtype = torch.float32, group_pages: Sequence[int] = ()
) -> int:
    """Give every layer with pages ``num_pages`` zeroed ones of float32, bfloat16 or int8; return the total bytes.

    ``group_pages``: the pages of each page group instead, if it is not empty.  Recurrent states are float32 always.
    """
    num_bytes = 0
    for layer in paged_layers(network).values():
        with torch.device("cpu"):
            layer.state = layer.new_pages(group_pages[layer.group] if group_pages else num_pages, dtype)
        num_bytes += layer.state.nbytes
    return num_bytes
