"""Drive a program without an engine: one request, pages scattered over the pool, a row of logits per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.native import StepBatch
from penstock.runtime.program import Program

PAGE_TOKENS = 32


def int32(values: Any) -> np.ndarray:
    return np.ascontiguousarray(values, np.int32)


def run_whole(program: Program, token_ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
    """Logits [len, vocab] of a prompt that runs ``chunk`` tokens at a time."""
    groups = len(program.info.page_windows)
    width = -(-len(token_ids) // PAGE_TOKENS)
    pages = np.random.default_rng(len(token_ids)).permutation(program.limits.num_pages)[:width]
    tables = int32(np.broadcast_to(pages, (groups, 1, width)))
    rows = []
    step = chunk or len(token_ids)
    for start in range(0, len(token_ids), step):
        ids = int32(token_ids[start : start + step])
        positions = int32(range(start, start + len(ids)))
        program.run(StepBatch(ids, positions, int32([0, len(ids)]), tables, int32(range(len(ids)))))
        rows.append(program.logits().copy())
    return np.concatenate(rows)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
