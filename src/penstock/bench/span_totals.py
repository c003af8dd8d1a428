"""The spans of a step, as the core notes them, added up by node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pass", "tally"]


@dataclass
class Pass:
    """Nanoseconds of a pass: per node, and what lies between."""

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


def tally(found: list[tuple[float, NDArray[np.void]]], num_nodes: int) -> Pass:
    """Add up the steps of a pass, each with its nanoseconds as the caller saw them and the spans of that step.

    Every nanosecond of every thread belongs to a node, a wait, an edge of the step or a gap between nodes.
    """
    total = Pass(np.zeros(num_nodes), np.zeros(num_nodes), np.zeros(num_nodes), [noted for _, noted in found])
    for wall, noted in found:
        step, rest = noted[0], noted[1:]
        present, thread_of = np.unique(rest["thread"], return_inverse=True)  # one in the middle may be absent
        threads = len(present)
        length = float(step["end_ns"] - step["begin_ns"])
        worked = (rest["end_ns"] - rest["begin_ns"]).astype(np.float64)
        waited = (rest["begin_ns"] - rest["arrive_ns"]).astype(np.float64)
        work = np.zeros((threads, num_nodes))
        np.add.at(work, (thread_of, rest["node"]), worked)
        starting = ending = 0.0
        for thread in range(threads):
            mine = rest[thread_of == thread]
            starting += float(mine["arrive_ns"][0] - step["begin_ns"])
            ending += float(step["end_ns"] - mine["end_ns"][-1])
        total.wall += wall
        total.work += work.sum(0) / threads
        total.busy += work.max(0)
        total.wait += np.bincount(rest["node"], waited, num_nodes) / threads
        total.ending += ending / threads
        total.starting += starting / threads
        total.gaps += length - (float(worked.sum() + waited.sum()) + starting + ending) / threads
        total.calling += wall - length
        total.threads = max(total.threads, threads)
    return total
