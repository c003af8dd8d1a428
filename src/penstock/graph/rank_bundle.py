"""Write the bundle of one rank: its graph, and its rows of the weights of a whole bundle, as they are packed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.core.metadata import read_metadata
from penstock.core.native import Model
from penstock.graph.bundle import BundleWriter
from penstock.graph.ir import Graph, Layout, Weight
from penstock.graph.metadata import decode_metadata
from penstock.graph.passes.cut import TILE_ROWS
from penstock.graph.passes.shard import RowRanges, shard

__all__ = ["take_rows", "widest_exchange", "write_rank_bundle"]

_WEIGHTS = "weights"
_ROW_MAJOR = (Layout.ROWS_F32, Layout.ROWS_F16, Layout.ROWS_BF16, Layout.ROWS_I32)


def write_rank_bundle(
    source: str | os.PathLike[str], out: str | os.PathLike[str], rank: int, world: int, *, durable: bool = True
) -> str:
    """Write the bundle ``out`` of rank ``rank`` of ``world``.  Rank 0 has the files beside the weights, too.

    Returns what ranks compare to know that they have cut the same file: the checksums that it has of its segments.

    Raises InvalidArgumentError for more ranks than the network has heads, and InvalidFileError when the source is
    replaced meanwhile.
    """
    with Model.open(source) as model:
        metadata = read_metadata(source, model.stamp)
        whole, segments = decode_metadata(metadata)
        graph, sources = shard(whole, rank, world)
        names = [segment.name for segment in segments if segment.name != _WEIGHTS] if rank == 0 else []
        files = {name: bytes(model.segment(name) or b"") for name in names}
        data = np.frombuffer(model.segment(_WEIGHTS) or b"", np.uint8)
        with BundleWriter(Path(out), graph, files, durable=durable) as writer:
            for name in graph.weights:
                source_name, ranges = sources[name]
                weight = whole.weights[source_name]
                stored = data[weight.offset : weight.offset + weight.num_bytes]
                writer.add_weight(name, take_rows(weight, stored, ranges))
        return hashlib.sha256(metadata).hexdigest()


def widest_exchange(graph: Graph, world: int) -> int:
    """Return the greatest number of float32 that a rank sends per token in one exchange."""
    widths = [1]
    for rank in range(world):
        cut, _ = shard(graph, rank, world)
        for node in cut.nodes:
            if node.op in ("all_gather", "sharded_embedding"):
                value = node.inputs[0].name if node.op == "all_gather" else node.outputs[0]
                widths.append(cut.values[value].shape[1].offset)
    return max(widths)


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
    lanes = data.reshape(num_tiles, -1, TILE_ROWS, num_bytes)
    index = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    out = np.zeros((-(-len(index) // TILE_ROWS), lanes.shape[1], TILE_ROWS, num_bytes), np.uint8)
    target = np.arange(len(index))
    out[target // TILE_ROWS, :, target % TILE_ROWS] = lanes[index // TILE_ROWS, :, index % TILE_ROWS]
    return out.reshape(-1)


def _are_whole_tiles(weight: Weight, ranges: RowRanges) -> bool:
    """Return True if each range begins at a tile, and ends at one or with the weight as the last range."""
    for i, (start, stop) in enumerate(ranges):
        ends_tile = stop % TILE_ROWS == 0 or (stop == weight.rows and i == len(ranges) - 1)
        if start % TILE_ROWS or not ends_tile:
            return False
    return True
