"""The cost of a model that is divided over ranks of this host: memory of each rank, and the time of a token.

The memory is what the core plans for a rank's graph, without its weights.  A token's time is that of its bytes at the
measured bandwidth of memory, and of its exchanges at their measured latency: a bound that the kernels come near to,
when one request is generated.
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from penstock.core import native
from penstock.core.comm import SharedComm, shared_bytes
from penstock.core.layouts import PARTITION_PAGES, pages_for
from penstock.core.native import Context
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.file_kinds import is_gguf
from penstock.graph.ir import Graph, Node
from penstock.graph.passes.pipeline import cut_rank
from penstock.graph.rank_bundle import WHOLE, partials_bytes
from penstock.graph.without_weights import read_source, write_without_weights
from penstock.runtime.build import build_in_child
from penstock.runtime.native import fit_limits, refuse_general_network
from penstock.runtime.program import ProgramLimits

__all__ = [
    "CONTEXT_TOKENS",
    "LinkProbe",
    "Prediction",
    "RankMemory",
    "RankParts",
    "exchange_bytes",
    "model_graph",
    "predict",
]

CONTEXT_TOKENS: Final = 512
"""The tokens before the one whose time is predicted."""
_SIZES: Final = (4 << 10, 64 << 10)
_COUNT: Final = 100
"""Exchanges between two looks at the clock."""
_PROBE_SECONDS: Final = 0.01
_PROBE_BYTES, _PROBE_PASSES = 96 << 20, 3
"""The memory that is read, beyond any cache, and how often."""
_HEADROOM_BYTES: Final = 64 << 20
"""Python and the libraries of a rank."""
_ANY_MEMORY: Final = 1 << 60


@dataclass(frozen=True)
class RankMemory:
    """The bytes that a rank needs; ``token_bytes`` of them are read for each token."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    rest_bytes: int
    token_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the memory of the rank in total."""
        return self.weight_bytes + self.kv_bytes + self.rest_bytes


@dataclass(frozen=True)
class Prediction:
    """The milliseconds of a token over the ranks of ``layout`` with ``threads`` threads each.

    ``read_bytes_per_s``: the bandwidth of memory that was measured for it.  ``pipelined_ms``: between two tokens when
    there is a request for each stage.
    """

    layout: RankLayout
    threads: int
    memory_ms: float
    exchange_ms: float
    num_exchanges: int
    read_bytes_per_s: float
    pipelined_ms: float = 0.0

    @property
    def token_ms(self) -> float:
        """The time of a token."""
        return self.memory_ms + self.exchange_ms


def model_graph(path: Path, scheme: str | None = None, network: str | None = None) -> Graph:
    """Return the graph of a bundle, a checkpoint folder or a GGUF file; no weight is read.

    ``scheme`` (by default that of the weights) and ``network`` ("file.py:Class") are not for a bundle, which has its
    own: InvalidArgumentError (``scheme``, ``network``).  Raises what export raises, and UnsupportedError for the bundle
    of one rank.
    """
    if path.is_dir() or is_gguf(path):
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            bundle = Path(folder) / "model.psm"
            build_in_child(path, bundle, scheme=scheme, network=network, kind="without-weights")
            return read_source(bundle)[0]
    for name, value in (("scheme", scheme), ("network", network)):
        if value is not None:
            raise InvalidArgumentError(f"{name}: expected none for the bundle {path}, which has its own", param=name)
    graph = read_source(path)[0]
    refuse_general_network(graph.kind, str(path))
    if WHOLE in graph.properties:
        raise UnsupportedError(f"{path}: expected a whole bundle, got that of one rank", param="model")
    return graph


class RankParts:
    """The graphs and the memory of the ranks that ``whole`` can be divided over, by layout, each computed once.

    Both methods raise InvalidArgumentError (``tensor_parallel_size``, ``pipeline_parallel_size``) for more ranks or
    stages than the network has heads or layers.
    """

    def __init__(self, whole: Graph) -> None:
        self._whole = whole
        self._graphs: dict[RankLayout, list[Graph]] = {}
        self._memory: dict[tuple[RankLayout, int, str], list[RankMemory]] = {}

    def graphs(self, layout: RankLayout) -> list[Graph]:
        """Return the graph of each rank."""
        if layout not in self._graphs:
            self._graphs[layout] = [cut_rank(self._whole, rank, layout)[0] for rank in range(layout.world)]
        return self._graphs[layout]

    def memory(self, layout: RankLayout, *, context_len: int = 0, kv_cache: str = "auto") -> list[RankMemory]:
        """Return the memory of each rank: weights in the scheme of the graph, and keys and values of one context."""
        key = (layout, context_len, kv_cache)
        if key not in self._memory:
            limits = ProgramLimits(max_requests=1, context_len=context_len, kv_layout=kv_cache)
            self._memory[key] = _rank_memory(self.graphs(layout), layout, limits)
        return self._memory[key]


def _rank_memory(graphs: list[Graph], layout: RankLayout, limits: ProgramLimits) -> list[RankMemory]:
    result = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, Context(1) as context:
        for rank, graph in enumerate(graphs):
            path = Path(folder) / f"{rank}.psm"
            write_without_weights(path, graph)
            with native.Model.open(path) as model:
                own, plan = fit_limits(model, context, limits, _ANY_MEMORY, layout.cp)
            rest = plan.total_bytes - plan.weight_bytes - plan.kv_bytes + _HEADROOM_BYTES
            tokens = min(CONTEXT_TOKENS, own.context_len)
            kv_read = plan.kv_bytes * pages_for(tokens) // max(1, own.num_pages)
            read = sum(_bytes_read(graph, node) for node in graph.nodes) + kv_read
            result.append(RankMemory(rank, plan.weight_bytes, plan.kv_bytes, rest, read))
    return result


def _bytes_read(graph: Graph, node: Node) -> int:
    """Return the bytes of weights that a node reads for a token: of a table a row, of experts those that it goes to."""
    weights = [graph.weights[operand.name] for operand in node.inputs if operand.kind == "weight"]
    num_bytes = sum(native.layout_bytes(int(own.layout), own.rows, own.cols) for own in weights)
    if node.op in ("embedding", "sharded_embedding"):
        return num_bytes // weights[0].rows
    if node.op == "expert_linear":
        slots = graph.values[node.inputs[2].name].shape[1].offset
        return num_bytes * slots // int(node.attrs["num_experts"])
    return num_bytes


def exchange_bytes(graph: Graph) -> list[int]:
    """Return the bytes that a rank sends for a token, for each exchange of its graph."""
    sizes = []
    for node in graph.nodes:
        if node.op == "all_gather":
            sizes.append(4 * _width(graph, node.inputs[0].name))
        elif node.op == "all_gather_rounded":  # the largest magnitudes of the rows, then integers
            shape = graph.values[node.inputs[0].name].shape
            sizes.append(4 * (shape[1].offset if len(shape) == 3 else 1))
            sizes.append(int(node.attrs["bits"]) // 8 * _width(graph, node.inputs[0].name))
        elif node.op == "sharded_embedding":
            sizes.append(4 * _width(graph, node.outputs[0]) // (str(node.attrs["starts"]).count("|") or 1))
        elif node.op == "send":
            sizes.append(4 * _width(graph, node.inputs[0].name))
        elif node.op == "context_attention":
            num_parts = -(-pages_for(CONTEXT_TOKENS) // PARTITION_PAGES)
            sizes.append(partials_bytes(graph, node) * -(-num_parts // int(node.attrs["world"])))
    return sizes


def _width(graph: Graph, name: str) -> int:
    return math.prod(dim.offset for dim in graph.values[name].shape[1:])


class LinkProbe:
    """The latency of exchanges through shared memory, between threads that each have a core, if there are enough.

    ``fixed_s`` and ``byte_s``: the seconds of an exchange and of a byte over another link, instead of measured ones.  A
    rank sends its part to each of the others.
    """

    def __init__(self, world: int, fixed_s: float | None = None, byte_s: float | None = None) -> None:
        self.world = world
        if fixed_s is None or byte_s is None:
            self._measure(world)
        if fixed_s is not None:
            self._fixed = fixed_s
        if byte_s is not None:
            self._per_byte = byte_s * (world - 1)

    def _measure(self, world: int) -> None:
        medians = _probe(world)
        low, high = (medians[size] for size in _SIZES)
        self._per_byte = max(0.0, (high - low) / (_SIZES[1] - _SIZES[0]))
        self._fixed = max(0.0, low - self._per_byte * _SIZES[0])

    def seconds(self, num_bytes: int) -> float:
        """Return the time of an exchange in which each rank sends ``num_bytes``."""
        return self._fixed + self._per_byte * num_bytes


def _probe(world: int) -> dict[int, float]:
    """Return the median seconds of an exchange by the bytes of a part."""
    cores = sorted(os.sched_getaffinity(0))
    shared = mmap.mmap(-1, shared_bytes(world, _SIZES[-1]))
    address = np.frombuffer(shared, np.uint8).ctypes.data
    medians: dict[int, float] = {}
    errors: list[PenstockError] = []
    crowded = len(cores) < world
    comms = [
        SharedComm(rank, world, _SIZES[-1], memory=address, timeout_s=20.0, oversubscribed=crowded)
        for rank in range(world)
    ]

    last = [False]
    together = threading.Barrier(world)

    def run(rank: int) -> None:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})  # of this thread only
        try:
            for size in _SIZES:
                times: list[int] = []
                end = time.monotonic() + _PROBE_SECONDS
                is_last = False
                while not is_last:
                    times += comms[rank].probe(size, _COUNT)[_COUNT // 10 :]
                    together.wait()
                    if rank == 0:
                        last[0] = time.monotonic() >= end
                    together.wait()
                    is_last = last[0]
                if rank == 0:
                    medians[size] = statistics.median(times) / 1e9
        except PenstockError as error:
            errors.append(error)
            comms[rank].abort("the probe of a rank failed")
            together.abort()
        except threading.BrokenBarrierError:
            pass  # another rank has the error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.close()
    if errors:
        raise errors[0]
    return medians


def predict(
    parts: RankParts, layouts: Sequence[RankLayout], *, links: Mapping[int, LinkProbe] | None = None
) -> list[Prediction]:
    """Return the predictions for each of the layouts that the network can be divided in, as measured now.

    All ranks of a stage read their weights at once, so they share the bandwidth of this host by their threads.  The
    stages of a pipeline take turns at one request.  ``links``: probes by number of ranks, instead of measured ones.
    """
    with Context() as context:
        cores = context.num_threads
        bandwidth = native.probe_bandwidth(context, _PROBE_BYTES, _PROBE_PASSES)
    stage_bandwidths, probes = {1: bandwidth}, dict(links or {})
    result = []
    for layout in layouts:
        try:
            memory = parts.memory(layout)[layout.world - layout.num_computing :]
        except InvalidArgumentError:
            continue  # more ranks than attention heads, or more stages than layers
        world, pp = layout.stage_ranks, layout.pp
        if pp not in stage_bandwidths:
            with Context(max(1, cores // pp)) as context:
                stage_bandwidths[pp] = min(bandwidth, native.probe_bandwidth(context, _PROBE_BYTES, _PROBE_PASSES))
        stages = [max(rank.token_bytes for rank in memory[i : i + world]) for i in range(0, len(memory), world)]
        firsts = [layout.rank_of(stage, 0) for stage in range(pp)]
        graphs = parts.graphs(layout) if layout.world > 1 else []
        sizes = [size for rank in firsts for size in exchange_bytes(graphs[rank])] if graphs else []
        if sizes and world not in probes:
            probes[world] = LinkProbe(max(2, world))
        exchange_s = sum(probes[world].seconds(size) for size in sizes)
        result.append(
            Prediction(
                layout,
                max(1, cores // layout.num_computing),
                1e3 * sum(stages) * world / stage_bandwidths[pp],
                1e3 * exchange_s,
                len(sizes),
                bandwidth,
                1e3 * max(stages) * world * pp / bandwidth if pp > 1 else 0.0,
            )
        )
    return result
