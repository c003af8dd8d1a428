"""A bundle with another end: token ids instead of logits, from the file alone and without PyTorch."""

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

__all__ = ["map_weights", "with_tail"]

_WEIGHTS = "weights"


def with_tail(
    source: str | os.PathLike[str], out: str | os.PathLike[str], tail: str, *, hollow: bool = False
) -> tuple[int, ...]:
    """Write the bundle ``out``: ``source`` that ends in ``tail``, "argmax" or "topk:K"; byte for byte the file that an
    export with that tail makes.  With ``hollow`` its weights are a hole, for ``map_weights`` to fill.

    Returns the stamp of the source, by which ``map_weights`` knows it again.  InvalidArgumentError for a source that
    ends in token ids already, and for what is no tail; InvalidFileError for one that is replaced meanwhile.
    """
    check_tail(tail)
    with Model.open(source) as model:
        graph, segments = decode_metadata(read_metadata(source, model.stamp))
        if model.info.tail:
            raise InvalidArgumentError(f"{source}: expected a bundle that ends in logits, found {model.info.tail}")
        append_tail(graph, tail)
        files = {
            one.name: bytes(data)
            for one in segments
            if one.name != _WEIGHTS and (data := model.segment(one.name)) is not None
        }
        weights = np.frombuffer(model.segment(_WEIGHTS) or b"", np.uint8)
        with BundleWriter(Path(out), graph, files) as writer:
            if hollow:
                writer.leave_weights(next(one.crc32 for one in segments if one.name == _WEIGHTS))
                return model.stamp
            for weight in graph.weights.values():
                writer.add_weight(weight.name, weights[weight.offset : weight.offset + weight.num_bytes])
        return model.stamp


def map_weights(model: Model, source: str | os.PathLike[str], stamp: Sequence[int]) -> None:
    """Put the weights of the bundle ``source`` in the place of those of a hollow bundle that is open, before it runs.

    They are mapped, not copied: both share the file's pages.  ``stamp``: what ``with_tail`` returned.  InvalidFileError
    for a source that was replaced or changed since, FileAccessError when the system refuses, UnsupportedError where its
    pages are larger than what segments are aligned to.
    """
    if not can_map_segments():
        raise UnsupportedError(f"{source}: pages of {mmap.PAGESIZE} bytes hold more than a segment")
    _, segments = decode_metadata(read_metadata(source, stamp))
    held = model.segment(_WEIGHTS)
    place = next(one for one in segments if one.name == _WEIGHTS)
    if held is None or held.nbytes != place.num_bytes:
        raise InvalidArgumentError(f"{source}: expected weights of the hollow bundle's size")
    with open_again(
        source, stamp
    ) as file:  # segments begin at a page, and what is behind one on its last page is nobody's
        num_bytes = -(-place.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        map_over(np.frombuffer(held, np.uint8).ctypes.data, num_bytes, file.fileno(), place.offset)
