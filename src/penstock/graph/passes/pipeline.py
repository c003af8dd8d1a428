"""Cut a graph by layers into the stages of a pipeline, each of which has its own weights and states.

Rank 0 schedules and samples, and has no layers: it receives the logits.  The ranks of the stages follow.  Stages send
rows of float32, so a pipeline computes the bits of one process (docs/explanation/ranks.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

from penstock.core.native import layout_bytes
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.ir import AttrValue, DType, Graph, Node, Operand, Value
from penstock.graph.passes.cut import balance
from penstock.graph.passes.fuse_linear import fuse_add_norm
from penstock.graph.passes.rewrite import drop_dead_code, order_values
from penstock.graph.passes.shard import RowRanges, shard
from penstock.ops.table import EXCHANGES

__all__ = ["cut_rank"]

_POSITIONS, _OUTPUT_ROWS = 1, 4
"""Places in ``Graph.inputs``."""


Owners = Mapping[str, Collection[int]]
"""By name of a tensor the stages that have it."""


def cut_rank(
    graph: Graph, rank: int, layout: RankLayout, owners: Owners | None = None
) -> tuple[Graph, dict[str, tuple[str, RowRanges]]]:
    """Return the graph of one rank, and for each of its weights the whole one's name and the rows that it has.

    ``owners``: the stages that have each tensor; None balances the bytes of weights that they read.  Raises
    InvalidArgumentError (``pipeline_parallel_size``, ``tensor_parallel_size``) for more stages than the layers allow or
    more ranks of a stage than attention heads, and UnsupportedError for a graph that is cut already.
    """
    if layout.pp == 1:
        return shard(graph, rank, layout.stage_ranks, contexts=layout.cp)
    stage, place = layout.place(rank)
    part = _cut_stage(graph, stage, layout.pp, owners)
    if layout.stage_ranks > 1 and stage >= 0:
        part, sources = shard(part, place, layout.stage_ranks, contexts=layout.cp)
    else:
        sources = {
            name: (name, ((0, weight.cols if weight.rows == 1 else weight.rows),))
            for name, weight in part.weights.items()
        }
    _address(part, rank, layout)
    part.properties = {**graph.properties, "rank": str(rank), "world": str(layout.world), "stages": str(layout.pp)}
    if layout.cp > 1:
        part.properties["context_world"] = str(layout.cp)
    return part, sources


def _address(part: Graph, rank: int, layout: RankLayout) -> None:
    """Say with which ranks a part exchanges rows.  Only the first rank of the last stage sends logits."""
    size = layout.stage_ranks
    before = layout.world - size if rank == 0 else rank - size
    after = rank + size if rank + size < layout.world else 0
    if after == 0 and layout.place(rank)[1] > 0:
        sends = [node for node in part.nodes if node.op == "send"]
        if part.output == sends[-1].outputs[0]:
            part.output = sends[-1].inputs[0].name
        part.nodes = [node for node in part.nodes if node.op != "send"]
        order_values(part)
    for node in part.nodes:
        if node.op in ("send", "recv"):
            peer: dict[str, AttrValue] = {"target": after} if node.op == "send" else {"source": before}
            node.attrs.update(peer, world=layout.world, rank=rank)


def _cut_stage(whole: Graph, stage: int, num_stages: int, owners: Owners | None) -> Graph:
    """Return the graph of a stage, or with ``stage`` -1 that of the coordinator."""
    if any(node.op in EXCHANGES for node in whole.nodes):
        raise UnsupportedError(
            "pipeline_parallel_size: expected a bundle of the whole network, got one of a rank",
            param="pipeline_parallel_size",
        )
    if any(node.op == "prefix_lengths" for node in whole.nodes):
        raise UnsupportedError(
            "pipeline_parallel_size: expected 1 for a network with a prefix, whose length every layer reads",
            param="pipeline_parallel_size",
        )
    graph = whole.copy()
    _split_add_norm(graph)
    everywhere = _take_first(graph)
    ends = _ends(graph)
    cuts = [0, *_choose_cuts(graph, ends, num_stages, owners), len(graph.nodes)]
    if stage < 0:
        _make_coordinator(graph, ends)
        return graph
    first, last = cuts[stage], cuts[stage + 1]
    live = _Live(graph)
    received = live.at(first) if stage > 0 else []
    sent = live.at(last) if stage + 1 < num_stages else []
    nodes = everywhere + [_recv(graph, name, graph.inputs[_POSITIONS]) for name in received]
    nodes += [node for node in graph.nodes[first:last] if node is not ends.tail]
    if stage + 1 == num_stages:
        if ends.gather is not None:
            after = nodes.index(ends.gather) + 1  # later, because the rows before it may be those of few tokens
            nodes.insert(after, _send(graph, ends.gather.inputs[0].name))
        sent = [ends.logits]
    nodes += [_send(graph, name) for name in sent]
    graph.nodes, graph.output = nodes, nodes[-1].outputs[0]
    fuse_add_norm(graph)
    drop_dead_code(graph)
    order_values(graph)
    return graph


@dataclass(frozen=True)
class _Ends:
    """The end of a graph: its logits, the node argmax or topk behind them, and the node that selects output rows from
    the hidden rows of all tokens."""

    logits: str
    tail: Node | None
    gather: Node | None


def _ends(graph: Graph) -> _Ends:
    producer = next(node for node in graph.nodes if graph.output in node.outputs)
    tail = producer if producer.op in ("argmax", "topk") else None
    logits = graph.output if tail is None else tail.inputs[0].name
    rows = graph.inputs[_OUTPUT_ROWS]
    gathers = [node for node in graph.nodes if node.op == "gather_rows" and node.inputs[1].name == rows]
    gather = gathers[0] if len(gathers) == 1 and _is_sendable(graph, gathers[0].inputs[0].name) else None
    if graph.values[logits].base is not None:
        raise UnsupportedError(
            "pipeline_parallel_size: expected logits that are rows of their own, got a view",
            param="pipeline_parallel_size",
        )
    return _Ends(logits, tail, gather)


def _make_coordinator(graph: Graph, ends: _Ends) -> None:
    nodes = []
    if ends.gather is not None:  # what it selects from are the hidden rows of a program
        nodes = [_recv(graph, ends.gather.inputs[0].name, graph.inputs[_POSITIONS]), ends.gather]
    nodes.append(_recv(graph, ends.logits, graph.inputs[_OUTPUT_ROWS]))
    graph.nodes = nodes if ends.tail is None else [*nodes, ends.tail]
    graph.weights, graph.states = {}, {}
    order_values(graph)


def _recv(graph: Graph, name: str, rows: str) -> Node:
    """Return the node that receives the value ``name``, a row for each element of the input ``rows``."""
    attrs: dict[str, AttrValue] = {"width": graph.values[name].shape[1].offset}
    return Node("recv", f"{name}:recv", [Operand("value", rows)], [name], attrs)


def _send(graph: Graph, name: str) -> Node:
    value = graph.values[name]
    graph.values[f"{name}:sent"] = Value(f"{name}:sent", value.dtype, value.shape)
    return Node("send", f"{name}:send", [Operand("value", name)], [f"{name}:sent"])


def _split_add_norm(graph: Graph) -> None:
    """Replace add_rms_norm by add + rms_norm, so that one value, the sum, crosses a cut between them."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op != "add_rms_norm":
            nodes.append(node)
            continue
        (x, residual, weight), (norm, total) = node.inputs, node.outputs
        nodes.append(Node("add", f"{node.name}:add", [residual, x], [total]))
        nodes.append(Node("rms_norm", node.name, [Operand("value", total), weight], [norm], dict(node.attrs)))
    graph.nodes = nodes


