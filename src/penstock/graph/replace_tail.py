"""Replace the tail of a bundle: token ids instead of logits, made from the file only and without PyTorch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.core.memory import can_map_segments, map_over
from penstock.core.metadata import open_again, read_metadata
from penstock.core.native import Model
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.bundle import BundleWriter
from penstock.graph.metadata import decode_metadata
from penstock.graph.passes.append_tail import append_tail, check_tail

__all__ = ["map_weights", "replace_tail"]

_WEIGHTS = "weights"


def replace_tail(
    source: str | os.PathLike[str], out: str | os.PathLike[str], tail: str, *, without_weights: bool = False
) -> tuple[int, ...]:
    """Write the bundle ``out``: ``source`` with the tail "argmax" or "topk:K".

    The file equals that of an export with this tail, byte for byte.  With ``without_weights`` it has a hole instead of
    weights, which ``map_weights`` fills.  Returns the stamp of the source, which ``map_weights`` needs.  Raises
    InvalidArgumentError for a source that already ends in token ids and for an invalid tail, and InvalidFileError when
    the source is replaced meanwhile.
    """
    check_tail(tail)
    with Model.open(source) as model:
        graph, segments = decode_metadata(read_metadata(source, model.stamp))
        if model.info.tail:
            raise InvalidArgumentError(
                f"{source}: expected a bundle that ends in logits, got {model.info.tail}", param="source"
            )
        append_tail(graph, tail)
        files = {
            segment.name: bytes(data)
            for segment in segments
            if segment.name != _WEIGHTS and (data := model.segment(segment.name)) is not None
        }
        weights = np.frombuffer(model.segment(_WEIGHTS) or b"", np.uint8)
        with BundleWriter(Path(out), graph, files) as writer:
            if without_weights:
                writer.leave_weights(next(segment.crc32 for segment in segments if segment.name == _WEIGHTS))
                return model.stamp
            for weight in graph.weights.values():
                writer.add_weight(weight.name, weights[weight.offset : weight.offset + weight.num_bytes])
        return model.stamp


def map_weights(model: Model, source: str | os.PathLike[str], stamp: Sequence[int]) -> None:
    """Map the weights of the bundle ``source`` into an open bundle without weights, before it runs.

    The weights are not copied: both bundles share the file's pages.  ``stamp`` is the result of ``replace_tail``.
    Raises InvalidFileError when the source was replaced or changed, FileAccessError when the kernel refuses, and
    UnsupportedError when the system's pages are larger than the alignment of segments.
    """
    if not can_map_segments():
        raise UnsupportedError(
            f"{source}: expected a page size of at most 4096 bytes, got {mmap.PAGESIZE}", param="source"
        )
    _, segments = decode_metadata(read_metadata(source, stamp))
    weights_segment = model.segment(_WEIGHTS)
    place = next(segment for segment in segments if segment.name == _WEIGHTS)
    if weights_segment is None or weights_segment.nbytes != place.num_bytes:
        num_bytes = 0 if weights_segment is None else weights_segment.nbytes
        raise InvalidArgumentError(f"{source}: expected {num_bytes} bytes of weights, got {place.num_bytes}")
    with open_again(source, stamp) as file:
        # Segments begin at a page, and the rest of a segment's last page is padding.
        num_bytes = -(-place.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        map_over(np.frombuffer(weights_segment, np.uint8).ctypes.data, num_bytes, file.fileno(), place.offset)
