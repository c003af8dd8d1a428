"""The part of a rank of a sharded folder: its graph, and where its parameters lie in the rank's file."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.checkpoint.sources import Source
from penstock.config import show
from penstock.errors import UnsupportedError
from penstock.graph.ir import Graph, Segment
from penstock.graph.metadata import encode_metadata
from penstock.graph.passes.pipeline import cut_rank
from penstock.graph.rank_bundle import WEIGHTS, WHOLE, cuts_columns, rows_by_tensor
from penstock.sharding.folder import STRATEGY, ShardedFolder
from penstock.sharding.parts import local_sources, select_rows
from penstock.sharding.strategy import RowRanges, Strategy

__all__ = ["RankPart", "take_rank"]


@dataclass(frozen=True)
class RankPart:
    """The graph of a rank of a sharded folder, whose weights are made from the rows that the folder has for it.

    ``sources``: where its parameters come from that are not the tensor of their name, within the rank's file.
    ``rows``: the rows of each parameter that the rank has, or ``columns`` of it.
    """

    graph: Graph
    sources: dict[str, tuple[Source, ...]]
    rows: dict[str, RowRanges]
    columns: dict[str, RowRanges]


def take_rank(
    whole: Graph, folder: ShardedFolder, rank: int, sources: Mapping[str, tuple[Source, ...]], computed: Collection[str]
) -> RankPart:
    """Return the part of a rank.  ``sources``: where parameters come from; ``computed``: those of no tensor.

    Raises UnsupportedError, which names a parameter of which the graph needs other rows.
    """
    strategy = folder.strategy
    names = {part.name for weight in whole.weights.values() for part in weight.parts} - set(computed)
    stored = {name: sources[name][0].tensor if name in sources else name for name in names}
    owners = {name: own.stages for name in names if (own := strategy.parameters.get(stored[name])) is not None}
    graph, origins = cut_rank(whole, rank, strategy.layout, owners)
    metadata = encode_metadata(whole, [Segment(WEIGHTS, 0, 0, 0)])
    graph.properties[WHOLE] = hashlib.sha256(metadata + folder.manifest.to_json()).hexdigest()
    local: dict[str, tuple[Source, ...]] = {}
    own_rows: dict[str, RowRanges] = {}
    own_columns: dict[str, RowRanges] = {}
    for weight, part in graph.weights.items():
        origin, ranges = origins[weight]
        if cuts_columns(whole.weights[origin], part):
            name = part.parts[0].name
            own_columns[name] = ranges
            local |= {name: (Source(stored[name]),)} if name in sources else {}
            own = strategy.parameters.get(stored[name])
            if own is not None and (own.cut, own.part_of(rank, strategy.layout)) != ("columns", ranges):
                raise _other_rows(stored[name], name, rank, "columns", ranges)
            continue
        for name, rows in rows_by_tensor(whole.weights[origin], ranges).items():
            own_rows[name] = rows
            if name in computed:
                continue
            if name in sources:
                rank_sources = local_sources(
                    select_rows(sources[name], rows, lambda piece: _num_rows(folder, piece)),
                    lambda tensor: strategy.part_of(tensor, rank) if tensor in strategy.parameters else None,
                    lambda tensor: strategy.parameters[tensor].cut in ("rows", "columns"),
                )
                is_there = rank_sources is not None
                local[name] = rank_sources or ()
            else:
                is_there = _has_rows(strategy, name, rank, rows, is_vector=whole.weights[origin].rows == 1)
            if weight != origin or not is_there:
                raise _other_rows(stored[name], name, rank, "rows", rows)
    return RankPart(graph, local, own_rows, own_columns)


def _other_rows(stored: str, name: str, rank: int, noun: str, ranges: RowRanges) -> UnsupportedError:
    return UnsupportedError(
        f"{STRATEGY}: parameters: {show(stored)}: rank {rank} computes with the {noun} "
        f"{[list(pair) for pair in ranges]} of {show(name)}; expected them, as `penstock plan` writes them",
        param="parameters",
    )


def _num_rows(folder: ShardedFolder, piece: Source) -> int:
    shape = folder.tensors[piece.tensor].shape[0 if piece.index is None else 1 :]
    return shape[1] if piece.transposed or piece.rows_transposed else shape[0]


def _has_rows(strategy: Strategy, name: str, rank: int, rows: RowRanges, *, is_vector: bool) -> bool:
    """Return True if a rank has just these rows of a parameter, of its scales and of its groups."""
    for tensor in (name, f"{name}_scale", f"{name}_groups"):
        own = strategy.parameters.get(tensor)
        if own is None:  # the whole folder lacks it, which another check reports
            continue
        is_row = is_vector and len(own.shape) == 2  # a matrix of one row
        if own.part_of(rank, strategy.layout) != (((0, 1),) if is_row else rows):
            return False
    return True
