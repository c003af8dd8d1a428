"""Compares attention with the limits of the machine.

    python benchmarks/attention.py [--threads 0] [--level avx2] [--quick]

Decode: one token per request, 32 heads of 64 dimensions, for several contexts, batches, types of keys and values, and
numbers of query heads per KV head.  The share is that of the higher of two limits: reading the pages at the bandwidth
probed around the row, or multiplying at the float32 peak.  Prefill: 512 tokens after an empty context and after 1,536.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np

from penstock.core.native import Context, CoreTensor, probe_bandwidth, probe_compute, run_op
from penstock.graph.ir import DType, KvLayout

HEADS, HEAD_DIM, PAGE, MAX_BYTES = 32, 64, 32, 1 << 30
BYTES = {KvLayout.F32: 4.0, KvLayout.BF16: 2.0, KvLayout.INT8: 1.0 + 4 / HEAD_DIM, KvLayout.INT4: 0.5 + 4 / HEAD_DIM}


def tensor(array: np.ndarray) -> CoreTensor:
    dtype = DType.F32 if array.dtype == np.float32 else DType.I32
    return CoreTensor(array.ctypes.data, dtype, array.shape, int(np.prod(array.shape[1:])))


class Case:
    """``batch`` requests of ``context`` tokens, the last ``new`` being queries; ``group`` query heads per KV head."""

    def __init__(self, context: int, batch: int, group: int, layout: KvLayout, new: int = 1) -> None:
        self.kv_heads, self.new, self.layout = HEADS // group, new, layout
        width = -(-context // PAGE)
        self.page_bytes = int(self.kv_heads * 2 * PAGE * HEAD_DIM * BYTES[layout])
        self.kv_bytes = batch * context * self.kv_heads * 2 * HEAD_DIM * BYTES[layout]
        keys = np.arange(context - new + 1, context + 1).sum()
        self.flops = 4.0 * batch * float(keys) * HEADS * HEAD_DIM
        self.shape = (context, batch, width)

    def fits(self) -> bool:
        return self.page_bytes * self.shape[1] * self.shape[2] <= MAX_BYTES

    def prepare(self) -> None:
        context, batch, width = self.shape
        rng = np.random.default_rng(0)
        pages = batch * width
        # Small numbers of each type; the arithmetic does not depend on them.
        self.state = np.full((pages, self.page_bytes // 4), 0x3C003C00, np.uint32)
        per_byte = {KvLayout.F32: 4, KvLayout.BF16: 2}.get(self.layout, 1)
        elements = self.page_bytes // per_byte
        shape = (pages, self.kv_heads, HEAD_DIM)
        cache = CoreTensor(self.state.ctypes.data, DType.F32, shape, elements, self.layout)
        q = rng.normal(size=(batch * self.new, HEADS, HEAD_DIM)).astype(np.float32)
        positions = np.tile(np.arange(context - self.new, context, dtype=np.int32), batch)
        starts = np.arange(batch + 1, dtype=np.int32) * self.new
        table = rng.permutation(pages).astype(np.int32).reshape(1, batch, width)
        self.arrays = (q, positions, starts, table, np.empty_like(q))
        q, positions, starts, table, out = self.arrays
        self.operands = [tensor(q), cache, tensor(positions), tensor(starts), tensor(table), None, tensor(out)]

    def seconds(self, context: Context, budget: float) -> float:
        """Return the median of as many runs as fit into ``budget`` seconds, at least three."""
        attrs = {"scale": 0.125, "group": 0, "causal": 1, "window": 0, "softcap": 0.0}
        run_op(context, "attention", self.operands, attrs)
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begun < budget:
            start = time.perf_counter()
            run_op(context, "attention", self.operands, attrs)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def cases(quick: bool) -> Iterator[tuple[str, Case]]:
    for layout in KvLayout:
        for context in (128, 1024, 8192):
            for batch in (1, 8, 32):
                for group in (2, 8) if quick else (1, 2, 4, 8):
                    name = f"decode {layout.name.lower()} context {context} batch {batch} group {group}"
                    yield name, Case(context, batch, group, layout)
        for past in (0, 1536):
            yield f"prefill {layout.name.lower()} 512 after {past}", Case(512 + past, 1, 4, layout, new=512)


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention against the machine's limits.")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--level", default=None, help="instruction level (default: the best)")
    parser.add_argument("--quick", action="store_true", help="fewer groups and less time per row (default: all)")
    parser.add_argument("--only", default="", help="only rows whose name contains this (default: all)")
    args = parser.parse_args()
    context = Context(args.threads, args.level)
    peak = probe_compute(context, DType.F32, 0.2)
    print(f"{context.cpu_level} x {context.num_threads} threads, float32 {peak / 1e9:.0f} GOP/s\n")
    print("| attention | us | GB/s of KV | GFLOP/s | share of the limit |")
    print("|---|---|---|---|---|")
    for name, case in cases(args.quick):
        if args.only not in name or not case.fits():
            continue
        case.prepare()
        before = probe_bandwidth(context, 256 << 20, 1)
        took = case.seconds(context, 0.05 if args.quick else 0.3)
        read = max(before, probe_bandwidth(context, 256 << 20, 1))
        share = max(case.kv_bytes / read, case.flops / peak) / took
        print(
            f"| {name} | {took * 1e6:,.0f} | {case.kv_bytes / took / 1e9:.1f} of {read / 1e9:.0f} "
            f"| {case.flops / took / 1e9:.0f} | {share:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
