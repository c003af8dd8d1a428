"""The cost of a model that is divided over ranks of this host: memory of each rank, and the time of a token.

Weights are counted exactly, as a rank's bundle has them.  Keys and values, and the rest, are estimated as
``hub.memory_need`` does.  A token's time is that of its bytes at the measured bandwidth of memory, and of its exchanges
at their measured latency: a bound that the kernels come near to, when one request is generated.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import statistics
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from penstock.core import layouts, native
from penstock.core.comm import SharedComm, shared_bytes
from penstock.core.native import Context
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.graph.passes.cut import balance, cut_heads
from penstock.graph.strategy import make_strategy
from penstock.hub.memory_need import ModelShape, memory_need
from penstock.quant.scheme import find_scheme
from penstock.sharding.source import WholeTensors
from penstock.sharding.strategy import Parameter, Strategy

__all__ = ["CONTEXT_TOKENS", "LinkProbe", "Prediction", "RankMemory", "exchange_widths", "predict", "rank_memory"]

CONTEXT_TOKENS: Final = 512
"""The tokens before the one whose time is predicted."""
_ALIGNMENT: Final = 64
_SIZES: Final = (4 << 10, 64 << 10)
_COUNT: Final = 4000
_TABLES: Final = {"f32": layouts.ROWS_F32, "f16": layouts.ROWS_F16, "bf16": layouts.ROWS_BF16}
_LAYER: Final = re.compile(r"\.(\d+)\.(self_attn|input_layernorm)?")
_FUSED: Final = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


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
    """The milliseconds of a token over ``world`` ranks of ``threads`` threads each, in ``pp`` stages.

    ``read_bytes_per_s``: the bandwidth of memory that was measured for it.  ``pipelined_ms``: between two tokens when
    there is a request for each stage.
    """

    world: int
    threads: int
    memory_ms: float
    exchange_ms: float
    num_exchanges: int
    read_bytes_per_s: float
    pp: int = 1
    pipelined_ms: float = 0.0

    @property
    def token_ms(self) -> float:
        """The time of a token."""
        return self.memory_ms + self.exchange_ms


def rank_memory(
    model: WholeTensors,
    strategy: Strategy,
    scheme: str,
    *,
    pp: int = 1,
    context_len: int = 0,
    kv_cache: str = "auto",
) -> list[RankMemory]:
    """Return the memory of each rank: weights in ``scheme``, and keys and values of one context.

    ``pp``: stages that the layers are divided into; ``strategy`` is that of each.  Raises InvalidArgumentError
    (``pipeline_parallel_size``) for more stages than the layers allow.
    """
    shape = ModelShape.of(model.config, sum(info.num_bytes for info in model.tensors.values()))
    num_heads = model.config.int("num_attention_heads")
    _, kv_heads = cut_heads(num_heads, shape.num_kv_heads, strategy.world)
    if kv_cache == "auto":
        kv_cache = "f32" if scheme == "f32" else "bf16"
    tokens = min(context_len or shape.context_len, shape.context_len)
    need = memory_need(shape, scheme, context_len=tokens, kv_cache=kv_cache)
    rest = need - shape.weight_bytes(scheme) - shape.kv_bytes(tokens, kv_cache)
    layout = RankLayout(strategy.world, pp)
    stages = _stages(model, scheme, shape, pp)
    result = [] if pp == 1 else [RankMemory(0, 0, 0, rest, 0)]
    for rank in range(len(result), layout.world):
        stage, place = layout.place(rank)
        names, num_layers = stages[stage]
        own = replace(shape, num_kv_heads=kv_heads.size(place), num_layers=num_layers)
        part = replace(strategy, parameters={name: strategy.parameters[name] for name in names})
        weights, table = _weight_bytes(part, place, scheme, shape)
        kv = own.kv_bytes(tokens, kv_cache)
        if shape.tied and stage == 0 < pp - 1:
            table = weights - _weight_bytes(_without_table(part), place, scheme, shape)[0]
        read = weights - table + own.kv_bytes(CONTEXT_TOKENS, kv_cache)
        # A float32 for two dimensions of rotary positions; the last weight of a bundle.
        weights += 2 * shape.head_dim if num_layers else 0
        result.append(RankMemory(rank, weights, kv, rest, read))
    return result


def _without_table(strategy: Strategy) -> Strategy:
    parameters = {name: own for name, own in strategy.parameters.items() if "embed_tokens" not in name}
    return replace(strategy, parameters=parameters)


def _stages(model: WholeTensors, scheme: str, shape: ModelShape, pp: int) -> list[tuple[list[str], int]]:
    """Return for each stage the parameters that it has, and how many layers' keys and values.

    The cuts are those of ``passes.pipeline``: before and behind the attention of a layer, and before the output head.
    """
    whole = make_strategy(model, 1)
    if pp == 1:
        return [([*whole.parameters], shape.num_layers)]
    units: dict[tuple[int, int], list[str]] = {}
    for name in whole.parameters:
        layer = _LAYER.search(name)
        if layer is not None:
            key = int(layer[1]), 0 if layer[2] else 1
        elif "embed_tokens" in name:
            key = -1, 0
        else:
            key = shape.num_layers, int("lm_head" in name)
        units.setdefault(key, []).append(name)
    table = units.get((-1, 0), [])
    if shape.tied:  # the table is the head, too
        units[shape.num_layers, 1] = [*units.get((shape.num_layers, 1), []), *table]
    order = sorted(units)
    cost, ends = 0, {}
    for key in order:
        part = replace(whole, parameters={name: whole.parameters[name] for name in units[key]})
        cost += 0 if key == (-1, 0) else _weight_bytes(part, 0, scheme, shape)[0]
        ends[cost] = key
    cuts = [end for end in ends if 0 < end < cost]
    if len(cuts) < pp - 1:
        raise InvalidArgumentError(
            f"pipeline_parallel_size: expected at most {len(cuts) + 1} stages for the layers of this network, found "
            f"{pp}",
            param="pipeline_parallel_size",
        )
    stages: list[tuple[list[str], int]] = []
    first = 0
    for end in [*balance(cuts, cost, pp), cost]:
        last = order.index(ends[end]) + 1
        keys = order[first:last]
        names = dict.fromkeys(name for key in keys for name in units[key])
        stages.append(([*names], sum(half == 0 and 0 <= layer < shape.num_layers for layer, half in keys)))
        first = last
    return stages


def _weight_bytes(strategy: Strategy, rank: int, scheme: str, shape: ModelShape) -> tuple[int, int]:
    """Return the bytes of a rank's weights, and those of a table of which a token reads a row only."""
    row = find_scheme(scheme)
    head, table_bytes = find_scheme(row.head), 0
    matrices: Counter[tuple[str, str, bool, int]] = Counter()  # rows of linears that a bundle has as one, with columns
    vectors: Counter[tuple[str, str, bool]] = Counter()
    sizes = []
    for name, own in strategy.parameters.items():
        part = own.shape_of(rank)
        if part is None or own.cut == "owner" or name.endswith(("_scale", "_groups")):
            continue
        module, _, kind = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        has_bias = f"{module}.bias" in strategy.parameters
        if len(part) != 2:
            vectors[parent, f"{_FUSED.get(layer, layer)}.{kind}", has_bias] += math.prod(part)
        elif layer == "embed_tokens" and not shape.tied:
            table_bytes = native.layout_bytes(_TABLES[own.dtype], *part)
        elif layer in ("embed_tokens", "lm_head"):
            sizes.append(native.layout_bytes(head.layout, part[0], _cols(strategy, name, own)))
        else:
            matrices[parent, _FUSED.get(layer, layer), has_bias, _cols(strategy, name, own)] += part[0]
    sizes += [native.layout_bytes(layouts.ROWS_F32, 1, count) for count in vectors.values()]
    sizes += [native.layout_bytes(row.layout, rows, cols) for (*_, cols), rows in matrices.items()]
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in (*sizes, table_bytes)), table_bytes


