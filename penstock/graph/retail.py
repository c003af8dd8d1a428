"""A bundle with another end: token ids instead of logits, from the file alone and without PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import BundleWriter, read_graph
from penstock.graph.passes.append_tail import append_tail, check_tail
from penstock.lite.core import Model

__all__ = ["with_tail"]


def with_tail(source: str | os.PathLike[str], out: str | os.PathLike[str], tail: str) -> None:
    """Write the bundle ``out``: ``source`` that ends in ``tail``, "argmax" or "topk:K"; byte for byte the file that an
    export with that tail makes.

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
            if one.name != "weights" and (data := model.segment(one.name)) is not None
        }
        with BundleWriter(Path(out), graph, files) as writer:
            for weight in graph.weights.values():
                held = model.segment(weight.segment)
                if held is None:
                    raise InvalidArgumentError(f"{source}: it has no segment {weight.segment!r}")
                begin = weight.offset
                writer.add_weight(weight.name, np.frombuffer(held, np.uint8)[begin : begin + weight.num_bytes])
