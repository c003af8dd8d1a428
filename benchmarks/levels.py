"""Measures each op at each instruction level, and the gain of a level over the generic one.

    python benchmarks/levels.py [--threads 1] [--tokens 32]

Linear runs at 1 token and at --tokens, with weights of 1024 x 1024.  Attention is one decode over 512 positions, and a
prefill of --tokens at the end of them, with 8 heads of 64 over 2 KV heads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import Context, CoreTensor, cpu_levels, layout_bytes, pack, run_op
from penstock.graph.ir import DType, KvLayout, Layout

SIDE, CONTEXT, HEADS, KV_HEADS, HEAD_DIM, PAGE = 1024, 512, 8, 2, 64, 32
LAYOUTS = {
    "f32": Layout.T16_F32,
    "f16": Layout.T16_F16,
    "bf16": Layout.T16_BF16,
    "w8a16": Layout.T16_I8,
    "w8a8": Layout.T16_I8,
    "w4a16": Layout.T16_I4G32,
    "w4a8": Layout.T16_I4G32,
}


def tensor(array: NDArray[np.float32] | NDArray[np.int32]) -> CoreTensor:
    dtype = DType.F32 if array.dtype == np.float32 else DType.I32
    return CoreTensor(array.ctypes.data, dtype, array.shape, int(np.prod(array.shape[1:])))


def seconds(call: Callable[[], None]) -> float:
    """Return the median of as many runs as fit into 0.3 s, at least five."""
    call()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begun < 0.3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def linear_gops(context: Context, scheme: str, num_tokens: int) -> float:
    rng = np.random.default_rng(0)
    layout = LAYOUTS[scheme]
    packed = np.zeros(layout_bytes(layout, SIDE, SIDE), np.uint8)
    source = rng.normal(0, 0.02, (SIDE, SIDE)).astype(np.float32)
    pack(context, layout, SIDE, SIDE, 0, SIDE, DType.F32, source, packed)
    weight = CoreTensor(packed.ctypes.data, DType.U8, (SIDE, SIDE), SIDE, layout)
    x, y = rng.normal(size=(num_tokens, SIDE)).astype(np.float32), np.zeros((num_tokens, SIDE), np.float32)
    attrs = {"out_features": SIDE, "scheme": scheme}
    took = seconds(lambda: run_op(context, "linear", [tensor(x), weight, None, tensor(y)], attrs))
    return 2e-9 * num_tokens * SIDE * SIDE / took


def attention_gops(context: Context, num_tokens: int) -> float:
    rng = np.random.default_rng(0)
    num_pages = CONTEXT // PAGE
    state = rng.normal(size=(num_pages, 2 * KV_HEADS * HEAD_DIM * PAGE)).astype(np.float32)
    cache = CoreTensor(state.ctypes.data, DType.F32, (num_pages, KV_HEADS, HEAD_DIM), state.shape[1], KvLayout.F32)
    q = rng.normal(size=(num_tokens, HEADS, HEAD_DIM)).astype(np.float32)
    out = np.zeros_like(q)
    positions = np.arange(CONTEXT - num_tokens, CONTEXT, dtype=np.int32)
    starts, pages = np.array([0, num_tokens], np.int32), np.arange(num_pages, dtype=np.int32).reshape(1, 1, -1)
    operands = [tensor(q), cache, tensor(positions), tensor(starts), tensor(pages), None, tensor(out)]
    attrs = {"scale": 0.125, "group": 0, "causal": 1, "window": 0, "softcap": 0.0}
    took = seconds(lambda: run_op(context, "attention", operands, attrs))
    return 4e-9 * HEADS * HEAD_DIM * float(positions.sum() + num_tokens) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    levels = [name for name, runnable in cpu_levels() if runnable]
    contexts = {name: Context(num_threads=args.threads, cpu_level=name) for name in levels}
    print(f"GOP/s, {args.threads} thread(s); in brackets the ratio to the generic level\n")
    print("| op | tokens | " + " | ".join(levels) + " |\n|---|---|" + "---|" * len(levels))
    for num_tokens in (1, args.tokens):
        for scheme in LAYOUTS:
            row(f"linear {scheme}", num_tokens, {n: linear_gops(c, scheme, num_tokens) for n, c in contexts.items()})
        row("attention", num_tokens, {n: attention_gops(c, num_tokens) for n, c in contexts.items()})


def row(name: str, num_tokens: int, figures: dict[str, float]) -> None:
    cells = [f"{figure:.1f} ({figure / figures['generic']:.0f}x)" for figure in figures.values()]
    print(f"| {name} | {num_tokens} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