def _cols(strategy: Strategy, name: str, own: Parameter) -> int:
    """Return the columns of a matrix; a 4-bit one is stored with two in a byte."""
    return own.shape[1] * (2 if f"{name}_groups" in strategy.parameters else 1)


def exchange_widths(strategy: Strategy) -> list[int]:
    """Return the float32 that all ranks together put together for a token, for each exchange."""
    widths = []
    for name, own in strategy.parameters.items():
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if not name.endswith(".weight") or own.cut != "rows":
            continue
        if layer in ("o_proj", "down_proj"):  # its inputs, and its outputs
            widths += [_cols(strategy, name, own), own.num_rows]
        elif layer == "embed_tokens":
            widths.append(own.shape[1])
            if not any(other.endswith("lm_head.weight") for other in strategy.parameters):
                widths.append(own.num_rows)
        elif layer == "lm_head":
            widths.append(own.num_rows)
    if any(own.cut == "same" for own in strategy.parameters.values()):
        widths += [own.num_rows for own in strategy.parameters.values() if own.cut == "same"]
    return widths


class LinkProbe:
    """The latency of exchanges through shared memory, between threads that each have a core, if there are enough."""

    def __init__(self, world: int) -> None:
        self.world = world
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

    def run(rank: int) -> None:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})  # of this thread only
        try:
            for size in _SIZES:
                times = comms[rank].probe(size, _COUNT)[_COUNT // 10 :]
                if rank == 0:
                    medians[size] = statistics.median(times) / 1e9
        except PenstockError as error:
            errors.append(error)
            comms[rank].abort("the probe of a rank failed")

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
    model: WholeTensors,
    scheme: str,
    worlds: Sequence[int],
    pp: int = 1,
    *,
    links: Mapping[int, LinkProbe] | None = None,
) -> list[Prediction]:
    """Return the predictions for each number of ranks that the network can be divided over, as measured now.

    ``pp``: stages, of which each has that many ranks.  All ranks read their weights at once, so they share the
    bandwidth of this host by their threads.  The stages of a pipeline take turns at one request.
    """
    with Context() as context:
        cores = context.num_threads
        bandwidth = native.probe_bandwidth(context)
    with Context(max(1, cores // pp)) as context:
        stage_bandwidth = bandwidth if pp == 1 else min(bandwidth, native.probe_bandwidth(context))
    result = []
    for world in worlds:
        try:
            strategy = make_strategy(model, world)
        except InvalidArgumentError:
            continue  # more ranks than attention heads
        memory = rank_memory(model, strategy, scheme, pp=pp)[pp > 1 :]
        stages = [max(rank.token_bytes for rank in memory[i : i + world]) for i in range(0, len(memory), world)]
        memory_s = sum(stages) * world / stage_bandwidth
        widths = exchange_widths(strategy) if world > 1 else []
        hops = [model.config.int("hidden_size")] * (pp - 1)
        link = (links or {}).get(world) or (LinkProbe(max(2, world)) if world * pp > 1 else None)
        sizes = [*(4 * -(-width // world) for width in widths), *(4 * width for width in hops)]
        exchange_s = sum(map(link.seconds, sizes)) if link is not None else 0.0
        pipelined_s = max(stages) * world * pp / bandwidth if pp > 1 else 0.0
        num_threads = max(1, cores // (world * pp))
        figures = 1e3 * memory_s, 1e3 * exchange_s, len(sizes), bandwidth, pp, 1e3 * pipelined_s
        result.append(Prediction(world, num_threads, *figures))
    return result
