"""Models in ONNX's format."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper


def save(graph: onnx.GraphProto, path: Path) -> None:
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(found.SerializeToString())
