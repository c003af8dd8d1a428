"""Test shapes of every op: odd sizes, tails, strided rows, optional arguments absent and present."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.core import layouts
from penstock.nn.packing import pack_blocks, pack_matrix
from penstock.ops.pages import PREFIX_ELEMENTS, page_elements, state_elements
from penstock.ops.reference import gated_delta, ssm_scan
from penstock.ops.reference.attention import kv_append
from penstock.ops.reference.latent import latent_append
from penstock.ops.table import BLOCK_SCHEMES, LINEAR_SCHEMES
from penstock.quant.scheme import find_scheme
from tests.support.gguf_blocks import random_blocks

KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8)
LATENT_DTYPES = KV_DTYPES[:3]


@dataclass
class Case:
    """One call: ``tensors`` in the schema's order, ``attrs`` by name; ``tolerance`` where it is not the op's."""

    name: str
    tensors: tuple[Tensor | None, ...]
    attrs: dict[str, Any]
    tolerance: float | None = None


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cut(rows: int, cols: int, seed: int = 0) -> Tensor:
    """A strided view: the middle columns of wider rows."""
    return randn(rows, cols + 24, seed=seed)[:, 8 : cols + 8]


ROW_SHAPES = ((1, 1), (1, 16), (2, 31), (3, 33), (5, 160), (2, 1003))


def _linear() -> Iterator[Case]:
    for scheme in LINEAR_SCHEMES:
        for rows, n, k in ((1, 16, 32), (1, 33, 160), (2, 40, 31), (5, 200, 96), (33, 17, 65)):
            weight = pack_matrix(randn(n, k, seed=1, scale=k**-0.5), find_scheme(scheme).layout)
            attrs = {"out_features": n, "scheme": scheme}
            yield Case(f"{scheme}-{rows}x{n}x{k}", (randn(rows, k), weight, randn(n, seed=2)), attrs)
        x = cut(3, 64)
        x[1] = 0
        weight = pack_matrix(randn(24, 64, seed=1, scale=0.1), find_scheme(scheme).layout)
        yield Case(f"{scheme}-strided-zero-row", (x, weight, None), {"out_features": 24, "scheme": scheme})
    yield from _linear_of_blocks()


def block_weight(scheme: str, n: int, k: int) -> Tensor:
    """A weight of random blocks of GGUF."""
    return pack_blocks([(random_blocks(scheme, n, k), 0)], find_scheme(scheme).layout, n, k)


def _linear_of_blocks() -> Iterator[Case]:
    for scheme in BLOCK_SCHEMES:
        for rows, n, k in ((1, 33, 256), (3, 40, 512), (9, 20, 256)):
            attrs = {"out_features": n, "scheme": scheme}
            yield Case(
                f"{scheme}-{rows}x{n}x{k}", (randn(rows, k), block_weight(scheme, n, k), randn(n, seed=2)), attrs
            )
    odd = dict.fromkeys(("q8_0", "mxfp4", "uint4", "q4_1", "q5_0", "q5_1", "iq4_nl", "nvfp4"), 96)
    for scheme, k in (odd | {"q2_0": 192, "q1_0": 384}).items():
        attrs = {"out_features": 7, "scheme": scheme}
        yield Case(f"{scheme}-odd-groups", (cut(2, k), block_weight(scheme, 7, k), None), attrs)


def _all_gather() -> Iterator[Case]:
    """A world of one: tests/ranks has larger ones."""
    for rows, cols in ROW_SHAPES:
        yield Case(f"{rows}x{cols}", (randn(rows, cols),), {"starts": f"0|{cols}", "rank": 0})
    yield Case("strided", (cut(3, 40),), {"starts": "0|40", "rank": 0})
    yield Case("slots", (randn(3, 2, 5),), {"starts": "0|5", "rank": 0})


def _all_gather_rounded() -> Iterator[Case]:
    for case in _all_gather():
        for bits in (8, 16):
            yield Case(f"{case.name}-{bits}", case.tensors, {**case.attrs, "bits": bits})
    rows = torch.stack([torch.zeros(9), randn(9) * 1e-37, randn(9) * 1e30])
    yield Case("zero, tiny and large rows", (rows,), {"starts": "0|9", "rank": 0, "bits": 8})


def _alone(**attrs: int) -> Iterator[Case]:
    for rows, cols in ROW_SHAPES:
        yield Case(f"{rows}x{cols}", (randn(rows, cols),), {**attrs, "world": 1, "rank": 0})
    yield Case("strided", (cut(3, 40),), {**attrs, "world": 1, "rank": 0})


def _recv() -> Iterator[Case]:
    for case in _alone(source=0):
        yield Case(case.name, case.tensors, {"width": case.tensors[0].shape[1], **case.attrs})


def _sharded_embedding() -> Iterator[Case]:
    for case in _embedding():
        table = case.tensors[1]
        is_logical = table.ndim == 2 and table.is_floating_point()
        rows = table.shape[0] * (1 if is_logical else 16)
        yield Case(case.name, case.tensors, {**case.attrs, "starts": f"0|{rows}", "rank": 0}, case.tolerance)


def _embedding() -> Iterator[Case]:
    table = randn(37, 20)
    ids = int32(0, 36, 5, 5)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield Case(f"rows-{dtype}", (ids, table.to(dtype)), {"dim": 20})
    for layout in (layouts.T16_F32, layouts.T16_F16, layouts.T16_BF16, layouts.T16_I8, layouts.T16_I4G32):
        yield Case(f"tiles-{layout}", (ids, pack_matrix(table, layout)), {"dim": 20})
    for scheme in BLOCK_SCHEMES:
        yield Case(scheme, (ids, block_weight(scheme, 37, 256)), {"dim": 256})


def _norms(has_residual: bool, has_bias: bool) -> Iterator[Case]:
    for rows, dim in ROW_SHAPES:
        rest: tuple[Tensor | None, ...] = (randn(dim, seed=2), *((randn(dim, seed=3),) if has_bias else ()))
        residual = (randn(rows, dim, seed=4),) if has_residual else ()
        yield Case(f"{rows}x{dim}", (randn(rows, dim), *residual, *rest), {"eps": 1e-5})
        residual = (cut(rows, dim, seed=4),) if has_residual else ()
        yield Case(f"{rows}x{dim}-strided", (cut(rows, dim), *residual, *rest), {"eps": 1e-6})


def _rms_norm() -> Iterator[Case]:
    yield from _norms(False, False)
    heads = cut(3, 5 * 32).view(3, 5, 32)
    yield Case("heads-strided", (heads, randn(32, seed=2)), {"eps": 1e-6})
    yield Case("by-head", (heads, randn(5 * 32, seed=2)), {"eps": 1e-6})


def _layer_norm() -> Iterator[Case]:
    yield from _norms(False, True)
    yield Case("no-bias", (randn(3, 40), randn(40, seed=2), None), {"eps": 1e-5})


def _rotary_embedding() -> Iterator[Case]:
    for half in (1, 16, 20, 64):
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        yield Case(f"half-{half}", (int32(0, 1, 31, 32, 4095, 131071), frequencies), {"scaling": 1.0})
    yield Case("scaled", (int32(7), torch.ones(8)), {"scaling": 1.25})


def _rope() -> Iterator[Case]:
    for heads, dim, half in ((1, 2, 1), (5, 32, 16), (2, 24, 12), (3, 48, 10)):
        angles = randn(4, half, seed=1, scale=3.0)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        for interleaved in (False, True):
            attrs = {"interleaved": interleaved}
            name = f"{heads}x{dim}-{half}-{interleaved}"
            yield Case(name, (randn(4, heads, dim), cos_sin), attrs)
            strided = cut(4, heads * dim).view(4, heads, dim)
            yield Case(f"{name}-strided", (strided, cos_sin), attrs)


@dataclass
class Pages:
    """A ragged batch: requests of several lengths whose last tokens run in this step, over scattered pages."""

    lengths: tuple[int, ...]
    new: tuple[int, ...]

    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """positions, request_starts, page_tables [2, B, width]: group 1 is the one to use, group 0 is rubbish."""
        positions = [p for length, new in zip(self.lengths, self.new, strict=True) for p in range(length - new, length)]
        starts = [0, *torch.tensor(self.new).cumsum(0).tolist()]
        width = max(-(-length // 32) for length in self.lengths) + 1
        order = torch.randperm(self.num_pages(), generator=torch.Generator().manual_seed(1)).tolist()
        tables = torch.full((2, len(self.lengths), width), -1, dtype=torch.int32)
        for request, length in enumerate(self.lengths):
            for tile in range(-(-length // 32)):
                tables[1, request, tile] = order.pop()
        return int32(*positions), int32(*starts), tables

    def num_pages(self) -> int:
        return sum(-(-length // 32) for length in self.lengths) + 2

    def filled(self, dtype: torch.dtype, heads: int, dim: int) -> Tensor:
        """A state that holds every token; slots never written hold NaN, or garbage."""
        state = self._unwritten(dtype, page_elements(dtype, heads, dim))
        whole = Pages(self.lengths, self.lengths)
        positions, starts, _ = whole.arrays()
        k, v = randn(len(positions), heads, dim, seed=5), randn(len(positions), heads, dim, seed=6)
        kv_append(k, v, state, positions, starts, self.arrays()[2], group=1)
        return state

    def latents(self, dtype: torch.dtype, latent_dim: int, rope_dim: int) -> Tensor:
        """The same with a row of latents for every token."""
        state = self._unwritten(dtype, page_elements(dtype, 1, latent_dim + rope_dim, latent_dim))
        positions, starts, _ = Pages(self.lengths, self.lengths).arrays()
        latent, rope = randn(len(positions), latent_dim, seed=5), randn(len(positions), rope_dim, seed=6)
        latent_append(latent, rope, state, positions, starts, self.arrays()[2], group=1)
        return state

    def _unwritten(self, dtype: torch.dtype, elements: int) -> Tensor:
        shape = (self.num_pages(), elements)
        return torch.full(shape, torch.nan if dtype.is_floating_point else 127, dtype=dtype)


BATCHES = (Pages((1,), (1,)), Pages((33, 5, 70), (33, 1, 3)), Pages((257, 32), (1, 32)))


def _kv_append() -> Iterator[Case]:
    for dtype in KV_DTYPES:
        for index, pages in enumerate(BATCHES):
            for heads, dim in ((1, 32), (3, 24), (2, 17)):
                state = torch.zeros(pages.num_pages(), page_elements(dtype, heads, dim), dtype=dtype)
                k, v = cut(sum(pages.new), heads * dim), randn(sum(pages.new), heads, dim, seed=3)
                tensors = (k.view(-1, heads, dim), v, state, *pages.arrays())
                yield Case(f"{dtype}-{index}-{heads}x{dim}", tensors, {"group": 1})


def _attention() -> Iterator[Case]:
    plain = {"scale": 0.2, "group": 1, "causal": True, "window": 0, "softcap": 0.0}
    for dtype in KV_DTYPES:
        for index, pages in enumerate(BATCHES):
            for heads, kv_heads, dim in ((5, 1, 32), (6, 3, 24), (2, 2, 17)):
                q = cut(sum(pages.new), heads * dim, seed=7).view(-1, heads, dim)
                tensors = (q, pages.filled(dtype, kv_heads, dim), *pages.arrays(), None)
                # Over 16 bits or fewer the probabilities are rounded to bf16.
                tolerance = None if dtype == torch.float32 else 4e-3
                yield Case(f"{dtype}-{index}-{heads}-{kv_heads}-{dim}", tensors, plain, tolerance)
    pages = BATCHES[1]
    q, state = randn(sum(pages.new), 4, 16, seed=7), pages.filled(torch.float32, 2, 16)
    tensors = (q, state, *pages.arrays())
    for name, changes in {
        "window": {"window": 9},
        "window-wide": {"window": 33},
        "softcap": {"softcap": 2.5},
        "whole": {"causal": False},
        "whole-window": {"causal": False, "window": 9},
    }.items():
        yield Case(name, (*tensors, None), {**plain, **changes})
    freed = [None if t is None else t.clone() for t in (*tensors, None)]
    freed[4][1, 2, 0] = -1  # the third request, at positions 67 to 69, has let go of its first page
    yield Case("window-freed", tuple(freed), {**plain, "window": 9})
    yield Case("alibi", (*tensors, torch.tensor([0.5, 0.25, 0.125, 0.0625])), plain)


def _sink_attention() -> Iterator[Case]:
    plain = {"scale": 0.2, "group": 1, "causal": True, "window": 0, "softcap": 0.0}
    for dtype in KV_DTYPES:
        for index, pages in enumerate(BATCHES):
            q = cut(sum(pages.new), 6 * 24, seed=7).view(-1, 6, 24)
            tensors = (q, pages.filled(dtype, 3, 24), *pages.arrays(), None, randn(6, seed=8) * 3)
            for window in (0, 9):
                tolerance = None if dtype == torch.float32 else 4e-3
                yield Case(f"{dtype}-{index}-{window}", tensors, {**plain, "window": window}, tolerance)
    sinks = torch.tensor([90.0, -90.0, 0.0, 3.0, 80.0, 1.0])
    yield Case("alibi", (*tensors[:5], randn(6, seed=9) * 0.1, sinks), plain, 4e-3)


def _relative_attention() -> Iterator[Case]:
    plain: dict[str, Any] = {"scale": 0.2, "group": 1, "window": 0, "softcap": 0.0}
    for dtype in KV_DTYPES:
        tolerance = None if dtype == torch.float32 else 4e-3
        for index, pages in enumerate(BATCHES):
            q, state = cut(sum(pages.new), 6 * 24, seed=7).view(-1, 6, 24), pages.filled(dtype, 3, 24)
            tensors = (q, state, *pages.arrays(), None, None)
            bias = randn(6, 81 if index else 7, seed=8) * 2
            ends = int32(
                *(end for length, new in zip(pages.lengths, pages.new, strict=True) for end in [length // 2] * new)
            )
            for keys, prefix in (("all", None), ("prefix", ends), ("rest", ends), ("span", ends)):
                for causal in (False, True):
                    attrs = {**plain, "causal": causal, "keys": keys}
                    yield Case(f"{dtype}-{index}-{keys}-{causal}", (*tensors, bias, prefix), attrs, tolerance)
    slopes, sinks = randn(6, seed=9) * 0.1, randn(6, seed=10)
    attrs = {**plain, "causal": True, "keys": "all", "window": 9, "softcap": 2.5}
    yield Case("everything", (*tensors[:5], slopes, sinks, bias, None), attrs, 4e-3)
    yield Case("no-bias", (*tensors, None, ends), {**plain, "causal": True, "keys": "prefix"}, 4e-3)
    yield from _uneven_prefixes(plain)


def _uneven_prefixes(attrs: dict[str, Any]) -> Iterator[Case]:
    pages = Pages((70, 40), (70, 40))  # whose rows see one or two pages in turn
    for dtype in KV_DTYPES:
        q, state = cut(110, 6 * 24, seed=7).view(-1, 6, 24), pages.filled(dtype, 3, 24)
        for keys, causal in (("prefix", False), ("prefix", True), ("rest", True), ("span", True)):
            tensors = (q, state, *pages.arrays(), None, None, None, int32(*([33, 1] * 55)))
            yield Case(f"{dtype}-rows-{keys}-{causal}", tensors, {**attrs, "causal": causal, "keys": keys}, 4e-3)


def _disentangled_attention() -> Iterator[Case]:
    attrs: dict[str, Any] = {"scale": 0.2, "group": 1, "causal": False, "window": 0, "softcap": 0.0}
    for dtype in KV_DTYPES:
        tolerance = None if dtype == torch.float32 else 4e-3
        for name, lengths in (("long", (70, 1, 40)), ("parts", (300,)), ("shared", (1, 1))):
            num_tokens, pages = sum(lengths), Pages(lengths, lengths)
            q, state = cut(num_tokens, 6 * 24, seed=7).view(-1, 6, 24), pages.filled(dtype, 3, 24)
            c2p, p2c = (cut(num_tokens, 6 * 8, seed=seed).view(-1, 6, 8) * 2 for seed in (8, 9))
            buckets = torch.randint(0, 8, (81,), generator=torch.Generator().manual_seed(3)).float()
            positions, starts, page_tables = pages.arrays()
            page_tables = torch.nn.functional.pad(page_tables, (0, 20), value=-1)  # threads may share a context
            for kind, tables in (("both", (c2p, p2c)), ("c2p", (c2p, None)), ("p2c", (None, p2c))):
                tensors = (q, state, positions, starts, page_tables, *tables, buckets)
                yield Case(f"{dtype}-{name}-{kind}", tensors, attrs, tolerance)
    yield Case("window", tensors, {**attrs, "window": 9}, 4e-3)


def _prefix_lengths() -> Iterator[Case]:
    for index, pages in enumerate(BATCHES):
        for token in (0, 3):
            state = torch.full((pages.num_pages(), PREFIX_ELEMENTS), torch.nan)
            positions, starts, tables = pages.arrays()
            for request, start in enumerate(starts[:-1].tolist()):
                if (first := int(positions[start])) > 0:  # what came before this step
                    cell = state[tables[1, request, (first - 1) // 32]]
                    cell[0], cell[-1] = 1 + first // 3, first
            ids = torch.arange(len(positions), dtype=torch.int32) % 9
            yield Case(f"{index}-{token}", (ids, state, positions, starts, tables), {"group": 1, "token": token})


def _prefix_positions() -> Iterator[Case]:
    for behind in (False, True):
        yield Case(f"{behind}", (int32(0, 1, 2, 3, 9, 5), int32(2, 2, 2, 2, 0, 1 << 30)), {"behind": behind})


def _short_conv() -> Iterator[Case]:
    for dtype in KV_DTYPES:
        for index, pages in enumerate(BATCHES):
            for heads, dim, window in ((1, 32, 3), (3, 24, 4), (2, 17, 1)):
                gate = cut(sum(pages.new), 2 * heads * dim, seed=7).view(-1, 2 * heads, dim)
                weight = randn(2 * heads * dim, window, seed=8)
                bias = randn(2 * heads * dim, seed=9) if dim == 24 else None
                tensors = (gate, pages.filled(dtype, heads, dim), *pages.arrays(), weight, bias)
                yield Case(f"{dtype}-{index}-{heads}x{dim}-{window}", tensors, {"group": 1, "window": window})
    gate, *rest = list(tensors)
    rest[3] = rest[3].clone()
    rest[3][1, 0, :7] = -1  # the pages behind the window of a request at position 256
    yield Case("window-freed", (gate, *rest), {"group": 1, "window": window})


def _earlier(pages: Pages) -> tuple[Tensor, Tensor, Tensor] | None:
    """The positions, starts and page tables of a step with the tokens before this one; None if there are none."""
    before = [length - new for length, new in zip(pages.lengths, pages.new, strict=True)]
    earlier = [request for request, length in enumerate(before) if length]
    if not earlier:
        return None
    lengths = [before[request] for request in earlier]
    starts = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    positions = int32(*(place for length in lengths for place in range(length)))
    return positions, starts, pages.arrays()[2][:, earlier]


SCANS = ((1, 1, 1, 16, 64, 4), (2, 4, 3, 17, 20, 3), (1, 3, 2, 24, 80, 1))


def _ssm_scan() -> Iterator[Case]:
    for index, pages in enumerate(BATCHES):
        for groups, blocks, shared, state_dim, head_dim, window in SCANS:
            heads = blocks * shared
            channels = heads * head_dim + 2 * groups * state_dim
            attrs = {"group": 1, "groups": groups, "blocks": blocks, "state_dim": state_dim}
            attrs |= {"dt_min": 0.01, "dt_max": 2.0} if window == 3 else {"dt_min": 0.0, "dt_max": 3e38}
            state = torch.full(
                (pages.num_pages(), blocks * state_elements(state_dim, shared * head_dim, window)), torch.nan
            )
            vectors = (randn(channels, window, seed=8), randn(channels, seed=4) if window > 3 else None)
            vectors += (randn(heads, seed=9), randn(heads, seed=10), randn(heads, seed=11))
            if earlier := _earlier(pages):
                rows = (randn(len(earlier[0]), width, seed=3) for width in (channels, heads))
                ssm_scan(*rows, state, *earlier, *vectors, **attrs)
            tokens = sum(pages.new)
            rows = (cut(tokens, channels, seed=7), cut(tokens, heads, seed=5))
            name = f"{index}-{groups}-{blocks}x{shared}-{state_dim}-{head_dim}-{window}"
            yield Case(name, (*rows, state, *pages.arrays(), *vectors), attrs)


def _gated_delta() -> Iterator[Case]:
    for index, pages in enumerate(BATCHES):
        for key_heads, shared, dim, value_dim, window in ((1, 1, 16, 64, 4), (2, 3, 17, 20, 3), (3, 2, 24, 80, 1)):
            heads = key_heads * shared
            channels = 2 * key_heads * dim + heads * value_dim
            conv = randn(channels, window, seed=8)
            attrs = {"group": 1, "key_heads": key_heads, "head_dim": dim}
            elements = state_elements(dim, shared * value_dim, window)
            state = torch.full((pages.num_pages(), key_heads * elements), torch.nan)
            vectors = (conv, randn(heads, seed=9), randn(heads, seed=10))
            if earlier := _earlier(pages):
                rows = (randn(len(earlier[0]), width, seed=3) for width in (channels, heads, heads))
                gated_delta(*rows, state, *earlier, *vectors, **attrs)
            tokens = sum(pages.new)
            rows = (cut(tokens, channels, seed=7), cut(tokens, heads, seed=5), randn(tokens, heads, seed=6))
            name = f"{index}-{key_heads}x{shared}-{dim}-{value_dim}-{window}"
            yield Case(name, (*rows, state, *pages.arrays(), *vectors), attrs)


LATENT_DIMS = ((32, 16), (40, 12), (17, 6), (128, 3))


def _latent_append() -> Iterator[Case]:
    for dtype in LATENT_DTYPES:
        for index, pages in enumerate(BATCHES):
            for latent_dim, rope_dim in LATENT_DIMS:
                elements = page_elements(dtype, 1, latent_dim + rope_dim, latent_dim)
                state = torch.zeros(pages.num_pages(), elements, dtype=dtype)
                latent, rope = cut(sum(pages.new), latent_dim), randn(sum(pages.new), rope_dim, seed=3)
                tensors = (latent, rope, state, *pages.arrays())
                yield Case(f"{dtype}-{index}-{latent_dim}+{rope_dim}", tensors, {"group": 1})


def _latent_attention() -> Iterator[Case]:
    plain = {"scale": 0.15, "group": 1, "causal": True, "window": 0, "softcap": 0.0}
    for dtype in LATENT_DTYPES:
        for index, pages in enumerate(BATCHES):
            for (latent_dim, rope_dim), heads in zip(LATENT_DIMS, (5, 1, 3, 36), strict=True):
                q = cut(sum(pages.new), heads * latent_dim, seed=7).view(-1, heads, latent_dim)
                rope = cut(sum(pages.new), heads * rope_dim, seed=8).view(-1, heads, rope_dim)
                tensors = (q, pages.latents(dtype, latent_dim, rope_dim), *pages.arrays(), rope)
                # Over 16 bits or fewer the probabilities are rounded to bf16; of many heads one cancels more.
                tolerance = None if dtype == torch.float32 else 8e-3
                yield Case(f"{dtype}-{index}-{heads}-{latent_dim}+{rope_dim}", tensors, plain, tolerance)
    for name, changes in {"window": {"window": 9}, "softcap": {"softcap": 2.5}, "whole": {"causal": False}}.items():
        tensors = (q, pages.latents(torch.float32, latent_dim, rope_dim), *pages.arrays(), rope)
        yield Case(name, tensors, {**plain, **changes})


def _head_linear() -> Iterator[Case]:
    for scheme in LINEAR_SCHEMES:
        for tokens, heads, n, k in ((1, 2, 32, 64), (9, 5, 20, 33), (40, 3, 7, 160), (6, 70, 16, 31)):
            weight = pack_matrix(randn(heads * n, k, seed=1, scale=k**-0.5), find_scheme(scheme).layout)
            attrs = {"num_heads": heads, "out_features": n, "scheme": scheme}
            yield Case(f"{scheme}-{tokens}x{heads}x{n}x{k}", (randn(tokens, heads, k), weight), attrs)
    strided = cut(3, 4 * 24).view(3, 4, 24)
    weight = pack_matrix(randn(40, 24, seed=1), find_scheme("f32").layout)
    yield Case("strided", (strided, weight), {"num_heads": 4, "out_features": 10, "scheme": "f32"})


def _binary() -> Iterator[Case]:
    for rows, dim in ROW_SHAPES:
        yield Case(f"{rows}x{dim}", (randn(rows, dim), randn(rows, dim, seed=1)), {})
        yield Case(f"{rows}x{dim}-strided", (cut(rows, dim), cut(rows, dim, seed=1)), {})


def _unary() -> Iterator[Case]:
    for rows, dim in ROW_SHAPES:
        yield Case(f"{rows}x{dim}", (randn(rows, dim),), {})
        yield Case(f"{rows}x{dim}-strided", (cut(rows, dim),), {})


def _scaled(attr: str) -> Iterator[Case]:
    for value in (0.3, 50.0):
        for rows, dim in ROW_SHAPES:
            yield Case(f"{value}-{rows}x{dim}", (randn(rows, dim) * 20,), {attr: value})
        yield Case(f"{value}-strided", (cut(3, 33) * 1e3,), {attr: value})
    yield Case("heads", (randn(4, 3, 17),), {attr: 1.5})


def _clamped_swiglu() -> Iterator[Case]:
    for alpha, limit in ((1.702, 7.0), (1.0, 0.5)):
        for rows, dim in ROW_SHAPES:
            attrs = {"alpha": alpha, "limit": limit}
            yield Case(f"{limit}-{rows}x{dim}", (cut(rows, 2 * dim, seed=5) * 6,), attrs)


def _scale_channels() -> Iterator[Case]:
    for rows, dim in ROW_SHAPES:
        yield Case(f"{rows}x{dim}", (cut(rows, dim), randn(dim, seed=2)), {})
    yield Case("one-for-all", (cut(3, 33), randn(1, seed=2)), {})


def _match_rms() -> Iterator[Case]:
    for rows, dim in ROW_SHAPES:
        yield Case(f"{rows}x{dim}", (cut(rows, dim), cut(rows, dim, seed=3) * 5), {"floor": 1e-5})
    yield Case("below-floor", (randn(2, 33) * 1e-4, randn(2, 33, seed=3)), {"floor": 1e-5})


def _gaussian_topk() -> Iterator[Case]:
    for deviations in (1.645, -0.5):
        for rows, dim in ROW_SHAPES:
            yield Case(f"{deviations}-{rows}x{dim}", (cut(rows, dim) * 3 + 1,), {"deviations": deviations})


def _gelu() -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        for rows, dim in ROW_SHAPES[1:]:  # a lone negative value sets no scale: 1 + erf cancels
            yield Case(f"{approximate}-{rows}x{dim}", (cut(rows, dim) * 3,), {"approximate": approximate})


def _gather_rows() -> Iterator[Case]:
    for x in (randn(5, 33), cut(5, 33)):
        yield Case(f"stride-{x.stride(0)}", (x, int32(4, 0, 0)), {})
    yield Case("none-wanted", (randn(5, 33), int32()), {})


def _argmax() -> Iterator[Case]:
    logits = randn(4, 1003)
    logits[1, 7], logits[1, 900] = 50.0, 50.0
    yield Case("ties", (logits,), {})
    yield Case("one", (randn(1, 1),), {})


def _topk() -> Iterator[Case]:
    logits = randn(3, 1003).mul(4).round().div(4)
    for k in (1, 5, 40):
        yield Case(f"k-{k}", (logits,), {"k": k})


def _context_attention() -> Iterator[Case]:
    for case in _attention():
        yield dataclasses.replace(case, attrs={**case.attrs, "world": 1, "rank": 0})


PLAIN_ROUTE = {
    "score": "softmax",
    "renormalise": False,
    "factor": 1.0,
    "groups": 1,
    "kept_groups": 1,
    "group_rule": "max",
}


def _route() -> Iterator[Case]:
    for score in ("softmax", "softmax_of_chosen", "sigmoid"):
        for rows, experts, k in ((1, 1, 1), (3, 7, 2), (2, 128, 8), (5, 33, 33)):
            logits = randn(rows, experts).mul(4).round()  # with ties
            yield Case(f"{score}-{rows}x{experts}-{k}", (logits, None), PLAIN_ROUTE | {"k": k, "score": score})
        corrected = PLAIN_ROUTE | {"k": 3, "score": score, "renormalise": True, "factor": 2.5}
        yield Case(f"{score}-bias", (cut(4, 21), randn(21, seed=3)), corrected)
    for rule in ("max", "best_two"):
        groups = {"groups": 4, "kept_groups": 2, "group_rule": rule, "score": "sigmoid"}
        yield Case(f"groups-{rule}", (randn(6, 24), randn(24, seed=3)), PLAIN_ROUTE | groups | {"k": 5})
    yield Case("groups-of-one", (randn(2, 6), None), PLAIN_ROUTE | {"groups": 6, "kept_groups": 3, "k": 2})


def _expert_linear() -> Iterator[Case]:
    """Experts that get one row, many rows and none; rows that begin and end inside a tile."""
    for scheme in LINEAR_SCHEMES:
        for tokens, slots, experts, n, k in (
            (1, 2, 5, 32, 64),
            (9, 3, 4, 20, 33),
            (40, 2, 3, 7, 160),
            (6, 1, 70, 16, 31),
        ):
            weight = pack_matrix(randn(experts * n, k, seed=1, scale=k**-0.5), find_scheme(scheme).layout)
            ids = randn(tokens, experts, seed=4).topk(slots).indices.int()
            attrs = {"num_experts": experts, "out_features": n, "scheme": scheme}
            name = f"{scheme}-{tokens}x{slots}-{experts}x{n}x{k}"
            yield Case(name, (randn(tokens, k), weight, ids, randn(experts, n, seed=2)), attrs)
            yield Case(f"{name}-slots", (randn(tokens, slots, k), weight, ids, None), attrs)
    for scheme in BLOCK_SCHEMES:
        attrs = {"num_experts": 4, "out_features": 20, "scheme": scheme}
        ids = randn(9, 4, seed=4).topk(2).indices.int()
        yield Case(f"{scheme}-blocks", (randn(9, 256), block_weight(scheme, 80, 256), ids, None), attrs)
    weight = pack_matrix(randn(40, 64, seed=1), find_scheme("f32").layout)
    ids = torch.tensor([[1, 1], [1, 0], [1, 1]], dtype=torch.int32)
    yield Case("strided", (cut(3, 64), weight, ids, None), {"num_experts": 2, "out_features": 20, "scheme": "f32"})


def _combine() -> Iterator[Case]:
    for tokens, slots, n in ((1, 1, 1), (3, 2, 33), (5, 8, 160)):
        yield Case(f"{tokens}x{slots}x{n}", (randn(tokens, slots, n), randn(tokens, slots)), {})


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "embedding": _embedding,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "add_rms_norm": lambda: _norms(True, False),
    "layer_norm": _layer_norm,
    "rotary_embedding": _rotary_embedding,
    "rope": _rope,
    "kv_append": _kv_append,
    "attention": _attention,
    "short_conv": _short_conv,
    "gated_delta": _gated_delta,
    "gated_delta_tiled": _gated_delta,
    "ssm_scan": _ssm_scan,
    "latent_append": _latent_append,
    "latent_attention": _latent_attention,
    "head_linear": _head_linear,
    "silu_mul": _binary,
    "gelu": _gelu,
    "scale": lambda: _scaled("factor"),
    "softcap": lambda: _scaled("cap"),
    "relu_squared": _unary,
    "sigmoid_mul": _binary,
    "relu": _unary,
    "clamp": lambda: _scaled("limit"),
    "elu": _unary,
    "add": _binary,
    "mul": _binary,
    "gather_rows": _gather_rows,
    "all_gather": _all_gather,
    "all_gather_rounded": _all_gather_rounded,
    "sharded_embedding": _sharded_embedding,
    "broadcast": lambda: _alone(root=0),
    "send": lambda: _alone(target=0),
    "recv": _recv,
    "barrier": lambda: _alone(),
    "context_attention": _context_attention,
    "argmax": _argmax,
    "topk": _topk,
    "route": _route,
    "expert_linear": _expert_linear,
    "combine": _combine,
    "sink_attention": _sink_attention,
    "relative_attention": _relative_attention,
    "disentangled_attention": _disentangled_attention,
    "prefix_lengths": _prefix_lengths,
    "prefix_positions": _prefix_positions,
    "clamped_swiglu": _clamped_swiglu,
    "scale_channels": _scale_channels,
    "match_rms": _match_rms,
    "gaussian_topk": _gaussian_topk,
}
