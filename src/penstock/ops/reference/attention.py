"""The references of kv_append and attention: keys and values in pages, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from penstock.core.layouts import PAGE_TOKENS
from penstock.errors import InvalidArgumentError
from penstock.ops.pages import page_elements
from penstock.ops.reference.linear import round_rows
from penstock.ops.reference.nibbles import NibblePages, restore_heads, rotate_heads

__all__ = [
    "AttentionAttrs", "RelativeAttentionAttrs", "ShortConvAttrs", "attend", "attention", "disentangled_attention",
    "find_page", "kv_append", "relative_attention", "round_half", "short_conv", "sink_attention",
]  # fmt: skip

_SCALE_BYTES = 4 * PAGE_TOKENS
_MIN_HALF = 2.0**-50


class AttentionAttrs(TypedDict):
    """The attributes of the attention op."""

    scale: float
    group: int
    causal: bool
    window: int
    softcap: float


class RelativeAttentionAttrs(AttentionAttrs):
    """The attributes of the relative_attention op."""

    keys: str


class ShortConvAttrs(TypedDict):
    """The attributes of the short_conv op."""

    group: int
    window: int


class _Pages:
    """Views into a state [num_pages, page_elements].

    ``k`` is [pages, heads, dim / n, 32, n] and ``v`` [pages, heads, 32 / n, dim, n], where n is 2 for bfloat16, else 1.
    """

    def __init__(self, op: str, state: Tensor, num_kv_heads: int, head_dim: int) -> None:
        expected = page_elements(state.dtype, num_kv_heads, head_dim)
        if state.dtype not in (torch.float32, torch.bfloat16, torch.int8) or state.shape[1] != expected:
            raise InvalidArgumentError(
                f"[{op}] state: expected float32, bfloat16, int8 or uint8 pages of {expected} elements, "
                f"got {state.dtype} of {state.shape[1]}",
                param="state",
            )
        heads = state.view(state.shape[0], num_kv_heads, -1)
        self.head_dim, self.together = head_dim, 2 if state.dtype == torch.bfloat16 else 1
        steps = -(-head_dim // self.together)
        scale_bytes = _SCALE_BYTES if state.dtype == torch.int8 else 0
        sizes = [PAGE_TOKENS * steps * self.together, scale_bytes, PAGE_TOKENS * head_dim, scale_bytes]
        keys, key_scales, values, value_scales = torch.split_with_sizes(heads, sizes, dim=2)
        self.k = torch.unflatten(keys, 2, (steps, PAGE_TOKENS, self.together))
        self.v = torch.unflatten(values, 2, (PAGE_TOKENS // self.together, head_dim, self.together))
        self.k_scale = key_scales.view(torch.float32) if scale_bytes else None  # [pages, heads, 32]
        self.v_scale = value_scales.view(torch.float32) if scale_bytes else None

    def write(self, page: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values [heads, dim] of one token."""
        if self.k_scale is not None and self.v_scale is not None:
            (k, k_scale), (v, v_scale) = round_rows(k), round_rows(v)
            self.k_scale[page, :, slot] = k_scale[:, 0]
            self.v_scale[page, :, slot] = v_scale[:, 0]
        elif self.together == 2:
            k, v = round_half(torch.nn.functional.pad(k, (0, self.head_dim % 2))), round_half(v)
        self.k[page, :, :, slot] = torch.unflatten(k, 1, (-1, self.together)).to(self.k.dtype)
        self.v[page, :, slot // self.together, :, slot % self.together] = v.to(self.v.dtype)

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a list of pages [n] in float64, both [heads, n * 32, dim]."""
        k = self.k[pages].double().transpose(3, 4).flatten(2, 3)[:, :, : self.head_dim]  # [n, heads, dim, 32]
        v = self.v[pages].double().transpose(3, 4).flatten(2, 3)  # [n, heads, 32, dim]
        if self.k_scale is not None and self.v_scale is not None:
            k = k * self.k_scale[pages].double().unsqueeze(2)
            v = v * self.v_scale[pages].double().unsqueeze(3)
        return k.permute(1, 0, 3, 2).flatten(1, 2), v.permute(1, 0, 2, 3).flatten(1, 2)


def _pages(op: str, state: Tensor, num_kv_heads: int, head_dim: int) -> _Pages | NibblePages:
    of_nibbles = state.dtype == torch.uint8
    return (NibblePages if of_nibbles else _Pages)(op, state, num_kv_heads, head_dim)


def round_half(x: Tensor) -> Tensor:
    """Round ``x`` to bfloat16 as attention does: magnitudes below 2^-50 become zero."""
    return torch.where(x.abs() < _MIN_HALF, 0.0, x).bfloat16()


def kv_append(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    *,
    group: int,
) -> None:
    """Write each token's k and v [T, kv_heads, head_dim] into its slot of its request's page, in place.

    positions [T]; request_starts [B+1]; page_tables [groups, B, width]; state [num_pages, page_elements].  A float32
    state stores the values unchanged, bfloat16 rounds them, int8 rounds them with one scale per
    token and head, and uint8 rounds them to 4 bits after a rotation (``nibbles``).
    """
    pages = _pages("kv_append", state, k.shape[1], k.shape[2])
    starts, table, places = request_starts.tolist(), page_tables[group].tolist(), positions.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        for token in range(start, end):
            page, slot = find_page("kv_append", table[request], places[token], state.shape[0])
            pages.write(page, slot, k[token], v[token])


def find_page(op: str, table: list[int], position: int, num_pages: int) -> tuple[int, int]:
    """Return the page of a position of a request, and the slot in it; InvalidArgumentError if the table lacks it."""
    tile, slot = divmod(position, PAGE_TOKENS)
    page = table[tile] if tile < len(table) else -1
    if not 0 <= page < num_pages:
        raise InvalidArgumentError(f"[{op}] page_tables: expected a page for position {position}", param="page_tables")
    return page, slot


def attention(
    q: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    alibi: Tensor | None,
    **attrs: Unpack[AttentionAttrs],
) -> Tensor:
    """Return softmax attention of q [T, heads, head_dim] over the keys that kv_append stored: [T, heads, head_dim].

    A query at position p attends to positions (p - window, p], and to those below p + window when not causal.  With
    window 0 it attends to [0, p], or to every position of its request when not causal.  Heads share KV heads in groups.
    ``alibi`` [heads] holds slopes.  Over other pages than float32 ones the queries are rounded to bfloat16 first,
    rotated where the pages are.  Kernels
    also round the probabilities, which the tolerance covers.
    """
    return _attention(q, state, (positions, request_starts, page_tables), (alibi, None), attrs)


def sink_attention(
    q: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    alibi: Tensor | None,
    sinks: Tensor,
    **attrs: Unpack[AttentionAttrs],
) -> Tensor:
    """Return attention as ``attention`` does, with a score of each head in ``sinks`` [heads] that has no value.

    The sink enters only the denominator of the softmax: the weights of the keys sum up to less than 1 (gpt-oss,
    arXiv 2508.10925; Xiao et al., arXiv 2309.17453).
    """
    return _attention(q, state, (positions, request_starts, page_tables), (alibi, sinks), attrs)


def relative_attention(
    q: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    alibi: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    prefix: Tensor | None,
    **attrs: Unpack[RelativeAttentionAttrs],
) -> Tensor:
    """Return attention as ``sink_attention`` does, with a bias by distance, over a part of the keys.

    ``bias`` [heads, 2 r + 1] is added to the scores after the scale: column r + d for a key d positions after the
    query, where d counts as -r below and as r above (T5, arXiv 1910.10683).  ``prefix`` [T] is the length of the
    request's prefix.  ``keys`` "all" needs none.  With "prefix" every query attends to the prefix, as far as causal
    attention does.  With "rest" a query behind the prefix does not attend to it.  With "span" every query attends to
    the prefix and to all that causal attention does (the prefix mask of GLM, arXiv 2103.10360).
    """

    def added(rows: slice, num_keys: int) -> Tensor:
        places = positions[rows].long()
        keys = torch.arange(num_keys)
        extra = torch.zeros(q.shape[1], len(places), num_keys, dtype=torch.float64)
        if bias is not None:
            reach = bias.shape[1] // 2
            extra = extra + bias.double()[:, (keys[None, :] - places[:, None]).clamp(-reach, reach) + reach]
        if prefix is not None:
            ends = prefix[rows].long().clamp(min=1)[:, None]
            is_hidden = {
                "prefix": keys >= ends,
                "rest": (keys < ends) & (ends <= places[:, None]),
                "span": (keys >= ends) & (keys > places[:, None]) & attrs["causal"],
            }[attrs["keys"]]
            extra = torch.where(is_hidden, -torch.inf, extra)
        return extra

    step, shared = (positions, request_starts, page_tables), attrs.copy()
    if attrs["keys"] == "span":
        shared["causal"] = False  # ``added`` hides the later keys
    return _attention(q, state, step, (alibi, sinks), shared, added)


def disentangled_attention(
    q: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    c2p: Tensor | None,
    p2c: Tensor | None,
    buckets: Tensor,
    **attrs: Unpack[AttentionAttrs],
) -> Tensor:
    """Return attention over all keys of a request, whose scores have parts by distance (arXiv 2006.03654).

    Before the scale, query i and key j add ``c2p[i, h, b] + p2c[j, h, b]`` for head h: of the query's content and the
    key's position, and of the key's content and the query's position.  Both are [T, heads, columns]; either may be
    absent.  Column b is ``buckets[r + j - i]``, where ``buckets`` [2 r + 1] are whole numbers, and distances beyond r
    count as r.  ``causal`` is False and ``softcap`` 0.  Every request is whole in the step.
    """
    for start, end in pairwise(request_starts.tolist()):
        if end > start and int(positions[start]):
            raise InvalidArgumentError(
                f"[disentangled_attention] positions: expected 0 for the first token, got {int(positions[start])}",
                param="positions",
            )

    def added(rows: slice, num_keys: int) -> Tensor:
        places, reach = positions[rows].long(), len(buckets) // 2
        distances = torch.arange(len(places))[None, :] - places[:, None]
        columns = buckets[distances.clamp(-reach, reach) + reach].long().expand(q.shape[1], -1, -1)  # [heads, t, keys]
        extra = torch.zeros(q.shape[1], len(places), num_keys, dtype=torch.float64)
        own = extra[:, :, : len(places)]
        if c2p is not None:
            own += c2p[rows].double().transpose(0, 1).gather(2, columns)
        if p2c is not None:
            own += p2c[rows].double().transpose(0, 1).gather(2, columns.transpose(1, 2)).transpose(1, 2)
        return extra * attrs["scale"]

    return _attention(q, state, (positions, request_starts, page_tables), (None, None), attrs, added)


def _attention(
    q: Tensor,
    state: Tensor,
    step: tuple[Tensor, Tensor, Tensor],
    heads: tuple[Tensor | None, Tensor | None],
    attrs: AttentionAttrs,
    added: Callable[[slice, int], Tensor] | None = None,
) -> Tensor:
    """Attend with the positions, request_starts and page_tables of ``step``, and the alibi and sinks of ``heads``.

    ``added`` returns what is added to the scores [heads, rows, keys] of rows of ``q``.
    """
    positions, request_starts, page_tables = step
    elements = page_elements(state.dtype, 1, q.shape[2])
    pages = _pages("attention", state, state.shape[1] // elements, q.shape[2])
    num_kv_heads = pages.k.shape[1]
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads:
        raise InvalidArgumentError(
            f"[attention] q: expected a multiple of {num_kv_heads} heads, got {q.shape[1]}", param="q"
        )
    out = torch.empty(q.shape, dtype=torch.float32)
    starts = request_starts.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        places = positions[start:end].long()
        num_tiles = int(places.max()) // PAGE_TOKENS + 1
        k, v = pages.read(page_tables[attrs["group"], request, :num_tiles].long().clamp(min=0))
        queries = _rounded_queries(q[start:end], state.dtype)
        extra = None if added is None else added(slice(start, end), k.shape[1])
        out[start:end] = attend(queries.double(), k, v, places, heads, attrs, extra)
    return out


def _rounded_queries(q: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint8:  # rounded as they are multiplied: rotated
        return restore_heads(round_half(rotate_heads(q)).double())
    return q if dtype == torch.float32 else round_half(q)


def short_conv(
    gate: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    **attrs: Unpack[ShortConvAttrs],
) -> Tensor:
    """Return gate * (bias + convolution of each channel over its last ``window`` inputs): [T, 2 * heads, dim].

    ``gate`` has that shape too.  The pages hold the inputs as kv_append stored them, the lower half of the channels as
    keys [heads, dim] and the upper half as values.  ``weight`` [channels, window]; its last column is of the token
    itself.  Inputs before position 0 are zero.  This is the convolution of LFM2 (Liquid AI, 2025).
    """
    num_heads, window = gate.shape[1] // 2, attrs["window"]
    pages = _pages("short_conv", state, num_heads, gate.shape[2])
    out = torch.empty(gate.shape, dtype=torch.float32)
    for request, (start, end) in enumerate(pairwise(request_starts.tolist())):
        places = positions[start:end].long()
        num_tiles = int(places.max()) // PAGE_TOKENS + 1
        keys, values = pages.read(page_tables[attrs["group"], request, :num_tiles].long().clamp(min=0))
        inputs = torch.cat((keys, values)).transpose(0, 1)  # [positions, 2 * heads, dim]
        total = torch.zeros(end - start, *gate.shape[1:], dtype=torch.float64)
        if bias is not None:
            total = total + bias.double().view(gate.shape[1:])
        for tap in range(window):
            taken = places - (window - 1) + tap
            taken_inputs = torch.where((taken >= 0)[:, None, None], inputs[taken.clamp(min=0)], 0.0)
            total = total + taken_inputs * weight[:, tap].double().view(gate.shape[1:])
        out[start:end] = (gate[start:end].double() * total).float()
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Tensor,
    heads: tuple[Tensor | None, Tensor | None],
    attrs: AttentionAttrs,
    extra: Tensor | None = None,
) -> Tensor:
    """Attend for one request: q [t, heads, dim], k [kv_heads, length, dim], v [kv_heads, length, value_dim].

    ``places`` [t] are the positions of the queries; ``extra`` [heads, t, length] is added to the scores.  Returns
    float32 [t, heads, value_dim].
    """
    alibi, sinks = heads
    shared = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(shared, dim=0), v.repeat_interleave(shared, dim=0)
    keys = torch.arange(k.shape[1])
    distance = keys[None, :] - places[:, None]  # [t, length]
    valid = (keys <= places.max()).expand(len(places), -1)
    if attrs["causal"]:
        valid = valid & (distance <= 0)
    if attrs["window"]:
        valid = valid & (distance.abs() < attrs["window"])
    is_attended = valid.any(dim=0)  # slots that no query attends to may hold anything, including NaN
    k, v = torch.where(is_attended[None, :, None], k, 0.0), torch.where(is_attended[None, :, None], v, 0.0)
    scores = torch.einsum("thd,hld->htl", q, k) * attrs["scale"]
    if attrs["softcap"]:
        scores = attrs["softcap"] * torch.tanh(scores / attrs["softcap"])
    if alibi is not None:
        scores = scores + alibi.double()[:, None, None] * distance
    if extra is not None:
        scores = scores + extra
    scores = torch.where(valid, scores, -torch.inf)
    if sinks is not None:
        own = sinks.double()[:, None, None].expand(-1, len(places), 1)
        scores = torch.cat((scores, own), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]]
    return torch.einsum("htl,hld->thd", weights, v).float()
