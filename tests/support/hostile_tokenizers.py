"""Tokenizer files that attack whoever opens or uses them, and bundles of the demo's weights that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.metadata import read_metadata
from penstock.core.native import Model
from penstock.core.tokenizer import TOKENIZER_SEGMENT
from penstock.graph.bundle import BundleWriter
from penstock.graph.metadata import decode_metadata

DEMO = Path(__file__).parents[2] / "demo" / "demo.psm"
BACKTRACKING = "(a|aa)+$"
NUM_DEMO_TOKENS = 4096


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def words(**fields: Any) -> bytes:
    """A tokenizer of whole texts, which the core does not have; ``fields`` take the place of its own."""
    vocab = {"a": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, NUM_DEMO_TOKENS)}
    values = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    return json.dumps(values | fields).encode()


def vocab(**ids: int) -> dict[str, Any]:
    return {"type": "WordLevel", "vocab": ids, "unk_token": next(iter(ids))}


def grows(times: int, count: int, kind: str = "normalizers") -> dict[str, Any]:
    """``count`` replacements in a chain, each ``times`` as long."""
    return {"type": "Sequence", kind: [replace("a", "a" * times)] * count}


def backtracks(kind: str = "Split") -> dict[str, Any]:
    step: dict[str, Any] = {"type": kind, "pattern": {"Regex": BACKTRACKING}}
    return step | ({"behavior": "Isolated", "invert": False} if kind == "Split" else {"content": "b"})


def bundle_with(path: Path, tokenizer: bytes) -> Path:
    """The demo's bundle at ``path``, with another tokenizer.json and without a compiled form of it."""
    with Model.open(DEMO) as model:
        graph, segments = decode_metadata(read_metadata(DEMO, model.stamp))
        files = {
            one.name: bytes(data)
            for one in segments
            if one.name not in ("weights", TOKENIZER_SEGMENT) and (data := model.segment(one.name)) is not None
        }
        weights = np.frombuffer(model.segment("weights") or b"", np.uint8)
        with BundleWriter(path, graph, files | {"tokenizer.json": tokenizer}) as writer:
            for weight in graph.weights.values():
                writer.add_weight(weight.name, weights[weight.offset : weight.offset + weight.num_bytes])
    return path
