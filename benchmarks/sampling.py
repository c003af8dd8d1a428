"""Measures the cost of sampling per row, by filter: the median of nine calls on random logits, in microseconds.

    python benchmarks/sampling.py [ROWS ...]

Unlike a program, each call allocates its scratch memory, so figures for one row are an upper bound.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from penstock.core.native import Context, Penalties, Sampling, sample_logits

VOCAB = 128256
HISTORY = 4096


def cases(rows: int) -> dict[str, dict[str, object]]:
    """Return the fields of Sampling by the name of the case."""
    rng = np.random.default_rng(0)

    def numbers(value: float) -> np.ndarray:
        return np.full(rows, value, np.float32)

    penalties = Penalties(
        numbers(1.1), numbers(0.5), numbers(0.5), np.arange(rows + 1, dtype=np.int32) * HISTORY,
        np.full(rows, HISTORY // 2, np.int32), rng.integers(0, VOCAB, rows * HISTORY).astype(np.int32),
    )  # fmt: skip
    return {
        "greedy": {"temperature": numbers(0)},
        "temperature": {},
        "top_k 50": {"top_k": np.full(rows, 50, np.int32)},
        "top_p 0.9": {"top_p": numbers(0.9)},
        "min_p 0.05": {"min_p": numbers(0.05)},
        "typical_p 0.9": {"typical_p": numbers(0.9)},
        f"penalties, {HISTORY} tokens": {"penalties": penalties},
        "greedy, 5 logprobs": {"temperature": numbers(0), "num_logprobs": np.full(rows, 5, np.int32)},
    }


def main() -> None:
    """Print one line per case."""
    for rows in map(int, sys.argv[1:] or ("1", "32")):
        logits = (np.random.default_rng(1).standard_normal((rows, VOCAB)) * 3).astype(np.float32)
        base = {
            "temperature": np.full(rows, 0.8, np.float32),
            "top_k": np.zeros(rows, np.int32),
            "top_p": np.ones(rows, np.float32),
            "seed": np.arange(rows, dtype=np.uint64),
            "counter": np.zeros((rows, 2), np.int64),
            "num_logprobs": np.full(rows, -1, np.int32),
        }
        for name, fields in cases(rows).items():
            sampling = Sampling(**(base | fields))  # type: ignore[arg-type]
            took = []
            with Context() as context:
                for _ in range(9):
                    start = time.perf_counter()
                    sample_logits(context, logits, sampling)
                    took.append(time.perf_counter() - start)
            print(f"{rows} rows, {name}: {np.median(took) * 1e6 / rows:.0f} us a row", flush=True)


if __name__ == "__main__":
    main()