def _take_first(graph: Graph) -> list[Node]:
    """Take the nodes out of a graph that need no weights but vectors, no states, and nothing of other nodes but such
    ones: those that make the angles of the positions, for example.  Each stage that reads them computes them."""
    known, taken = set(graph.inputs), []
    for node in graph.nodes:
        values = [graph.values[operand.name] for operand in node.inputs if operand.kind == "value"]
        weights = [graph.weights[operand.name] for operand in node.inputs if operand.kind == "weight"]
        has_state = any(operand.kind == "state" for operand in node.inputs)
        is_light = not has_state and all(weight.rows == 1 for weight in weights)
        if is_light and all((value.base or value.name) in known for value in values):
            known.update(node.outputs)
            taken.append(node)
    graph.nodes = [node for node in graph.nodes if node not in taken]
    return taken


class _Live:
    """The values, none of them views, that nodes before a cut make and nodes behind it read."""

    def __init__(self, graph: Graph) -> None:
        self._made = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
        self._last_read: dict[str, int] = {}
        for i, node in enumerate(graph.nodes):
            for operand in node.inputs:
                if operand.kind == "value":
                    self._last_read[graph.values[operand.name].base or operand.name] = i

    def at(self, cut: int) -> list[str]:
        """Return the values that live when node ``cut`` begins."""
        return [name for name, made in self._made.items() if made < cut <= self._last_read.get(name, -1)]


