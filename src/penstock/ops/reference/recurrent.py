"""The reference of gated_delta, whose states lie in pages: that at the end of a page stays there."""

from __future__ import annotations

from itertools import pairwise
from typing import TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from penstock.core.layouts import PAGE_TOKENS
from penstock.errors import InvalidArgumentError

__all__ = ["GatedDeltaAttrs", "delta_state_elements", "gated_delta"]

_NORM_EPS = 1e-6


class GatedDeltaAttrs(TypedDict):
    """The attributes of the gated_delta op."""

    group: int
    key_heads: int
    head_dim: int


def delta_state_elements(head_dim: int, values: int, window: int) -> int:
    """Return the float32 numbers that a key head has in a recurrent state; ``values``: channels of its value heads.

    They are the matrices [heads, head_dim, value_dim] of its value heads, the last ``window`` - 1 inputs of the
    convolution, oldest first, padding to a multiple of 16, and as the last one the number of tokens seen.
    """
    return -(-(head_dim * values + (window - 1) * (2 * head_dim + values) + 1) // 16) * 16


def gated_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    **attrs: Unpack[GatedDeltaAttrs],
) -> Tensor:
    """Return the gated delta rule over the tokens of each request: [T, heads, value_dim].

    ``x`` [T, channels] has the channels of all queries, keys and values, key_heads * head_dim of the first two.
    ``conv`` [channels, window] convolves each channel, and SiLU follows.  Queries and keys are divided by their length,
    queries also by sqrt(head_dim).  A value head has a matrix S [head_dim, value_dim], and value head h goes with key
    head h // (heads / key_heads).  For each token, with decay exp(-exp(a_log) softplus(a + dt_bias)) and rate
    sigmoid(b):

        S = decay S;  S = S + k (rate (v - k^T S));  y = q^T S

    ``state`` [num_pages, key_heads * delta_state_elements] is written in place: the page of a token has the state after
    the last token in it, and the first token of a page begins with a copy of the page before.  A request must go on
    where its state ends.  The rule is that of Yang, Kautz and Hatamizadeh, Gated Delta Networks (arXiv 2412.06464).
    """
    cells = state.view(state.shape[0], attrs["key_heads"], -1)
    out = torch.empty(x.shape[0], a.shape[1], (x.shape[1] - 2 * attrs["key_heads"] * attrs["head_dim"]) // a.shape[1])
    decay = torch.exp(-torch.exp(a_log.double()) * softplus(a.double() + dt_bias.double()))
    rule = _Rule(conv.double(), attrs["key_heads"], attrs["head_dim"], a.shape[1])
    for request, (start, end) in enumerate(pairwise(request_starts.tolist())):
        table = page_tables[attrs["group"], request]
        current = _state_before(cells, table, int(positions[start]))
        for token in range(start, end):
            place = int(positions[token])
            rows = (x[token].double(), decay[token], torch.sigmoid(b[token].double()))
            out[token] = rule.step(current, *rows)
            current[:, -1] = place + 1
            if place % PAGE_TOKENS == PAGE_TOKENS - 1 or token == end - 1:
                cells[table[place // PAGE_TOKENS]] = current.float()
                current = current.float().double()
    return out


def _state_before(cells: Tensor, table: Tensor, position: int) -> Tensor:
    """Return the state [key_heads, elements] that the token at ``position`` begins with, in float64."""
    if position == 0:
        return torch.zeros(cells.shape[1:], dtype=torch.float64)
    found = cells[table[(position - 1) // PAGE_TOKENS]].double()
    if (found[:, -1] != position).any():
        raise InvalidArgumentError(
            f"[gated_delta] positions: expected {found[0, -1]:g}, the number of tokens that the state has seen, "
            f"found {position}",
            param="positions",
        )
    return found


class _Rule:
    """The step of one token, in float64."""

    def __init__(self, conv: Tensor, key_heads: int, head_dim: int, heads: int) -> None:
        self.conv, self.key_heads, self.dim, self.heads = conv, key_heads, head_dim, heads
        keys = key_heads * head_dim
        self.values = (conv.shape[0] - 2 * keys) // key_heads
        channels = torch.arange(conv.shape[0])
        of_heads = [channels[:keys].view(key_heads, -1), channels[keys : 2 * keys].view(key_heads, -1)]
        self.channels = torch.cat((*of_heads, channels[2 * keys :].view(key_heads, -1)), dim=1)  # [key_heads, own]

    def step(self, state: Tensor, x: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Bring ``state`` [key_heads, elements] to the next token; return its output [heads, value_dim]."""
        size, window = self.dim * self.values, self.conv.shape[1]
        width = self.channels.shape[1]
        past = state[:, size : size + (window - 1) * width].view(self.key_heads, window - 1, width)
        inputs = torch.cat((past, x[self.channels].unsqueeze(1)), dim=1)  # [key_heads, window, width]
        past.copy_(inputs[:, 1:].clone())
        mixed = silu((inputs * self.conv[self.channels].transpose(1, 2)).sum(dim=1))
        q, k, v = torch.split_with_sizes(mixed, (self.dim, self.dim, self.values), dim=1)
        q, k = (part / torch.sqrt(part.square().sum(dim=1, keepdim=True) + _NORM_EPS) for part in (q, k))
        shared = self.heads // self.key_heads
        q, k = (part.repeat_interleave(shared, dim=0) for part in (q * self.dim**-0.5, k))
        matrices = state[:, :size].view(self.key_heads, shared, self.dim, self.values // shared)
        whole = matrices.reshape(self.heads, self.dim, -1) * decay[:, None, None]
        delta = (v.reshape(self.heads, -1) - torch.einsum("hk,hkv->hv", k, whole)) * rate[:, None]
        whole = whole + k[:, :, None] * delta[:, None, :]
        matrices.copy_(whole.view(matrices.shape))
        return torch.einsum("hk,hkv->hv", q, whole).float()
