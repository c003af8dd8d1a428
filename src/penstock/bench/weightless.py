"""A model in any scheme without its weights: its exact plan, and the roofline of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.bench.node_costs import StepSize, node_costs, peak_of
from penstock.core import native, spans
from penstock.graph.bundle import place_weights
from penstock.graph.ir import Graph
from penstock.graph.without_weights import write_without_weights
from penstock.runtime.native import fit_limits
from penstock.runtime.program import PAGE_TOKENS, ProgramLimits, kv_layout_of

__all__ = ["Bound", "Machine", "Weightless", "add_up"]

_ANY_BYTES: Final = 1 << 62


@dataclass(frozen=True)
class Machine:
    """The measured limits of this machine, for ``num_threads`` threads.  ``ops_per_s``: by type, int8, bf16, f32."""

    cpu_level: str
    num_threads: int
    read_bytes_per_s: float
    ops_per_s: dict[str, float]


@dataclass(frozen=True)
class Bound:
    """The roofline of some steps: bytes to move, operations, and the least seconds that they take.

    ``seconds`` adds up the slower of memory and arithmetic of each op.  ``limit`` is what most of them wait for:
    "memory", or the arithmetic "int8", "bf16" or "f32".
    """

    num_bytes: float
    num_ops: float
    seconds: float
    limit: str


def add_up(costs: Sequence[tuple[float, float, str]], machine: Machine) -> Bound:
    """Return the bound of ops, each given as bytes, operations, and the type whose arithmetic peak bounds it."""
    seconds: dict[str, float] = {}
    for num_bytes, num_ops, peak in costs:
        memory, arithmetic = num_bytes / machine.read_bytes_per_s, num_ops / machine.ops_per_s[peak]
        limit = "memory" if memory >= arithmetic else peak
        seconds[limit] = seconds.get(limit, 0.0) + max(memory, arithmetic)
    return Bound(
        sum(cost[0] for cost in costs),
        sum(cost[1] for cost in costs),
        sum(seconds.values()),
        max(seconds, key=lambda limit: seconds[limit], default="memory"),
    )


class Weightless:
    """A bundle without weights in ``path``, open: the graph, with the sizes of its weights, and the core's model."""

    def __init__(self, path: Path, graph: Graph, files: dict[str, bytes] | None = None) -> None:
        self.path = path
        self.graph = place_weights(graph)[0]
        write_without_weights(path, graph, files)
        self.model = native.Model.open(path)

    def plan(self, context: native.Context, limits: ProgramLimits) -> native.MemoryPlan:
        """Return the core's plan of the memory, whether or not it fits this machine.

        Every request has pages for its whole context, where ``limits`` leaves the number of pages open.
        """
        return fit_limits(self.model, context, limits, _ANY_BYTES)[1]

    def bound(self, sizes: Sequence[StepSize], kv_page_bytes: int, kv_layout: str, machine: Machine) -> Bound:
        """Return the roofline of steps, added up.  ``kv_page_bytes``: of one KV page, summed over all states."""
        wanted_only = [node.wanted_only for node in spans.node_infos(self.model)]
        layout = kv_layout_of(kv_layout, self.graph.scheme)
        peaks = [peak_of(node, layout, machine.cpu_level) for node in self.graph.nodes]
        costs = []
        for size in sizes:
            of_nodes = node_costs(self.graph, size, kv_page_bytes / PAGE_TOKENS, wanted_only)
            costs += [(cost.num_bytes, cost.num_ops, peak) for cost, peak in zip(of_nodes, peaks, strict=True)]
        return add_up(costs, machine)

    def close(self) -> None:
        """Close the model and remove the file."""
        self.model.close()
        self.path.unlink(missing_ok=True)
