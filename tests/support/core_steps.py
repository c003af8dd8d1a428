"""Small steps for the tests of the core."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.native import ALL_THREADS, ProgramOptions, Sampling, StepBatch
from tests.support.tiny_graph import VOCAB

# The steps of the tiny graph are short: without the flag one thread would run them alone.
OPTIONS = ProgramOptions(max_tokens=64, max_requests=4, max_rows=64, num_pages=16, num_slots=3, flags=ALL_THREADS)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 40)]


def i32(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def batch(requests: Sequence[tuple[int, Sequence[int], Sequence[int]]], groups: int = 1, **changes: Any) -> StepBatch:
    """Requests are (first position, token ids, pages); every token's logits are wanted."""
    ids = [token for _, tokens, _ in requests for token in tokens]
    positions = [start + i for start, tokens, _ in requests for i in range(len(tokens))]
    starts = np.cumsum([0, *(len(tokens) for _, tokens, _ in requests)], dtype=np.int32)
    tables = np.full((groups, len(requests), max(len(pages) for *_, pages in requests)), -1, np.int32)
    for row, (*_, pages) in enumerate(requests):
        tables[:, row, : len(pages)] = pages
    made = StepBatch(i32(*ids), i32(*positions), starts, tables, np.arange(len(ids), dtype=np.int32))
    return dataclasses.replace(made, **changes)


def sampling(rows: int, **changes: Any) -> Sampling:
    """Greedy unless changed."""
    made = Sampling(
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int32),
        np.ones(rows, np.float32),
        np.arange(rows, dtype=np.uint64),
        np.zeros((rows, 2), np.int64),
    )
    return dataclasses.replace(made, **changes)


def random_numbers(rng: np.random.Generator, name: str, rows: int, vocab: int) -> dict[str, Any]:
    """Changes for ``sampling``, a letter for each thing: k top_k, p top_p, m mask, g greedy; temperature, seed and
    counter in any case."""
    changes: dict[str, Any] = {
        "temperature": rng.uniform(0.3, 2, rows).astype(np.float32) * np.float32("g" not in name),
        "seed": rng.integers(0, 1 << 63, rows, np.uint64),
        "counter": rng.integers(0, 1 << 40, (rows, 2), np.int64),
    }
    if "k" in name:
        changes["top_k"] = rng.integers(1, 60, rows).astype(np.int32)
    if "p" in name:
        changes["top_p"] = rng.uniform(0.1, 0.99, rows).astype(np.float32)
    if "m" in name:
        changes["mask"] = rng.integers(0, 1 << 32, (rows, (vocab + 31) // 32), np.uint32)
    return changes
