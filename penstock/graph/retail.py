"""A bundle with another end: token ids instead of logits, from the file alone and without PyTorch."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from penstock.errors import FileAccessError, InvalidArgumentError, UnsupportedError
from penstock.graph.bundle import BundleWriter, read_graph
from penstock.graph.passes.append_tail import append_tail, check_tail
from penstock.lite.core import Model
from penstock.lite.memory import can_map_segments, map_over

__all__ = ["map_weights", "with_tail"]

_WEIGHTS = "weights"


def with_tail(source: str | os.PathLike[str], out: str | os.PathLike[str], tail: str, *, hollow: bool = False) -> None:
    """Write the bundle ``out``: ``source`` that ends in ``tail``, "argmax" or "topk:K"; byte for byte the file that an
    export with that tail makes.  With ``hollow`` its weights are a hole, for ``map_weights`` to fill.

    InvalidArgumentError for a source that ends in token ids already, and for what is no tail.
    """
    check_tail(tail)
    graph, segments = read_graph(source)
    with Model.open(source) as model:
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
                return
            for weight in graph.weights.values():
                writer.add_weight(weight.name, weights[weight.offset : weight.offset + weight.num_bytes])


def map_weights(model: Model, source: str | os.PathLike[str]) -> None:
    """Put the weights of the bundle ``source`` in the place of those of a hollow bundle that is open, before it runs.

    They are mapped, not copied: both share the file's pages.  FileAccessError when the system refuses,
    UnsupportedError where its pages are larger than what segments are aligned to.
    """
    if not can_map_segments():
        raise UnsupportedError(f"{source}: pages of {mmap.PAGESIZE} bytes hold more than a segment")
    _, segments = read_graph(source)
    held = model.segment(_WEIGHTS)
    place = next(one for one in segments if one.name == _WEIGHTS)
    if held is None or held.nbytes != place.num_bytes:
        raise InvalidArgumentError(f"{source}: expected weights of the hollow bundle's size")
    try:
        file = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FileAccessError(f"{source}: {error.strerror}") from error
    try:  # segments begin at a page, and what lies behind one on its last page is nobody's
        num_bytes = -(-place.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        map_over(np.frombuffer(held, np.uint8).ctypes.data, num_bytes, file, place.offset)
    finally:
        os.close(file)
