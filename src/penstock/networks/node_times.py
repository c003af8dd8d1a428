"""The time of a network's run, by op and by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.core.spans import NodeInfo, last_spans

if TYPE_CHECKING:
    from penstock.core.predict import NetworkProgram

__all__ = ["NodeTime", "by_op", "node_times", "span_times"]


@dataclass(frozen=True)
class NodeTime:
    """A node, or all nodes of an op (``name`` is "" then, and ``count`` their number), and its milliseconds."""

    op: str
    name: str
    milliseconds: float
    count: int = 1


def span_times(program: NetworkProgram, count: int) -> NDArray[np.float64]:
    """Return the milliseconds of each of ``count`` nodes in the last run: until its last thread is done, from when the
    node before it was.  A thread that found no work for a node has no span of it.
    """
    spans = last_spans(program)
    begin = int(spans["begin_ns"][spans["node"] < 0].min(initial=np.iinfo(np.int64).max))
    spans = spans[spans["node"] >= 0]
    ends = np.zeros(count, np.int64)
    np.maximum.at(ends, spans["node"], spans["end_ns"])
    ends = np.maximum(np.maximum.accumulate(ends), begin if len(spans) else 0)
    return np.diff(ends, prepend=begin if len(spans) else 0) / 1e6


def node_times(runs: Sequence[NDArray[np.float64]], nodes: Sequence[NodeInfo]) -> list[NodeTime]:
    """Return the median of each node over ``runs``, the slowest first."""
    medians = np.median(np.stack(runs), axis=0)
    times = [NodeTime(node.op, node.name, float(median)) for node, median in zip(nodes, medians, strict=True)]
    return sorted(times, key=lambda item: -item.milliseconds)


def by_op(times: Sequence[NodeTime]) -> list[NodeTime]:
    """Return the sum for each op, the slowest first."""
    sums = {
        op: [item.milliseconds for item in times if item.op == op] for op in dict.fromkeys(item.op for item in times)
    }
    rows = [NodeTime(op, "", sum(values), len(values)) for op, values in sums.items()]
    return sorted(rows, key=lambda item: -item.milliseconds)
