"""Attention and rotary embeddings of opset 23 and later."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.graph.general.draft import Tensor
from penstock.graph.general.sizes import SizeLike
from penstock.graph.ir import DType
from penstock.graph.onnx.context import Site
from penstock.graph.onnx.registry import reads
from penstock.graph.onnx.shapes import padded

__all__: list[str] = []


@dataclass
class _Heads:
    """[B, heads, S, D], and the keys and values with those of earlier calls."""

    q: Tensor
    k: Tensor
    v: Tensor
    past: SizeLike


def _split(site: Site, x: Tensor, heads: int) -> Tensor:
    if x.rank == 4:
        return x
    site.expect(x.rank == 3 and heads > 0, "3 dimensions and a number of heads, or 4 dimensions")
    b, s, width = x.shape
    return site.permute(site.reshape(x, (b, s, heads, width // heads)), (0, 2, 1, 3))


@reads("Attention")
def _attention(site: Site) -> tuple[Tensor | None, ...]:
    heads, kv_heads = site.int_attr("q_num_heads"), site.int_attr("kv_num_heads")
    q, k, v = (_split(site, site.x(at), heads if at == 0 else kv_heads) for at in range(3))
    past: SizeLike = 0
    if site.has(4):
        past = site.x(4).shape[2]
        k, v = site.concat([site.x(4), k], 2), site.concat([site.x(5), v], 2)
    parts = _Heads(q, k, v, past)
    mask = _mask(site, parts)
    scale = site.attr("scale")
    size = site.fixed(q.shape[3], "the size of a head")
    factor = float(scale) if scale is not None else 1.0 / math.sqrt(size)
    softcap = site.float_attr("softcap")
    scores = _scores(site, parts, mask, factor, softcap) if site.wanted(3) else None
    y: Tensor = site.add("sdpa", q, k, v, mask, scale=factor, causal=False, softcap=softcap)
    if site.x(0).rank == 3:
        y = site.permute(y, (0, 2, 1, 3))
        y = site.reshape(y, (y.shape[0], y.shape[1], y.shape[2] * y.shape[3]))
    return y, k, v, scores


def _mask(site: Site, parts: _Heads) -> Tensor | None:
    """Return what is added to the scores or lets keys through: the mask, the future, a window, the lengths."""
    rows, keys = parts.q.shape[2], parts.k.shape[2]
    mask = site.optional(3)
    if mask is not None:
        missing = keys - mask.shape[-1]
        if not (isinstance(missing, int) and missing <= 0) and missing != 0:
            allowed = mask if mask.dtype == DType.BOOL else None
            pads = (*[0] * (2 * mask.rank - 1), missing)
            wide = padded(site, site.cast(mask, DType.F32), pads, 0.0 if allowed is not None else -math.inf)
            mask = site.cast(wide, DType.BOOL) if allowed is not None else wide
    allowed = _allowed(site, parts, rows, keys)
    if allowed is None or mask is None:
        return mask if allowed is None else allowed
    if mask.dtype == DType.BOOL:
        return site.binary("and", mask, allowed)
    made: Tensor = site.add("where", allowed, mask, site.constant(np.array(-np.inf, np.float32)))
    return made


def _allowed(site: Site, parts: _Heads, rows: SizeLike, keys: SizeLike) -> Tensor | None:
    """Return which keys a query sees: [S, T], or [B, 1, S, T] where the lengths differ; None: all of them."""
    lengths = site.cast(site.x(6), DType.I64) if site.has(6) else None
    place = site.add("iota", range=(0, 1, keys))
    at = site.reshape(site.add("iota", range=(0, 1, rows)), (rows, 1))
    if lengths is not None and not site.has(4):
        offset = site.reshape(site.binary("sub", lengths, site.reshape(site.constant([rows]), ())),
                              (lengths.shape[0], 1, 1, 1))  # fmt: skip
        position = site.binary("add", at, offset)
    elif parts.past == 0:
        position = at
    else:
        position = site.binary("add", at, site.reshape(site.constant([parts.past]), ()))
    rules = []
    if site.flag("is_causal"):
        rules.append(site.binary("le", place, position))
    left, right = site.int_attr("left_window_size", -1), site.int_attr("right_window_size", -1)
    if left >= 0:
        rules.append(site.binary("ge", place, site.binary("sub", position, left)))
    if right >= 0:
        rules.append(site.binary("le", place, site.binary("add", position, right)))
    if lengths is not None:
        rules.append(site.binary("lt", place, site.reshape(lengths, (lengths.shape[0], 1, 1, 1))))
    allowed = None
    for rule in rules:
        allowed = rule if allowed is None else site.binary("and", allowed, rule)
    return allowed


def _scores(site: Site, parts: _Heads, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Return the product of queries and keys as the mode says: plain, capped, masked, or as probabilities."""
    b, heads, _, d = parts.q.shape
    kv_heads, keys = parts.k.shape[1], parts.k.shape[2]
    k = parts.k
    if kv_heads != heads:
        groups = heads // kv_heads
        wide = site.add("expand", site.reshape(k, (b, kv_heads, 1, keys, d)), sizes=(b, kv_heads, groups, keys, d))
        k = site.reshape(wide, (b, heads, keys, d))
    scores: Tensor = site.add("matmul", parts.q, k, transpose_b=True, scale=scale)
    mode = site.int_attr("qk_matmul_output_mode")
    if (mode == 0 and site.version < 24) or (mode == 0 and softcap == 0.0):
        return scores
    if softcap > 0:
        scores = site.binary("mul", site.unary("tanh", site.binary("div", scores, softcap)), softcap)
    if mode in (0, 1):
        return scores
    low = site.constant(np.array(-np.inf, np.float32))
    if mask is not None:
        scores = site.add("where", mask, scores, low) if mask.dtype == DType.BOOL else site.binary("add", scores, mask)
    if mode == 2:
        return scores
    most = site.add("reduce", scores, kind="max", axes=(3,), keep=True)
    made: Tensor = site.add("softmax", scores, axis=3, log=False)
    blind = site.binary("eq", most, low)  # a query that sees no key
    result: Tensor = site.add("where", blind, site.constant(np.array(0, np.float32)), made)
    return result


