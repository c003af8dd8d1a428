"""Cut a graph for one rank: each linear by its output rows, attention by heads, the token table by its rows.

No sum is divided, so any number of ranks computes the bits of one (docs/explanation/ranks.md).  A rank continues with
its own columns as long as ops work column by column, or head by head; ``all_gather`` puts whole rows together where an
op needs them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from penstock.config import check_integer
from penstock.core.comm import MAX_RANKS
from penstock.errors import UnsupportedError
from penstock.graph.ir import Dim, DType, Graph, Node, Operand, Part, Value, Weight
from penstock.graph.passes.cut import Cut, cut_evenly, cut_heads
from penstock.graph.passes.rewrite import drop_dead_code, is_router, order_values
from penstock.graph.passes.scans import SCANS, ScanCut, cut_scan
from penstock.ops.table import EXCHANGES

__all__ = ["RowRanges", "shard"]

RowRanges = tuple[tuple[int, int], ...]
"""The rows of a whole weight that a rank has, in order; of a vector the elements, of experts' biases the columns."""

_BY_COLUMN = ("gelu", "silu_mul", "add", "mul", "scale", "softcap", "sigmoid_mul", "relu", "clamp", "elu")
_BY_HEAD = ("rope", "rms_norm", "layer_norm")
_BY_PAIR = "clamped_swiglu"
"""Makes one column of two."""
_ATTENTIONS = ("attention", "sink_attention")
"""Are cut by heads.  Only the first one is cut by contexts."""


@dataclass(frozen=True)
class _Piece:
    """Columns ``start`` to ``stop`` of the rows that a node makes: those that one view shows."""

    root: str
    start: int
    stop: int


def shard(graph: Graph, rank: int, world: int, *, contexts: int = 1) -> tuple[Graph, dict[str, tuple[str, RowRanges]]]:
    """Return the graph of one rank, and for each of its weights the whole one's name and the rows that it has.

    The order of exchanges is equal on all ranks.  ``contexts``: of so many ranks, one after another, each has some
    partitions of every context, for the same heads: all of them if ``world`` is ``contexts``.  An op that needs the
    pages of all positions is then whole on each rank, and so are its pages.  Raises
    InvalidArgumentError (``tensor_parallel_size``) for more ranks than heads, and UnsupportedError for a graph that is
    cut already.
    """
    context = contexts > 1
    name = "context_parallel_size" if context else "tensor_parallel_size"
    check_integer(name, world, 1, MAX_RANKS)
    if any(node.op in EXCHANGES and node.op not in ("send", "recv") for node in graph.nodes):
        raise UnsupportedError(f"{name}: expected a bundle of the whole network, got one of a rank")
    if any(node.op in ("relative_attention", "disentangled_attention") for node in graph.nodes):
        raise UnsupportedError(
            f"{name}: expected 1 for a network with a prefix or biases by distance, which are not cut", param=name
        )
    sharder = _Sharder(graph.copy(), rank, world, contexts)
    return sharder.run(), sharder.sources


