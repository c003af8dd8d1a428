"""Measures the speed of packing, and the time and memory of an export.

    python benchmarks/packing.py CHECKPOINT [--schemes w8a8,w4a8]

Packing is timed on one bfloat16 matrix of 4096 x 4096, in bytes of the source.  An export is a complete process, whose
peak resident memory the operating system reports.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from penstock.core.native import Context, layout_bytes, pack
from penstock.graph.ir import DType, Layout

LAYOUTS = {"f32": Layout.T16_F32, "bf16": Layout.T16_BF16, "w8a8": Layout.T16_I8, "w4a8": Layout.T16_I4G32}


def packing_gb_s(context: Context, layout: Layout, side: int = 4096, runs: int = 5) -> float:
    source = np.random.default_rng(0).normal(0, 0.02, (side, side)).astype(np.float32)
    bfloat16 = (source.view(np.uint32) >> 16).astype(np.uint16)
    packed = np.zeros(layout_bytes(layout, side, side), np.uint8)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        pack(context, layout, side, side, 0, side, DType.BF16, bfloat16, packed)
        times.append(time.perf_counter() - start)
    return bfloat16.nbytes / statistics.median(times) / 1e9


def export_figures(checkpoint: Path, scheme: str) -> tuple[float, float, int]:
    """Return the seconds, the peak resident gigabytes and the bytes of the bundle."""
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        out = Path(folder) / "out.psm"
        command = [sys.executable, "-m", "penstock", "export", str(checkpoint), str(out), "--scheme", scheme]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{command} failed")
        return time.perf_counter() - start, usage.ru_maxrss * 1024 / 1e9, out.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--schemes", default="w8a8,w4a8")
    args = parser.parse_args()
    context = Context()
    for name, layout in LAYOUTS.items():
        print(f"pack {name:<5} {packing_gb_s(context, layout):6.2f} GB/s of bfloat16, {context.num_threads} threads")
    for scheme in args.schemes.split(","):
        seconds, resident, size = export_figures(args.checkpoint, scheme)
        print(
            f"export {scheme}: {seconds:.1f} s, peak resident {resident:.2f} GB (children included), "
            f"bundle {size / 1e9:.2f} GB"
        )


if __name__ == "__main__":
    main()
