"""Graphs as text, and those of built-in networks in a process without PyTorch.

Run as a script, it reads {name: config.json} from the standard input, and writes {name: digest} for their graphs.  With
``import torch`` blocked it exports the checkpoints that its arguments name, each to the file after it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from typing import Any


def graph_items(graph: Any) -> dict[str, Any]:
    """The fields of a graph; dictionaries are lists, so that their order counts."""
    fields = dataclasses.asdict(graph)
    return {key: list(value.items()) if isinstance(value, dict) else value for key, value in fields.items()}


def constant_items(constants: Any) -> list[tuple[Any, ...]]:
    return [(name, str(array.dtype), array.shape, array.tobytes()) for name, array in constants.items()]


def digest_of(config: dict[str, Any]) -> str:
    """Construct the network of a config.json, trace it, and return what differs between two graphs."""
    from penstock.config import ConfigReader
    from penstock.graph.tracer import trace_network
    from penstock.models.meta import construct_on_meta

    built = construct_on_meta(ConfigReader(config))
    sizes = {"context_len": built.context_len, "vocab_size": built.vocab_size}
    graph, constants = trace_network(built.network, network_name=built.name, **sizes)
    return hashlib.sha256(repr((graph_items(graph), constant_items(constants))).encode()).hexdigest()


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    from penstock.graph.export import export_bundle

    for source, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        export_bundle(source, out)
    print(json.dumps({name: digest_of(config) for name, config in json.load(sys.stdin).items()}))
