"""The tables of a profile: what each op takes in a prefill, in a decode step, or in a step of a service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.node_costs import Cost, StepSize, kind_keys, kind_labels, node_costs, peak_of
from penstock.bench.span_totals import Pass
from penstock.graph.ir import Graph

__all__ = ["PhaseReport", "ProfileReport", "ProfiledProgram", "Row", "compare_with_limits", "rows_by_kind"]


@dataclass
class Row:
    """One kind of op, or one node.

    ``seconds`` and ``wait_seconds`` (waiting for other threads before the op) are means over the threads, so that the
    rows of a phase add up.  ``busy_seconds`` is the time of the busiest thread; rates and ``share_of_limit`` use it.
    ``limit`` is the bound: "memory", or the arithmetic "int8", "bf16" or "f32".  A share above 1 means that data came
    from CPU caches.
    """

    name: str
    op: str
    calls: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    num_bytes: float = 0.0
    num_ops: float = 0.0
    peak: str = "f32"
    limit: str = ""
    share_of_limit: float = 0.0


@dataclass
class PhaseReport:
    """The profile of a phase; a pass is one prompt or one decode step.  Times in seconds.

    In the profile of a service, a phase is a kind of step, "mixed" for those with prompts and answers.  A pass is then
    a step that was recorded, ``seen`` counts all steps of the kind, and sizes and times are means over these steps;
    ``plain_s`` is the mean of those that were not recorded, 0 if there are none.

    ``step_threads`` threads executed ``alike`` of the ``passes``; the others had more or fewer, because a step does not
    wait for a late thread.  ``wall_s`` is the mean of the middle half, by time, of those alike.  ``plain_s`` is the
    median of as many passes without profiling.  ``read_bytes_per_s`` and ``ops_per_s`` (by type) are the limits of
    ``step_threads`` threads, measured with the phase; 0 and empty if they were not.  ``kinds`` and ``between`` add up
    to ``wall_s``.  ``fused`` counts the ops that another op computes when it stores its output.  ``spans`` are those of
    the steps of the median pass.
    """

    phase: str
    num_tokens: int
    num_requests: int
    context: int
    num_steps: int
    step_threads: int
    passes: int
    alike: int
    wall_s: float
    plain_s: float
    read_bytes_per_s: float
    ops_per_s: dict[str, float]
    kinds: list[Row]
    nodes: list[Row]
    between: dict[str, float]
    fused: dict[str, int]
    spans: list[NDArray[np.void]] = field(repr=False, default_factory=list)
    seen: int = 0


@dataclass
class ProfileReport:
    """The profile of a model, by phase; ``populate_s``: seconds to copy the weights, 0 if they are mapped."""

    network: str
    scheme: str
    cpu_level: str
    num_threads: int
    kv_cache: str
    weights: str
    populate_s: float
    phases: list[PhaseReport]


@dataclass(frozen=True)
class ProfiledProgram:
    """The facts about a program that the rows of a profile need.

    ``kv_token_bytes``: the bytes of a KV page in all states, divided by its tokens.  ``wanted_only``: per node, True if
    it runs only for rows of logits.
    """

    graph: Graph
    kv_layout: str
    cpu_level: str
    kv_token_bytes: float
    wanted_only: Sequence[bool]

    def rows(self, sizes: Sequence[StepSize], passes: Sequence[Pass]) -> tuple[list[Row], dict[str, float]]:
        """Return the rows of the nodes and the seconds between them, as means over the passes of these steps."""

        def mean(name: str) -> Any:
            return sum(getattr(run, name) for run in passes) / len(passes) * 1e-9

        executed = {int(node) for run in passes[0].spans for node in np.unique(run["node"])}
        costs = [Cost() for _ in self.graph.nodes]
        for size in sizes:
            for cost, more in zip(
                costs, node_costs(self.graph, size, self.kv_token_bytes, self.wanted_only), strict=True
            ):
                cost.add(more)
        rows: list[Row] = []
        for node, cost, work, wait, busy in zip(
            self.graph.nodes, costs, mean("work"), mean("wait"), mean("busy"), strict=True
        ):
            row = Row(node.name, node.op, seconds=float(work), wait_seconds=float(wait), busy_seconds=float(busy))
            if len(rows) in executed:  # otherwise another node computes it when storing
                row.calls, row.num_bytes, row.num_ops = len(sizes), cost.num_bytes, cost.num_ops
                row.peak = peak_of(node, self.kv_layout, self.cpu_level)
            rows.append(row)
        between = {
            "waiting for other threads": float(mean("wait").sum()) + mean("ending"),
            "starting the threads": mean("starting"),
            "between ops": mean("gaps"),
            "calling the core": mean("calling"),
        }
        return rows, between


def compare_with_limits(row: Row, phase: PhaseReport) -> None:
    """Note which limit of the machine bounds the row, and the share of it that the row reaches."""
    memory, arithmetic = row.num_bytes / phase.read_bytes_per_s, row.num_ops / phase.ops_per_s[row.peak]
    row.limit = "memory" if memory >= arithmetic else row.peak
    row.share_of_limit = max(memory, arithmetic) / row.busy_seconds if row.busy_seconds > 0 else 0.0


def rows_by_kind(graph: Graph, nodes: Sequence[Row]) -> list[Row]:
    """Return the sums of the nodes by kind, the slowest first."""
    keys = kind_keys(graph.nodes)
    labels = kind_labels(keys)
    rows: dict[str, Row] = {}
    for key, node in zip(keys, nodes, strict=True):
        if not node.calls:
            continue
        row = rows.setdefault(key, Row(labels[key], node.op, peak=node.peak))
        row.calls += node.calls
        for name in ("seconds", "wait_seconds", "busy_seconds", "num_bytes", "num_ops"):
            setattr(row, name, getattr(row, name) + getattr(node, name))
    return sorted(rows.values(), key=lambda row: -row.seconds)