class _Sharder:
    def __init__(self, graph: Graph, rank: int, world: int, contexts: int) -> None:
        self.whole, self.rank, self.world, self.contexts = graph, rank, world, contexts
        self.attends = {node.inputs[1].name: node for node in graph.nodes if node.op in _ATTENTIONS}
        self.whole_groups = _whole_groups(graph) if contexts > 1 else set()
        self.views: dict[str, list[Value]] = {}
        for value in graph.values.values():
            self.views.setdefault(value.base or value.name, []).append(value)
        self.wanted: dict[_Piece, Cut] = {}
        self.cuts: dict[_Piece, Cut] = {}  # of the pieces that each rank has a part of
        self.local_start: dict[_Piece, int] = {}  # where a piece's part begins in the rank's rows
        self.gathered: dict[_Piece, str] = {}
        self.scans: dict[str, ScanCut] = {}  # by result
        self.sections: dict[_Piece, list[_Piece]] = {}  # of the channels that they read
        self.sources: dict[str, tuple[str, RowRanges]] = {}
        self.graph = dataclasses.replace(graph, values={}, weights={}, states={}, nodes=[])

    def run(self) -> Graph:
        self._plan_scans()
        made = self._follow_scans()
        for node in reversed(self.whole.nodes):
            self._want(node, made)
        if any(None in map(self._cut_of, self._pieces(piece.root)) for piece in self.sections):
            self.scans, self.sections = {}, {}  # their linears are whole
        for name in self.whole.inputs:
            self.graph.values[name] = self.whole.values[name]
        for node in self.whole.nodes:
            self._add(node)
        self.graph.output = self._whole(self.whole.output)
        self.graph.properties = {**self.whole.properties, "rank": str(self.rank), "world": str(self.world)}
        if self.contexts > 1:
            self.graph.properties["context_world"] = str(self.contexts)
        drop_dead_code(self.graph)
        order_values(self.graph)
        return self.graph

    def _piece(self, name: str) -> _Piece:
        value = self.whole.values[name]
        return _Piece(value.base or name, value.offset, value.offset + _row_elements(value))

    def _pieces(self, root: str) -> list[_Piece]:
        """Return the pieces of a node's output, which cover its rows; the whole rows if views overlap or leave gaps."""
        used = {operand.name for node in self.whole.nodes for operand in node.inputs} | {self.whole.output}
        pieces = sorted(
            {self._piece(view.name) for view in self.views[root] if view.name in used}, key=lambda piece: piece.start
        )
        end = 0
        for piece in pieces:
            if piece.start != end:
                break
            end = piece.stop
        if pieces and end == _row_elements(self.whole.values[root]) == pieces[-1].stop:
            return [part for piece in pieces for part in self.sections.get(piece, [piece])]
        return [self._piece(root)]

    # What ops would like to get

    def _plan_scans(self) -> None:
        """Cut the ops with recurrent states by heads: all of them, or none, because states of a group are alike."""
        scans = [node for node in self.whole.nodes if node.op in SCANS]
        cuts = [cut_scan(self.whole, node, self.world) for node in scans]
        if self.contexts > 1 or None in cuts or not all(self._reads_own_linear(node) for node in scans):
            return
        for node, cut in zip(scans, cuts, strict=True):
            if cut is not None:
                channels = self._piece(node.inputs[0].name)
                self.scans[node.outputs[0]], self.sections[channels] = cut, []
                for first, part in cut.sections:
                    start = channels.start + first
                    piece = _Piece(channels.root, start, start + part.ranges[-1][1])
                    self.sections[channels].append(piece)
                    self.wanted[piece] = part

    def _reads_own_linear(self, scan: Node) -> bool:
        """Return True if the channels come from a linear that is cut, and no other op reads them."""
        channels = self._piece(scan.inputs[0].name)
        readers = 0
        for node in self.whole.nodes:
            pieces = [self._piece(operand.name) for operand in node.inputs if operand.kind == "value"]
            readers += sum(
                piece.root == channels.root and piece.start < channels.stop and channels.start < piece.stop
                for piece in pieces
            )
        maker = next((node for node in self.whole.nodes if channels.root in node.outputs), None)
        is_cut = maker is not None and maker.op == "linear" and not is_router(self.whole, maker)
        return readers == 1 and is_cut and self.whole.output != channels.root

    def _follow_scans(self) -> dict[_Piece, Cut]:
        """Return the cuts in which columns are that are made of the results of such ops, column by column."""
        made: dict[_Piece, Cut] = {}
        for node in self.whole.nodes:
            if node.outputs and node.outputs[0] in self.scans:
                made[self._piece(node.outputs[0])] = self.scans[node.outputs[0]].out
            elif self._goes_by_parts(node):
                values = node.inputs if node.op in _BY_COLUMN else node.inputs[:1]
                cut = next((made[piece] for value in values if (piece := self._piece(value.name)) in made), None)
                unit = 1 if node.op in _BY_COLUMN else _unit(self.whole.values[node.inputs[0].name])
                if cut is not None and not any(end % unit for end in cut.ends):
                    made[self._piece(node.outputs[0])] = cut
        return made

    def _want(self, node: Node, made: dict[_Piece, Cut]) -> None:
        """Note the cuts in which a node works without whole rows; nodes are visited from the last to the first."""
        if node.op in (*_ATTENTIONS, "kv_append") and (self.contexts > 1 or not self._goes_by_heads(node)):
            return
        if node.op in SCANS and node.outputs[0] in self.scans:
            for operand in node.inputs[1 : SCANS[node.op][0]]:
                self.wanted.setdefault(self._piece(operand.name), self.scans[node.outputs[0]].heads)
        elif node.op in _ATTENTIONS:
            heads, _ = self._heads(node)
            self.wanted.setdefault(self._piece(node.inputs[0].name), heads)
        elif node.op == "kv_append":
            _, kv_heads = self._heads(self._attention_of(node))
            for operand in node.inputs[:2]:
                self.wanted.setdefault(self._piece(operand.name), kv_heads)
        elif self._goes_by_parts(node) or node.op == _BY_PAIR:
            own = self._piece(node.outputs[0])
            cut = made.get(own) or self.wanted.get(own) or self._default_cut(own.root)
            if cut is not None:
                cut = cut.times(2) if node.op == _BY_PAIR else cut
                for operand in node.inputs if node.op in _BY_COLUMN else node.inputs[:1]:
                    self.wanted.setdefault(self._piece(operand.name), cut)

    def _goes_by_parts(self, node: Node) -> bool:
        rank = len(self.whole.values[node.inputs[0].name].shape) if node.inputs[0].kind == "value" else 0
        return node.op in _BY_COLUMN or (node.op in _BY_HEAD and rank == 3)

    def _goes_by_heads(self, node: Node) -> bool:
        """Return True for attention and for what it reads; a convolution has its whole state on every rank."""
        if self.contexts == self.world > 1:
            return False
        place = {"kv_append": 2}.get(node.op, 1 if node.op in _ATTENTIONS else None)
        if place is None or node.inputs[place].name not in self.attends:
            return False
        return self.whole.states[node.inputs[place].name].group not in self.whole_groups

    def _attention_of(self, append: Node) -> Node:
        return self.attends[append.inputs[2].name]

    def _heads(self, attention: Node) -> tuple[Cut, Cut]:
        """Return the cuts of the columns of queries, and of keys and values: the ranks of a context have the same."""
        state = self.whole.states[attention.inputs[1].name]
        num_heads = _row_elements(self.whole.values[attention.inputs[0].name]) // state.head_dim
        num_cuts = self.world // self.contexts
        heads, kv_heads = cut_heads(num_heads, state.num_kv_heads, num_cuts)
        if self.contexts > 1 and len({heads.size(i) for i in range(num_cuts)}) > 1:
            raise UnsupportedError(
                f"tensor_parallel_size: expected ranks with equally many of {num_heads} attention heads and "
                f"{state.num_kv_heads} key-value heads with context_parallel_size {self.contexts}, got {num_cuts}",
                param="tensor_parallel_size",
            )
        heads, kv_heads = heads.times(state.head_dim), kv_heads.times(state.head_dim)
        return heads.repeated(self.contexts), kv_heads.repeated(self.contexts)

    def _default_cut(self, name: str) -> Cut | None:
        value = self.whole.values[name]
        return cut_evenly(_row_elements(value), self.world, _unit(value))

    # The rank's graph

    def _new_value(self, name: str, shape: tuple[Dim, ...], base: str | None = None, offset: int = 0) -> str:
        self.graph.values.setdefault(name, Value(name, DType.F32, shape, base, offset))
        return name

    def _whole(self, name: str) -> str:
        """Return the name of a value that has all columns of ``name``."""
        piece, value = self._piece(name), self.whole.values[name]
        containing = self._containing(piece)
        if containing is None:  # every rank has computed all of it
            if name not in self.graph.values:
                self.graph.values[name] = value
            return name
        if containing not in self.gathered:
            self._gather(containing)
        gathered, offset = self.gathered[containing], piece.start - containing.start
        if offset == 0 and value.shape == self.graph.values[gathered].shape:
            return gathered
        return self._new_value(f"{name}:whole", value.shape, gathered, offset)

    def _containing(self, piece: _Piece) -> _Piece | None:
        """Return the piece with a cut that contains ``piece``."""
        if piece in self.cuts:
            return piece
        for other in self.cuts:
            if other.root == piece.root and other.start <= piece.start and piece.stop <= other.stop:
                return other
        return None

    def _gather(self, piece: _Piece) -> None:
        cut = self.cuts[piece]
        if not cut.is_partition:
            raise UnsupportedError(
                f"tensor_parallel_size: {piece.root}: an op needs key-value heads that several ranks have",
                param="tensor_parallel_size",
            )
        rows = self.graph.values[piece.root].shape[0]
        shape = _shape_of_slots(rows, cut.slots, cut.size(self.rank))
        name = piece.root
        if self.graph.values[name].shape != shape:
            name = self._new_value(f"{piece.root}:{piece.start}:part", shape, piece.root, self.local_start[piece])
        result = f"{piece.root}:{piece.start}:gathered"
        self._new_value(result, _shape_of_slots(rows, cut.slots, piece.stop - piece.start))
        attrs: dict[str, int | float | str] = {"starts": cut.starts, "rank": self.rank}
        self.graph.nodes.append(Node("all_gather", result, [Operand("value", name)], [result], attrs))
        self.gathered[piece] = result

    def _part(self, name: str, cut: Cut) -> str:
        """Return the name of a value that has this rank's columns of ``name``."""
        piece, value = self._piece(name), self.whole.values[name]
        shape = _resize(value, cut, self.rank)
        if self.cuts.get(piece) == cut:
            root = self.graph.values[piece.root]
            if value.base is None and root.shape == shape:
                return name
            return self._new_value(f"{name}:part", shape, piece.root, self.local_start[piece])
        whole = self.graph.values[self._whole(name)]
        base, offset = whole.base or whole.name, whole.offset + cut.ranges[self.rank][0]
        return self._new_value(f"{name}:slice", shape, base, offset)

    def _add(self, node: Node) -> None:
        if node.op == "linear":
            self._add_linear(node)
        elif node.op == "embedding" and node.inputs[0].name == self.whole.inputs[0]:
            self._add_embedding(node)
        elif node.op == "attention" and self.contexts == self.world > 1:
            self._add_whole(self._over_contexts(node))
        elif self._goes_by_heads(node):
            self._add_attention(node)
        elif node.op in SCANS and node.outputs[0] in self.scans:
            self._add_scan(node, self.scans[node.outputs[0]])
        elif node.op == "expert_linear" and (cut := self._cut_of_experts(node)) is not None:
            self._add_experts(node, cut)
        elif node.op == "combine" and (cut := self._cut_of_slots(node.inputs[0].name)) is not None:
            inputs = [self._part(node.inputs[0].name, cut), self._whole(node.inputs[1].name)]
            self._add_part_output(node.outputs[0], Cut(cut.ranges))
            self.graph.nodes.append(dataclasses.replace(node, inputs=[Operand("value", name) for name in inputs]))
        elif node.op == _BY_PAIR and (cut := self._cut_of_pairs(node)) is not None:
            inputs = [self._part(node.inputs[0].name, cut.times(2))]
            self._add_part_output(node.outputs[0], cut)
            self.graph.nodes.append(dataclasses.replace(node, inputs=[Operand("value", name) for name in inputs]))
        elif self._goes_by_parts(node) and (cut := self._common_cut(node)) is not None:
            self._add_by_parts(node, cut)
        else:
            self._add_whole(node)

    def _over_contexts(self, attention: Node) -> Node:
        if self.contexts == 1 or self.whole.states[attention.inputs[1].name].group in self.whole_groups:
            return attention
        attrs = {**attention.attrs, "world": self.contexts, "rank": self.rank % self.contexts}
        return dataclasses.replace(attention, op="context_attention", attrs=attrs)

    def _add_whole(self, node: Node) -> None:
        inputs = [Operand("value", self._whole(o.name)) if o.kind == "value" else self._keep(o) for o in node.inputs]
        for name in node.outputs:
            self.graph.values[name] = self.whole.values[name]
        self.graph.nodes.append(dataclasses.replace(node, inputs=inputs))

    def _keep(self, operand: Operand) -> Operand:
        """Return a weight, with all of its rows, or a state."""
        if operand.kind == "weight":
            weight = self.whole.weights[operand.name]
            return self._weight(operand.name, ((0, weight.cols if weight.rows == 1 else weight.rows),))
        if operand.kind == "state":
            self.graph.states[operand.name] = self.whole.states[operand.name]
        return operand

    def _weight(self, name: str, ranges: RowRanges, *, columns: bool = False) -> Operand:
        """Return the operand of the rank's rows, or columns, of a weight; another use of it may have others."""
        whole, own = self.whole.weights[name], name
        if own in self.sources and self.sources[own][1] != ranges:
            own = f"{name}:{'|'.join(f'{start}-{stop}' for start, stop in ranges)}"
        if own not in self.sources:
            self.sources[own] = name, ranges
            size = sum(stop - start for start, stop in ranges)
            columns = columns or whole.rows == 1
            is_kept = columns and whole.rows > 1  # each part has its rows
            parts = () if own != name else whole.parts if is_kept else _cut_parts(whole, ranges)
            rows, cols = (whole.rows, size) if columns else (size, whole.cols)
            self.graph.weights[own] = Weight(own, rows, cols, whole.layout, parts)
        return Operand("weight", own)

    def _add_linear(self, node: Node) -> None:
        root = node.outputs[0]
        value, ranges, end = self.whole.values[root], [], 0
        cuts = {piece: self._cut_of(piece) for piece in self._pieces(root)}
        x = Operand("value", self._whole(node.inputs[0].name))
        is_short = self.whole.weights[node.inputs[1].name].rows == 1 or is_router(self.whole, node)
        if is_short or None in cuts.values():  # an exchange would take longer than the rows
            return self._add_whole(node)
        for piece, cut in cuts.items():
            if cut is not None:
                self.cuts[piece], self.local_start[piece] = cut, end
                start, stop = cut.ranges[self.rank]
                ranges.append((piece.start + start, piece.start + stop))
                end += stop - start
        weight, bias = node.inputs[1], node.inputs[2]
        inputs = [x, self._weight(weight.name, tuple(ranges)), bias]
        if bias.kind == "weight":
            inputs[2] = self._weight(bias.name, tuple(ranges))
        self._new_value(root, (value.shape[0], Dim(None, 0, end)))
        self.graph.nodes.append(Node("linear", node.name, inputs, [root], {**node.attrs, "out_features": end}))
        return None

    def _cut_of_experts(self, experts: Node) -> Cut | None:
        """Return the cut of the rows of each expert, and so of the columns of each slot of their results."""
        name = experts.outputs[0]
        readers = [node for node in self.whole.nodes if node.op == _BY_PAIR]
        in_pairs = any(self._piece(node.inputs[0].name).root == name for node in readers)
        cut = cut_evenly(int(experts.attrs["out_features"]), self.world, 2 if in_pairs else 1)
        return None if cut is None else Cut(cut.ranges, self.whole.values[name].shape[1].offset)

    def _cut_of_slots(self, name: str) -> Cut | None:
        """Return the cut of a value [T, slots, columns] whose columns are cut, the same in each slot."""
        cut = self.cuts.get(self._piece(name))
        return cut if cut is not None and _has_slots(self.whole.values[name], cut) else None

    def _cut_of_pairs(self, node: Node) -> Cut | None:
        """Return the cut of the columns that a node makes of pairs of columns."""
        cut = self.cuts.get(self._piece(node.inputs[0].name))
        return None if cut is None else cut.divided(2)

    def _add_experts(self, node: Node, cut: Cut) -> None:
        rows, (start, stop) = int(node.attrs["out_features"]), cut.ranges[self.rank]
        first = range(0, rows * int(node.attrs["num_experts"]), rows)
        weight = self._weight(node.inputs[1].name, tuple((at + start, at + stop) for at in first))
        x, ids = (Operand("value", self._whole(node.inputs[i].name)) for i in (0, 2))
        bias = node.inputs[3]
        if bias.kind == "weight" and stop - start == rows:
            bias = self._keep(bias)
        elif bias.kind == "weight":  # a row for each expert
            bias = self._weight(bias.name, ((start, stop),), columns=True)
        self._add_part_output(node.outputs[0], cut)
        attrs = {**node.attrs, "out_features": stop - start}
        self.graph.nodes.append(dataclasses.replace(node, inputs=[x, weight, ids, bias], attrs=attrs))

    def _cut_of(self, piece: _Piece) -> Cut | None:
        wanted = self.wanted.get(piece)
        if wanted is not None:
            return wanted
        views = [view for view in self.views[piece.root] if self._piece(view.name) == piece]
        unit = max((_unit(view) for view in views), default=1)
        return cut_evenly(piece.stop - piece.start, self.world, unit)

    def _add_embedding(self, node: Node) -> None:
        weight = self.whole.weights[node.inputs[1].name]
        cut = cut_evenly(weight.rows, self.world)
        if cut is None:
            return self._add_whole(node)
        inputs = [node.inputs[0], self._weight(weight.name, (cut.ranges[self.rank],))]
        self.graph.values[node.outputs[0]] = self.whole.values[node.outputs[0]]
        attrs = {**node.attrs, "starts": cut.starts, "rank": self.rank}
        self.graph.nodes.append(Node("sharded_embedding", node.name, inputs, node.outputs, attrs))
        return None

    def _common_cut(self, node: Node) -> Cut | None:
        """Return the cut in which all inputs of a node are, and which divides no head of them."""
        values = node.inputs if node.op in _BY_COLUMN else node.inputs[:1]
        cuts = {self.cuts.get(self._piece(operand.name)) for operand in values}
        cut = cuts.pop() if len(cuts) == 1 else None
        if cut is None:
            return None
        shapes = [self.whole.values[operand.name] for operand in values]
        if node.op in _BY_COLUMN and all(len(value.shape) == 2 or _has_slots(value, cut) for value in shapes):
            return cut
        divides = any(end % _unit(value) for value in shapes for end in cut.ends)
        return None if divides or cut.slots > 1 else cut

    def _add_by_parts(self, node: Node, cut: Cut) -> None:
        num_cut = len(node.inputs) if node.op in _BY_COLUMN else 1
        inputs = [Operand("value", self._part(operand.name, cut)) for operand in node.inputs[:num_cut]]
        for operand in node.inputs[num_cut:]:
            is_value = operand.kind == "value"
            inputs.append(
                Operand("value", self._whole(operand.name)) if is_value else self._norm_weight(node, operand, cut)
            )
        self._add_part_output(node.outputs[0], cut)
        self.graph.nodes.append(dataclasses.replace(node, inputs=inputs))

    def _norm_weight(self, norm: Node, operand: Operand, cut: Cut) -> Operand:
        """Return the weight of a norm: of each head the same numbers, or the rank's of those of all heads."""
        columns = _row_elements(self.whole.values[norm.inputs[0].name])
        weight = self.whole.weights.get(operand.name)
        if weight is None or weight.cols != columns or _unit(self.whole.values[norm.inputs[0].name]) == columns:
            return self._keep(operand)
        return self._weight(operand.name, (cut.ranges[self.rank],))

    def _add_part_output(self, name: str, cut: Cut, shares: Cut | None = None) -> None:
        """Add the columns ``cut`` of a value; of those that several ranks have, each sends its ``shares``."""
        piece, own = self._piece(name), shares or cut
        self.cuts[piece] = own
        self.local_start[piece] = own.ranges[self.rank][0] - cut.ranges[self.rank][0]
        self._new_value(name, _resize(self.whole.values[name], cut, self.rank))

    def _add_scan(self, node: Node, cut: ScanCut) -> None:
        name = node.inputs[0].name
        value, first = self.whole.values[name], self.sections[self._piece(name)][0]
        shape = (value.shape[0], Dim(None, 0, sum(part.size(self.rank) for _, part in cut.sections)))
        if value.base is not None or self.graph.values[name].shape != shape:
            name = self._new_value(f"{name}:part", shape, first.root, self.local_start[first])
        state_place, first_weight = SCANS[node.op]
        gates = [self._part(operand.name, cut.heads) for operand in node.inputs[1:state_place]]
        state = self.whole.states[node.inputs[state_place].name]
        self.graph.states[state.name] = dataclasses.replace(state, num_kv_heads=cut.units.size(self.rank))
        inputs = [*(Operand("value", own) for own in (name, *gates)), *node.inputs[state_place:first_weight]]
        num_channels = cut.sections[-1][0] + cut.sections[-1][1].ranges[-1][1]
        for operand in node.inputs[first_weight:]:
            if operand.kind == "weight":
                weight = self.whole.weights[operand.name]
                is_conv = num_channels in (weight.rows, weight.cols)
                operand = self._weight(
                    operand.name, cut.channels(self.rank) if is_conv else (cut.heads.ranges[self.rank],)
                )
            inputs.append(operand)
        self._add_part_output(node.outputs[0], cut.out)
        attrs = {**node.attrs, **cut.attrs[self.rank]}
        self.graph.nodes.append(dataclasses.replace(node, inputs=inputs, attrs=attrs))

    def _add_attention(self, node: Node) -> None:
        is_append = node.op == "kv_append"
        attention = self._attention_of(node) if is_append else node
        heads, kv_heads = self._heads(attention)
        num_cut = 2 if is_append else 1
        cut = kv_heads if is_append else heads
        inputs = [Operand("value", self._part(operand.name, cut)) for operand in node.inputs[:num_cut]]
        for operand in node.inputs[num_cut:]:
            if operand.kind == "state":
                state = self.whole.states[operand.name]
                num_kv_heads = kv_heads.size(self.rank) // state.head_dim
                self.graph.states[operand.name] = dataclasses.replace(state, num_kv_heads=num_kv_heads)
            elif operand.kind == "weight":  # a slope of ALiBi or a sink per head
                start, stop = heads.ranges[self.rank]
                head_dim = self.whole.states[attention.inputs[1].name].head_dim
                operand = self._weight(operand.name, ((start // head_dim, stop // head_dim),))
            inputs.append(operand)
        if not is_append:
            self._add_part_output(node.outputs[0], heads, heads.shared(self.contexts))
            node = self._over_contexts(node)
        self.graph.nodes.append(dataclasses.replace(node, inputs=inputs))


def _whole_groups(graph: Graph) -> set[int]:
    """Return the page groups that an op reads which needs the pages of all positions."""
    readers = [node for node in graph.nodes if node.op not in ("attention", "kv_append")]
    return {graph.states[own.name].group for node in readers for own in node.inputs if own.kind == "state"}


def _row_elements(value: Value) -> int:
    elements = 1
    for dim in value.shape[1:]:
        elements *= dim.offset if dim.symbol is None else 1
    return elements


def _unit(value: Value) -> int:
    """Return the number of elements of one step along dimension 1."""
    return _row_elements(dataclasses.replace(value, shape=value.shape[1:])) if len(value.shape) > 2 else 1


def _has_slots(value: Value, cut: Cut) -> bool:
    """Return True for a value [T, slots, columns] whose last dimension is the one that ``cut`` divides."""
    return len(value.shape) == 3 and value.shape[1].offset == cut.slots and _unit(value) == cut.ranges[-1][1]


def _shape_of_slots(rows: Dim, slots: int, num_elements: int) -> tuple[Dim, ...]:
    """Return the shape of rows of that many elements, with a dimension for the slots if there are several."""
    columns = Dim(None, 0, num_elements // slots)
    return (rows, columns) if slots == 1 else (rows, Dim(None, 0, slots), columns)


def _resize(value: Value, cut: Cut, rank: int) -> tuple[Dim, ...]:
    """Return the shape of a rank's part of ``value``: dimension 1 changes, or with slots the last one."""
    num_elements = cut.size(rank)
    if len(value.shape) == 2:
        return (value.shape[0], Dim(None, 0, num_elements))
    if _has_slots(value, cut):
        return (*value.shape[:2], Dim(None, 0, num_elements // cut.slots))
    return (value.shape[0], Dim(None, 0, num_elements // _unit(value)), *value.shape[2:])


def _cut_parts(weight: Weight, ranges: RowRanges) -> tuple[Part, ...]:
    """Return the parts of the rows ``ranges`` of a weight, without those that it has none of."""
    if weight.rows == 1 and len(weight.parts) == 1:
        return weight.parts
    parts, end = [], 0
    for part in weight.parts:
        size = sum(
            max(0, min(stop, part.row_start + part.num_rows) - max(start, part.row_start)) for start, stop in ranges
        )
        if size:
            parts.append(Part(part.name, end, size))
            end += size
    if weight.rows == 1 and len(parts) == 1:
        parts = [Part(parts[0].name, 0, 1)]
    return tuple(parts)
