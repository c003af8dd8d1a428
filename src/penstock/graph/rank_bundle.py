"""Write the bundle of one rank: its graph, and its rows of the weights of a whole bundle, as they are packed."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.core.layouts import BLOCKS, PARTITION_PAGES, pages_for
from penstock.core.metadata import read_metadata
from penstock.core.native import Model
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import BundleWriter
from penstock.graph.ir import Graph, Layout, Node, Weight
from penstock.graph.metadata import decode_metadata
from penstock.graph.passes.cut import TILE_ROWS
from penstock.graph.passes.pipeline import cut_rank
from penstock.graph.passes.round_exchanges import round_exchanges

if TYPE_CHECKING:  # a rank's process starts sooner without the modules of checkpoints
    from penstock.sharding.strategy import RowRanges

__all__ = [
    "WEIGHTS", "WHOLE", "cuts_columns", "partials_bytes", "repeated_kv_bytes", "rows_by_tensor", "take_rows",
    "widest_exchange", "widest_partials", "write_rank_bundle",
]  # fmt: skip

WEIGHTS = "weights"
"""The segment of a bundle that has its weights."""
WHOLE = "whole"
"""The property of a rank's graph with the checksum of what was cut, which all ranks have in common."""

_MAX_BLOCKS, _BLOCK_BYTES = 4, 4 << 20
_BY_ROW = (Layout.T16_MXFP4, Layout.T16_NVFP4, Layout.T16_TQ2_0, Layout.T16_TQ1_0)
_TWO_LINES_OF_HALVES = (Layout.T16_UINT4, Layout.T16_Q4_1, Layout.T16_Q5_1)
_ROW_MAJOR = (Layout.ROWS_F32, Layout.ROWS_F16, Layout.ROWS_BF16, Layout.ROWS_I32)


def write_rank_bundle(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    rank: int,
    layout: RankLayout | int,
    *,
    durable: bool = True,
    rounded: bool = False,
) -> str:
    """Write the bundle ``out`` of one rank.  Rank 0 has the files beside the weights, too.

    ``layout``: of all ranks; a number is that of ranks of tensor parallelism.  ``rounded``: ranks send activations as
    integers where only linears with integer activations read them.

    Returns what ranks compare to know that they have cut the same file: the checksums that it has of its segments.

    Raises InvalidArgumentError for more ranks than the network has heads, and where ``rounded`` applies to no exchange,
    and InvalidFileError when the source is replaced meanwhile.
    """
    with Model.open(source) as model:
        metadata = read_metadata(source, model.stamp)
        checksum = hashlib.sha256(metadata).hexdigest()
        whole, segments = decode_metadata(metadata)
        graph, sources = cut_rank(whole, rank, RankLayout(layout) if isinstance(layout, int) else layout)
        if rounded:
            checksum = hashlib.sha256(f"{checksum} rounded".encode()).hexdigest()
            is_coordinator = rank == 0 and "stages" in graph.properties
            if round_exchanges(graph) == 0 and not is_coordinator:
                raise InvalidArgumentError(
                    "rounded: expected ranks of tensor parallelism and a scheme with integer activations, as w8a8, "
                    f"got {whole.scheme}, of which no exchange can be rounded",
                    param="rounded",
                )
        graph.properties[WHOLE] = checksum
        names = [segment.name for segment in segments if segment.name != WEIGHTS] if rank == 0 else []
        files = {name: bytes(model.segment(name) or b"") for name in names}
        data = np.frombuffer(model.segment(WEIGHTS) or b"", np.uint8)
        with BundleWriter(Path(out), graph, files, durable=durable) as writer:
            for name in graph.weights:
                source_name, ranges = sources[name]
                weight = whole.weights[source_name]
                stored = data[weight.offset : weight.offset + weight.num_bytes]
                if cuts_columns(weight, graph.weights[name]):
                    matrix = stored.reshape(weight.rows, weight.cols, -1)
                    own = np.concatenate([matrix[:, start:stop] for start, stop in ranges], axis=1).reshape(-1)
                else:
                    own = take_rows(weight, stored, ranges)
                writer.add_weight(name, own)
        return checksum


def cuts_columns(whole: Weight, part: Weight) -> bool:
    """Return True if a rank's part of a weight has columns of it: the biases of experts, a row for each."""
    return whole.rows > 1 and part.cols != whole.cols


def rows_by_tensor(weight: Weight, ranges: RowRanges) -> dict[str, RowRanges]:
    """Return the rows of each checkpoint tensor within rows of a weight; of a vector the elements."""
    rows_of: dict[str, list[tuple[int, int]]] = {}
    for part in weight.parts:
        size = weight.cols if weight.rows == 1 and len(weight.parts) == 1 else part.num_rows
        for start, stop in ranges:
            first, last = max(start, part.row_start), min(stop, part.row_start + size)
            if first < last:
                rows_of.setdefault(part.name, []).append((first - part.row_start, last - part.row_start))
    return {name: tuple(rows) for name, rows in rows_of.items()}


def widest_exchange(graphs: Iterable[Graph]) -> int:
    """Return the greatest number of float32 that a rank sends per token in one exchange; ``graphs`` of all ranks."""
    widths = [1]
    for graph in graphs:
        for node in graph.nodes:
            if node.op in ("all_gather", "all_gather_rounded", "sharded_embedding"):
                value = node.outputs[0] if node.op == "sharded_embedding" else node.inputs[0].name
                widths.append(math.prod(dim.offset for dim in graph.values[value].shape[1:]))
    return max(widths)