@reads("RotaryEmbedding")
def _rotary(site: Site) -> Tensor:
    x, cosine, sine = site.x(0), site.x(1), site.x(2)
    rank = x.rank
    heads = site.int_attr("num_heads")
    rows = site.permute(x, (0, 2, 1, 3)) if rank == 4 else x  # [B, S, heads, D]
    if rank == 3:
        site.expect(heads > 0, "num_heads for 3 dimensions")
        rows = site.reshape(x, (x.shape[0], x.shape[1], heads, x.shape[2] // heads))
    size = site.fixed(rows.shape[3], "the size of a head")
    turned = site.int_attr("rotary_embedding_dim") or size
    site.expect(0 < turned <= size and turned % 2 == 0, "an even rotary_embedding_dim")
    if site.has(3):
        cosine, sine = (site.add("gather", table, site.x(3), axis=0) for table in (cosine, sine))
    cosine, sine = (
        site.reshape(table, (table.shape[0], table.shape[1], 1, table.shape[2])) for table in (cosine, sine)
    )
    part = site.cut(rows, 3, 0, turned)
    half = turned // 2
    interleaved = site.flag("interleaved")
    if interleaved:
        pairs = site.reshape(part, (*part.shape[:3], half, 2))
        a, b = (site.reshape(site.cut(pairs, 4, at, at + 1), (*part.shape[:3], half)) for at in (0, 1))
    else:
        a, b = site.cut(part, 3, 0, half), site.cut(part, 3, half, turned)
    real = site.binary("sub", site.binary("mul", cosine, a), site.binary("mul", sine, b))
    imaginary = site.binary("add", site.binary("mul", sine, a), site.binary("mul", cosine, b))
    if interleaved:
        wide = [site.reshape(item, (*item.shape, 1)) for item in (real, imaginary)]
        y = site.reshape(site.concat(wide, 4), part.shape)
    else:
        y = site.concat([real, imaginary], 3)
    if turned < size:
        y = site.concat([y, site.cut(rows, 3, turned, size)], 3)
    return site.permute(y, (0, 2, 1, 3)) if rank == 4 else site.reshape(y, x.shape)
