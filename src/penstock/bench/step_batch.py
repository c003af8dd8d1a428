"""The arrays of a step of given sizes: random tokens, and pages of its own for each request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.bench.node_costs import StepSize
from penstock.core.native import StepBatch
from penstock.runtime.program import ProgramInfo

__all__ = ["StepArrays", "make_step"]


@dataclass(frozen=True)
class StepArrays:
    """The arrays of a step, and its sizes."""

    batch: StepBatch
    size: StepSize


def make_step(info: ProgramInfo, size: StepSize, random: np.random.Generator) -> StepArrays:
    """Return a step: request i has ``size.lens[i]`` random tokens from position ``size.starts[i]``.

    Steps with the same number of requests use the same pages.
    """
    num_requests, width = len(size.lens), size.width
    # A group with fewer pages reuses those that the window has left.
    own = [min(width, count // num_requests) for count in info.group_pages]
    starts, entries = np.arange(num_requests)[:, None], np.arange(width)
    tables = np.array([starts * count + entries % count for count in own], np.int32)
    ends = np.cumsum([0, *size.lens], dtype=np.int32)
    ranges = [np.arange(s, s + n, dtype=np.int32) for s, n in zip(size.starts, size.lens, strict=True)]
    batch = StepBatch(
        token_ids=random.integers(0, info.vocab_size, size.num_tokens, np.int32),
        positions=np.concatenate(ranges),
        request_starts=ends,
        page_tables=tables.reshape(len(own), num_requests, width),
        output_rows=np.ascontiguousarray(ends[1:] - 1)[num_requests - size.num_rows :],
    )
    return StepArrays(batch, size)