def widest_partials(graphs: Iterable[Graph], max_tokens: int) -> int:
    """Return the most bytes that a rank sends at once of the results of its partitions (context_attention).

    ``graphs``: of all ranks.

    Tokens go in at most ``_MAX_BLOCKS`` blocks, of ``_BLOCK_BYTES`` where that is enough: as in
    core/src/exchange/context_attention.cpp, which refuses a transport with less.
    """
    widest = 0
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "context_attention":
                num_parts = -(-pages_for(graph.context_len) // PARTITION_PAGES)
                token_bytes = partials_bytes(graph, node) * -(-num_parts // int(node.attrs["world"]))
                block = -(-max_tokens // _MAX_BLOCKS) * token_bytes
                widest = max(widest, block, min(_BLOCK_BYTES, max_tokens * token_bytes))
    return widest


def partials_bytes(graph: Graph, attention: Node) -> int:
    """Return the bytes of the results of one partition for one token (context_attention)."""
    head_dim = graph.states[attention.inputs[1].name].head_dim
    num_heads = math.prod(dim.offset for dim in graph.values[attention.inputs[0].name].shape[1:]) // head_dim
    return num_heads * 4 * (16 + -(-head_dim // 16) * 16)


def repeated_kv_bytes(whole: Graph, graphs: Sequence[Graph], layout: RankLayout, kv_bytes: Sequence[int]) -> int:
    """Return the bytes of ``kv_bytes`` for keys and values of heads that another rank has, too; ``graphs``: by rank."""
    repeated = 0.0
    for stage in range(layout.pp):
        ranks = [layout.rank_of(stage, place) for place in range(layout.stage_ranks)]
        num_heads = sum(own.num_kv_heads for rank in ranks for own in graphs[rank].states.values()) / layout.cp
        needed = sum(whole.states[name].num_kv_heads for name in graphs[ranks[0]].states)
        if num_heads > needed:
            repeated += (1 - needed / num_heads) * sum(kv_bytes[rank] for rank in ranks)
    return round(repeated)


def take_rows(weight: Weight, data: npt.NDArray[np.uint8], ranges: RowRanges) -> npt.NDArray[np.uint8]:
    """Return the bytes of a weight that has only the rows ``ranges`` of ``weight``; of a vector the elements.

    Tiles of 16 rows are copied whole where the ranges allow it; otherwise rows are put together to new tiles.
    """
    if weight.rows == 1 or weight.layout in _ROW_MAJOR:
        num_units = weight.cols if weight.rows == 1 else weight.rows
        rows = data.reshape(num_units, -1)
        return np.concatenate([rows[start:stop] for start, stop in ranges]).reshape(-1)
    num_tiles = -(-weight.rows // TILE_ROWS)
    if _are_whole_tiles(weight, ranges):
        tiles = data.reshape(num_tiles, -1)
        pieces = [tiles[start // TILE_ROWS : -(-stop // TILE_ROWS)] for start, stop in ranges]
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).reshape(-1)
    # A tile is a sequence of 16 numbers, one of each row: 2 bytes in f16, otherwise 4 bytes (as two bf16 or four int8).
    num_bytes = 2 if weight.layout is Layout.T16_F16 else 4
    lanes = _scales_by_row(weight, data).reshape(num_tiles, -1, TILE_ROWS, num_bytes)
    index = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    out = np.zeros((-(-len(index) // TILE_ROWS), lanes.shape[1], TILE_ROWS, num_bytes), np.uint8)
    target = np.arange(len(index))
    out[target // TILE_ROWS, :, target % TILE_ROWS] = lanes[index // TILE_ROWS, :, index % TILE_ROWS]
    return _scales_by_row(weight, out.reshape(-1), back=True)


def _scales_by_row(weight: Weight, data: npt.NDArray[np.uint8], *, back: bool = False) -> npt.NDArray[np.uint8]:
    """Return tiles whose lines of scales have 4 bytes of each row, as other lines have; ``back`` is the inverse.

    In tiles of blocks such a line has the first f16 of all rows, then the second.  The exponents of MXFP4 lie by row as
    they are, and so do float32 scales, zero points and scales of one byte.
    """
    if weight.layout not in BLOCKS or weight.layout in _BY_ROW:
        return data
    line_bytes = 4 * TILE_ROWS
    lines = data.reshape(-1, BLOCKS[weight.layout].tile_lines, line_bytes).copy()
    shape = (TILE_ROWS, 2, 2) if back else (2, TILE_ROWS, 2)
    for line in range(2 if weight.layout in _TWO_LINES_OF_HALVES else 1):
        lines[:, line] = lines[:, line].reshape(-1, *shape).swapaxes(1, 2).reshape(-1, line_bytes)
    return lines.reshape(-1)


def _are_whole_tiles(weight: Weight, ranges: RowRanges) -> bool:
    """Return True if each range begins at a tile, and ends at one or with the weight as the last range."""
    for i, (start, stop) in enumerate(ranges):
        ends_tile = stop % TILE_ROWS == 0 or (stop == weight.rows and i == len(ranges) - 1)
        if start % TILE_ROWS or not ends_tile:
            return False
    return True
