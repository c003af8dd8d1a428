"""The references of the recurrent ops, whose states lie in pages: that at the end of a page stays there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from penstock.core.layouts import PAGE_TOKENS
from penstock.errors import InvalidArgumentError

__all__ = ["GatedDeltaAttrs", "SsmScanAttrs", "gated_delta", "gated_delta_tiled", "ssm_scan"]

_NORM_EPS = 1e-6


class GatedDeltaAttrs(TypedDict):
    """The attributes of the gated_delta op."""

    group: int
    key_heads: int
    head_dim: int


class SsmScanAttrs(TypedDict):
    """The attributes of the ssm_scan op."""

    group: int
    groups: int
    blocks: int
    state_dim: int
    dt_min: float
    dt_max: float


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

    ``state`` [num_pages, key_heads * state_elements] is written in place: the page of a token has the state after
    the last token in it, and the first token of a page begins with a copy of the page before.  A request must go on
    where its state ends.  The rule is that of Yang, Kautz and Hatamizadeh, Gated Delta Networks (arXiv 2412.06464).
    """
    cells = state.view(state.shape[0], attrs["key_heads"], -1)
    out = torch.empty(x.shape[0], a.shape[1], (x.shape[1] - 2 * attrs["key_heads"] * attrs["head_dim"]) // a.shape[1])
    decay = torch.exp(-torch.exp(a_log.double()) * softplus(a.double() + dt_bias.double()))
    rule = _Rule(conv.double(), attrs["key_heads"], attrs["head_dim"], a.shape[1])

    def step(token: int, current: Tensor) -> None:
        out[token] = rule.step(current, x[token].double(), decay[token], torch.sigmoid(b[token].double()))

    _run("gated_delta", cells, positions, request_starts, page_tables[attrs["group"]], step)
    return out


def gated_delta_tiled(
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
    """Return what ``gated_delta`` does, with value heads in tiled order: the first of every key head, then the second.

    GGUF files have the columns of the projection behind the rule in this order.
    """
    y = gated_delta(x, a, b, state, positions, request_starts, page_tables, conv, a_log, dt_bias, **attrs)
    return y.view(y.shape[0], attrs["key_heads"], -1, y.shape[2]).transpose(1, 2).reshape(y.shape)


def ssm_scan(
    x: Tensor,
    dt: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    conv: Tensor,
    conv_bias: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    **attrs: Unpack[SsmScanAttrs],
) -> Tensor:
    """Return the selective state space over the tokens of each request: [T, heads, head_dim].

    ``x`` [T, channels] has the channels of all heads, then B and C, each state_dim of every group.  ``conv`` [channels,
    window] convolves each channel, ``conv_bias`` [channels] is added, and SiLU follows.  A head has a matrix S
    [state_dim, head_dim], and head h goes with group h // (heads / groups).  For each token, with the step D =
    softplus(dt + dt_bias), which is brought between dt_min and dt_max:

        S = exp(-exp(a_log) D) S + B (D x);  y = C^T S + d x

    ``state`` [num_pages, blocks * state_elements] is written in place as of gated_delta.  The heads of a block, which
    are of one group, share the inputs of their convolution.  The recurrence is that of Dao and Gu, Transformers are
    SSMs (arXiv 2405.21060), with the names of its authors' implementation.
    """
    cells = state.view(state.shape[0], attrs["blocks"], -1)
    rule = _Scan(conv, conv_bias, d.double(), attrs["blocks"], attrs["groups"], attrs["state_dim"])
    out = torch.empty(x.shape[0], dt.shape[1], rule.values * attrs["blocks"] // dt.shape[1])
    steps = softplus(dt.double() + dt_bias.double()).clamp(attrs["dt_min"], attrs["dt_max"])
    decay = torch.exp(-torch.exp(a_log.double()) * steps)

    def step(token: int, current: Tensor) -> None:
        out[token] = rule.step(current, x[token].double(), decay[token], steps[token])

    _run("ssm_scan", cells, positions, request_starts, page_tables[attrs["group"]], step)
    return out


def _run(
    op: str,
    cells: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    tables: Tensor,
    step: Callable[[int, Tensor], None],
) -> None:
    """Call ``step`` for each token, with the state that it brings to the next one, and store the states in pages."""
    for request, (start, end) in enumerate(pairwise(request_starts.tolist())):
        current = _state_before(op, cells, tables[request], int(positions[start]))
        for token in range(start, end):
            place = int(positions[token])
            step(token, current)
            current[:, -1] = place + 1
            if place % PAGE_TOKENS == PAGE_TOKENS - 1 or token == end - 1:
                cells[tables[request, place // PAGE_TOKENS]] = current.float()
                current = current.float().double()


def _state_before(op: str, cells: Tensor, table: Tensor, position: int) -> Tensor:
    """Return the state [key_heads, elements] that the token at ``position`` begins with, in float64."""
    if position == 0:
        return torch.zeros(cells.shape[1:], dtype=torch.float64)
    state = cells[table[(position - 1) // PAGE_TOKENS]].double()
    if (state[:, -1] != position).any():
        raise InvalidArgumentError(
            f"[{op}] positions: expected {state[0, -1]:g}, the number of tokens that the state has seen, "
            f"got {position}",
            param="positions",
        )
    return state


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
        size = self.dim * self.values
        mixed = silu(_convolve(state, size, x[self.channels], self.conv[self.channels]))
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


class _Scan:
    """The step of one token of a selective state space, in float64."""

    def __init__(
        self, conv: Tensor, bias: Tensor | None, skip: Tensor, blocks: int, groups: int, state_dim: int
    ) -> None:
        self.blocks, self.dim, self.skip = blocks, state_dim, skip
        channels, width = torch.arange(conv.shape[0]), groups * state_dim
        of_heads = channels[: -2 * width].view(blocks, -1)
        self.values = of_heads.shape[1]
        keys, queries = (
            part.view(groups, -1).repeat_interleave(blocks // groups, dim=0)
            for part in (channels[-2 * width : -width], channels[-width:])
        )
        self.channels = torch.cat((keys, queries, of_heads), dim=1)  # [blocks, own]
        self.conv = conv.double()[self.channels]
        self.bias = torch.zeros(()) if bias is None else bias.double()[self.channels]

    def step(self, state: Tensor, x: Tensor, decay: Tensor, step: Tensor) -> Tensor:
        """Bring ``state`` [blocks, elements] to the next token; return its output [heads, head_dim]."""
        size, heads = self.dim * self.values, decay.shape[0]
        shared = heads // self.blocks
        mixed = silu(_convolve(state, size, x[self.channels], self.conv) + self.bias)
        b, c, values = torch.split_with_sizes(mixed, (self.dim, self.dim, self.values), dim=1)
        b, c = (part.repeat_interleave(shared, dim=0) for part in (b, c))
        own = values.reshape(heads, -1)
        matrices = state[:, :size].view(self.blocks, shared, self.dim, -1)
        whole = matrices.reshape(heads, self.dim, -1) * decay[:, None, None]
        whole = whole + b[:, :, None] * (own * step[:, None])[:, None, :]
        matrices.copy_(whole.view(matrices.shape))
        return (torch.einsum("hk,hkv->hv", c, whole) + self.skip[:, None] * own).float()


def _convolve(state: Tensor, size: int, x: Tensor, conv: Tensor) -> Tensor:
    """Return the convolution [heads, width] of x [heads, width] and the inputs before it, which move on by one.

    The inputs lie in ``state`` [heads, elements] behind its first ``size`` numbers.  ``conv``: [heads, width, window].
    """
    (heads, width), window = x.shape, conv.shape[2]
    past = state[:, size : size + (window - 1) * width].view(heads, window - 1, width)
    inputs = torch.cat((past, x.unsqueeze(1)), dim=1)  # [heads, window, width]
    past.copy_(inputs[:, 1:].clone())
    return (inputs * conv.transpose(1, 2)).sum(dim=1)