def _is_sendable(graph: Graph, name: str) -> bool:
    value = graph.values[name]
    tokens = graph.values[graph.inputs[_POSITIONS]].shape[0]
    return value.base is None and value.dtype is DType.F32 and len(value.shape) == 2 and value.shape[0] == tokens


def _choose_cuts(graph: Graph, ends: _Ends, num_stages: int, owners: Owners | None) -> list[int]:
    """Return the nodes with which the stages after the first begin.

    A cut lies where the fewest columns cross it.  The stage that reads the most bytes of weights for a token reads as
    few as possible.
    """
    cost = [0, *accumulate(_cost(graph, node) for node in graph.nodes)]
    widths: dict[int, int] = {}
    values = _Live(graph)
    stop = len(graph.nodes) if ends.gather is None else graph.nodes.index(ends.gather) + 1
    for cut in range(1, stop):
        live = values.at(cut)
        if live and all(_is_sendable(graph, name) for name in live) and not _divides_state(graph, cut):
            widths[cut] = sum(graph.values[name].shape[1].offset for name in live)
    least = min(widths.values(), default=0)
    by_cost = {cost[cut]: cut for cut, width in widths.items() if width == least and 0 < cost[cut] < cost[-1]}
    if len(by_cost) < num_stages - 1:
        raise InvalidArgumentError(
            f"pipeline_parallel_size: expected at most {len(by_cost) + 1} stages for the layers of this network, got "
            f"{num_stages}",
            param="pipeline_parallel_size",
        )
    if owners is not None:
        return [_cut_of_owners(graph, [*by_cost.values()], owners, stage) for stage in range(1, num_stages)]
    return [by_cost[end] for end in balance([*by_cost], cost[-1], num_stages)]


def _cut_of_owners(graph: Graph, cuts: list[int], owners: Owners, stage: int) -> int:
    """Return the cut before which a graph reads the tensors that stages before ``stage`` have, and no others."""
    nodes = [_tensors_of(graph, node) for node in graph.nodes]
    wanted = {name for names in nodes for name in names if any(own < stage for own in owners.get(name, ()))}
    for cut in cuts:
        if set().union(*nodes[:cut]) & owners.keys() == wanted:
            return cut
    raise UnsupportedError(
        f"stages: expected the tensors of stage {stage} and those before it as `penstock plan` divides them",
        param="stages",
    )


def _tensors_of(graph: Graph, node: Node) -> set[str]:
    weights = (graph.weights[operand.name] for operand in node.inputs if operand.kind == "weight")
    return {part.name for weight in weights for part in weight.parts}


def _cost(graph: Graph, node: Node) -> int:
    """Return the bytes of weights that a node reads for a token; of a table that is one row."""
    if node.op == "embedding":
        return 0
    weights = (graph.weights[operand.name] for operand in node.inputs if operand.kind == "weight")
    return sum(layout_bytes(int(weight.layout), weight.rows, weight.cols) for weight in weights)


def _divides_state(graph: Graph, cut: int) -> bool:
    before, after = (
        {operand.name for node in nodes for operand in node.inputs if operand.kind == "state"}
        for nodes in (graph.nodes[:cut], graph.nodes[cut:])
    )
    return bool(before & after)
