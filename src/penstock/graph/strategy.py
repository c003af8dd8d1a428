"""Make the sharding strategy of a checkpoint: the part of each tensor that each rank computes with.

The rows are those that the passes over the captured graph give each rank (``passes.shard``, ``passes.pipeline``), so
a strategy follows from the layers of the network.  ``tensor_sources`` of the network says which stored tensors they
lie in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from penstock.checkpoint.sources import Source
from penstock.checkpoint.stored.tied_head import find_tied
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import show, show_tensors
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.graph.ir import Graph
from penstock.graph.passes.pipeline import cut_rank
from penstock.graph.rank_bundle import cuts_columns, rows_by_tensor
from penstock.sharding.folder import ShardedFolder
from penstock.sharding.parts import join_rows, select_rows
from penstock.sharding.source import PlainFolder, WholeTensors
from penstock.sharding.strategy import ParameterCut, RowRanges, Strategy, config_checksum

__all__ = ["CapturedModel", "capture_model", "check_parts", "make_strategy"]


@dataclass(frozen=True)
class CapturedModel:
    """A model's graph under ``scheme``, with the layouts of its weights but without their values.

    ``sources``: where the parameters come from that are not the tensor of their name.  ``computed``: names of weights
    that the network computes itself.  ``unread``: tensors that the network does not read.
    """

    model: WholeTensors
    scheme: str
    graph: Graph
    sources: Mapping[str, tuple[Source, ...]]
    computed: frozenset[str]
    unread: frozenset[str]


def capture_model(model: WholeTensors, scheme: str | None = None, network: str | None = None) -> CapturedModel:
    """Capture the network of a model; no weight is read.

    ``scheme``: by default that of the weights.  ``network``: "file.py:Class".  Raises what capture raises.
    """
    chosen = model.choose_scheme(scheme)
    from penstock.checkpoint.folder import stored_dtype
    from penstock.graph.export import build_graph
    from penstock.models.meta import construct_on_meta
    from penstock.models.sources import as_network, check_tensors, schemes_of, sources_of

    built = construct_on_meta(model.config, network)
    section = model.config.quantization()
    dtype = stored_dtype(model.config, model.tensors) if section is None else section.str("dtype")
    sources = sources_of(model.config, model.tensors, built.network)
    if isinstance(model, PlainFolder) and built.script is None:
        check_tensors(as_network(model.checkpoint, built.network), built.network, built.name)
    graph, constants = build_graph(built, chosen, dtype, schemes_of(chosen, model.config, model.tensors, sources))
    unread = model.redundant_names()
    if isinstance(model, PlainFolder):
        unread = as_network(model.checkpoint, built.network).redundant_names(model.tensors)
    patterns = getattr(built.network, "unread_tensors", ())
    unread |= {name for name in model.tensors if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return CapturedModel(model, chosen, graph, sources, frozenset(constants), frozenset(unread))


def make_strategy(captured: CapturedModel, layout: RankLayout | int) -> Strategy:
    """Return the strategy of a model; a number is that of ranks of tensor parallelism.

    An output head that equals its embedding is stored once.  Raises InvalidArgumentError (``tensor_parallel_size``,
    ``pipeline_parallel_size``) for more ranks or stages than the network has heads or layers, UnsupportedError for a
    network that is not cut so, and InvalidFileError, which names a tensor that is missing or has another shape.
    """
    layout = RankLayout(layout) if isinstance(layout, int) else layout
    model, cuts = captured.model, _Cuts(captured, layout)
    embedding, head = find_tied(model.tensors) or ("", "")
    parameters, extra = {}, []
    for name, info in model.tensors.items():
        base = ParameterCut(info.dtype, info.shape, "owner")
        owner = name.removesuffix("_scale").removesuffix("_groups")
        if name in cuts.parts:
            parameters[name] = cuts.parameter(name, base)
        elif owner in cuts.parts and owner != name:
            parameters[name] = cuts.parameter(owner, base)
        elif name in captured.unread and name == head and _is_equal_head(model, name):
            parameters[name] = replace(base, cut="same", name=embedding)
        elif name in captured.unread:
            parameters[name] = base
        else:
            extra.append(name)
    if extra:
        raise InvalidFileError(
            f"{model.config.file}: the checkpoint has {show_tensors(sorted(extra))}, which network "
            f"{captured.graph.network} does not read",
            param=min(extra),
        )
    model_type = model.config.str("model_type", "")
    return Strategy(model_type, config_checksum(model.config), layout, parameters)


def _is_equal_head(model: WholeTensors, name: str) -> bool:
    """Return True for an output head that has the values of its embedding; a network need not read one that differs."""
    if isinstance(model, ShardedFolder):
        return model.strategy.parameters[name].cut == "same"
    return isinstance(model, PlainFolder) and name == model.checkpoint.equal_head


def check_parts(strategy: Strategy, needed: Strategy, mapped: Collection[str] = ()) -> None:
    """Check that each rank of ``strategy`` can run with what it stores.

    ``needed``: the strategy of the same model and layout that ``make_strategy`` returns.  ``mapped``: tensors from
    which a network takes rows; a rank may have more rows of them than it needs.  Raises InvalidArgumentError
    (``strategy``), which names the parameter and its field.
    """
    for name, parameter in strategy.parameters.items():
        other = needed.parameters[name]
        if parameter.cut == "same" or other.cut in ("same", "owner"):  # not stored, or not read
            continue
        for rank in range(strategy.world):
            wrong = _wrong_field(parameter, other, rank, strategy.layout, name in mapped)
            if wrong:
                raise InvalidArgumentError(
                    f"strategy: parameters: {show(name)}: {wrong} (rank {rank}). Use a file of `penstock plan`.",
                    param="strategy",
                )


def _wrong_field(
    parameter: ParameterCut, needed: ParameterCut, rank: int, layout: RankLayout, may_have_more: bool
) -> str:
    """Return which field keeps a rank from running, and what is expected; empty if none does."""
    rows, own = needed.part_of(rank, layout), parameter.part_of(rank, layout)
    if rows is None or (own == rows and parameter.axis == needed.axis):
        return ""
    if own is None and parameter.cut != "owner":
        return f"stages: expected {list(needed.stages)}, got {list(parameter.stages)}"
    is_comparable = own == ((0, parameter.size),) or parameter.axis == needed.axis
    if may_have_more and is_comparable and all(_is_within(row, own or ()) for row in rows):
        return ""
    if parameter.cut != needed.cut:
        return f"cut: expected {show(needed.cut)}, got {show(parameter.cut)}"
    return f"ranges: expected {[list(row) for row in rows]}, got {[list(row) for row in own or ()]}"


def _is_within(row: tuple[int, int], ranges: RowRanges) -> bool:
    return any(start <= row[0] and row[1] <= stop for start, stop in ranges)


class _Cuts:
    """The rows of stored tensors by stage and place; ``parts[tensor][stage, place]``."""

    def __init__(self, captured: CapturedModel, layout: RankLayout) -> None:
        self._captured, self._layout = captured, layout
        self.parts: dict[str, dict[tuple[int, int], list[tuple[int, int]]]] = {}
        self._by_columns: set[str] = set()
        self._whole: set[str] = set()
        for rank in range(layout.world):
            graph, sources = cut_rank(captured.graph, rank, layout)
            for name in graph.weights:
                source, ranges = sources[name]
                if cuts_columns(captured.graph.weights[source], graph.weights[name]):
                    own = captured.graph.weights[source].parts[0].name
                    tensor = captured.sources.get(own, (Source(own),))[0].tensor
                    self._by_columns.add(tensor)
                    self.parts.setdefault(tensor, {}).setdefault(layout.place(rank), []).extend(ranges)
                    continue
                for piece in self._pieces(source, ranges):
                    rows = self.parts.setdefault(piece.tensor, {}).setdefault(layout.place(rank), [])
                    rows += piece.rows
                    is_stacked = piece.index is not None  # rows of a matrix are columns of the stack
                    self._by_columns |= {piece.tensor} if piece.transposed or is_stacked else set()
                    beside = [name for name in (piece.add_row, piece.scales) if name]
                    if piece.add_row or (is_stacked and piece.transposed) or (piece.scales and not is_stacked):
                        self._whole.update([piece.tensor, *beside])
                    self._by_columns |= {piece.scales} if piece.scales else set()
                    for name in beside:
                        self.parts.setdefault(name, {}).setdefault(layout.place(rank), []).extend(piece.rows)

    def _pieces(self, source: str, ranges: RowRanges) -> Iterator[Source]:
        """Yield the stored rows that make up rows of a weight of the graph."""
        weight = self._captured.graph.weights[source]
        for name, rows in rows_by_tensor(weight, ranges).items():
            if name in self._captured.computed:
                continue
            pieces = self._captured.sources.get(name, (Source(name),))
            expected = next(part.num_rows for part in weight.parts if part.name == name)
            if weight.rows == 1 and len(weight.parts) == 1:
                expected = weight.cols
                info = self._info(name, name) if name not in self._captured.sources else None
                if info is not None and len(info.shape) == 2:  # a matrix of one row, whose columns are all needed
                    rows = ((0, 1),)
                    expected = 1
            elif name not in self._captured.sources and self._size_of(pieces[0]) != expected:
                raise InvalidFileError(
                    f"{self._info(name, name).file}: tensor {show(name)}: shape: expected {expected} rows, got "
                    f"{list(self._info(name, name).shape)}",
                    param=name,
                )
            yield from select_rows(pieces, rows, self._size_of)

    def _info(self, tensor: str, parameter: str) -> TensorInfo:
        info = self._captured.model.tensors.get(tensor)
        if info is None:
            raise InvalidFileError(
                f"{self._captured.model.config.file}: the checkpoint lacks {show_tensors([tensor])}, which network "
                f"{self._captured.graph.network} reads",
                param=tensor,
            )
        return info

    def _size_of(self, piece: Source) -> int:
        shape = self._info(piece.tensor, piece.tensor).shape[0 if piece.index is None else 1 :]
        return (shape[1] if piece.transposed or piece.rows_transposed else shape[0]) if shape else 1

    def parameter(self, name: str, base: ParameterCut) -> ParameterCut:
        """Return ``base``, which is the tensor ``name`` or one of its scales, as the former is cut."""
        parts = self.parts[name]
        stages = tuple(sorted({stage for stage, _ in parts}))
        cut = "columns" if name in self._by_columns and len(base.shape) > 1 else "rows"
        own = replace(base, cut=cut, stages=stages)
        places = range(self._layout.stage_ranks)
        ranges = tuple(
            join_rows([row for (_, at), rows in parts.items() if at == place for row in rows]) for place in places
        )
        whole = ((0, own.size),)
        is_cut = (
            name not in self._whole and all(ranges) and join_rows([row for rows in ranges for row in rows]) == whole
        )
        if not is_cut or all(rows == whole for rows in ranges):
            return replace(own, cut="replicated")
        return replace(own, ranges=ranges)
