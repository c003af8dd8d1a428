"""Adds up the spans that the core records in a step, by node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pass", "add_up_spans"]


@dataclass
class Pass:
    """The nanoseconds of a pass: arrays per node, and the time outside of nodes."""

    work: NDArray[np.float64]
    wait: NDArray[np.float64]
    busy: NDArray[np.float64]
    spans: list[NDArray[np.void]]
    wall: float = 0.0
    starting: float = 0.0
    ending: float = 0.0
    gaps: float = 0.0
    calling: float = 0.0
    threads: int = 0


def add_up_spans(steps: list[tuple[float, NDArray[np.void]]], num_nodes: int) -> Pass:
    """Add up the steps of a pass, each given as the nanoseconds that the caller measured and the spans of the step.

    Each nanosecond of each thread belongs to a node, a wait, the start or end of the step, or a gap between nodes.
    """
    total = Pass(np.zeros(num_nodes), np.zeros(num_nodes), np.zeros(num_nodes), [spans for _, spans in steps])
    for wall, spans in steps:
        step, node_spans = spans[0], spans[1:]
        present, thread_of = np.unique(node_spans["thread"], return_inverse=True)  # thread numbers may have gaps
        threads = len(present)
        length = float(step["end_ns"] - step["begin_ns"])
        work_ns = (node_spans["end_ns"] - node_spans["begin_ns"]).astype(np.float64)
        wait_ns = (node_spans["begin_ns"] - node_spans["arrive_ns"]).astype(np.float64)
        work = np.zeros((threads, num_nodes))
        np.add.at(work, (thread_of, node_spans["node"]), work_ns)
        starting = ending = 0.0
        for thread in range(threads):
            own = node_spans[thread_of == thread]
            starting += float(own["arrive_ns"][0] - step["begin_ns"])
            ending += float(step["end_ns"] - own["end_ns"][-1])
        total.wall += wall
        total.work += work.sum(0) / threads
        total.busy += work.max(0)
        total.wait += np.bincount(node_spans["node"], wait_ns, num_nodes) / threads
        total.ending += ending / threads
        total.starting += starting / threads
        total.gaps += length - (float(work_ns.sum() + wait_ns.sum()) + starting + ending) / threads
        total.calling += wall - length
        total.threads = max(total.threads, threads)
    return total
