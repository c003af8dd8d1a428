"""Measures the perplexity of held-out text with each scheme, as in the table of docs/guides/quantization.md.

    python benchmarks/perplexity.py [--model demo/model] [--text demo/model/valid.txt] [--schemes w8a8,w4a8]
        [--kv-cache int8]

The text is split into windows of 512 tokens that do not overlap.  Each token of a window except the first is scored,
given the tokens before it.  The other schemes are compared with f32 with float32 keys and values.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

import penstock
from penstock.runtime.program import KV_LAYOUTS, ProgramLimits

ROOT = Path(__file__).parents[1]
SCHEMES = ("f32", "f16", "bf16", "w8a16", "w8a8", "w8a8_h32", "w4a16", "w4a8", "w4a8_h32")
LIMITS = {"f32": 0.0, "w8a16": 0.3, "w8a8": 0.3, "w8a8_h32": 0.2, "w4a16": 0.8, "w4a8": 0.9, "w4a8_h32": 0.9}


def read_windows(llm: penstock.LLM, args: argparse.Namespace) -> list[list[int]]:
    ids = llm.tokenizer.encode(args.text.read_text("utf-8"))
    windows = [ids[start : start + args.window + 1] for start in range(0, len(ids) - args.window, args.window)]
    return windows[: args.windows or None]


def score(llm: penstock.LLM, windows: list[list[int]]) -> tuple[float, int]:
    """Return the perplexity and the number of scored tokens."""
    total, count = 0.0, 0
    for ids in windows:
        logits = llm.logits(ids[:-1]).astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        total += float((log_sums - logits[np.arange(len(logits)), ids[1:]]).sum())
        count += len(logits)
    return math.exp(total / count), count


def measure(args: argparse.Namespace, scheme: str | None) -> tuple[float, int, int]:
    """Return the perplexity, the number of scored tokens and the bytes of weights; None is the model's own scheme."""
    limits = ProgramLimits(kv_layout=args.kv_cache if scheme != "f32" else "f32")
    llm = penstock.LLM(args.model, scheme=scheme, mode=args.mode, threads=args.threads, use_cache=False, limits=limits)
    try:
        perplexity, count = score(llm, read_windows(llm, args))
        return perplexity, count, llm.info.weight_bytes
    finally:
        llm.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Perplexity under each scheme, as a markdown table.")
    parser.add_argument("--model", type=Path, default=ROOT / "demo/model")
    parser.add_argument("--text", type=Path, default=ROOT / "demo/model/valid.txt")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument(
        "--windows", type=int, default=0, help="number of windows, from the beginning; 0 (default): all"
    )
    parser.add_argument("--mode", choices=("graph", "eager"), default="graph")
    parser.add_argument(
        "--kv-cache",
        choices=KV_LAYOUTS,
        default=ProgramLimits.kv_layout,
        help="type of keys and values of the other schemes (default: auto)",
    )
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    names = args.schemes.split(",")
    base, failed = 0.0, False
    print("| scheme | perplexity | against f32 | weights |")
    print("|---|---|---|---|")
    for name in ["f32", *(name for name in names if name != "f32")]:
        perplexity, count, weight_bytes = measure(args, name)
        base = base or perplexity
        change = 100 * (perplexity / base - 1)
        print(f"| `{name}` | {perplexity:.3f} | {change:+.2f} % | {weight_bytes / 1e6:.2f} MB |", flush=True)
        failed |= abs(change) > LIMITS.get(name, 1.0)
    print(f"\n{count} tokens.")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
