"""Boxes that ONNX's ``NonMaxSuppression`` selects, by another runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

Array = Any


def expected_rows(boxes: Array, scores: Array, limit: int, iou: float, score: float | None, centers: bool) -> Array:
    """Return the selected rows by ONNX Runtime, or by onnx's evaluator where that is missing."""
    names = ["boxes", "scores", "limit", "iou", *(["score"] if score is not None else [])]
    node = helper.make_node("NonMaxSuppression", names, ["rows"], center_point_box=int(centers))
    types = [TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT, TensorProto.FLOAT]
    inputs = [helper.make_tensor_value_info(name, types[i], None) for i, name in enumerate(names)]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("rows", TensorProto.INT64, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    values = [boxes, scores, np.int64([limit]), np.float32([iou]), np.float32([0 if score is None else score])]
    feeds = dict(zip(names, values, strict=False))
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return ReferenceEvaluator(model).run(None, feeds)[0]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]
