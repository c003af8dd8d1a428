"""Networks that select boxes: room for the most, and an output that is their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import penstock
from penstock.errors import UnsupportedError
from tests.support.errors import raises
from tests.support.nms_reference import expected_rows

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def onnx_file(folder: Path, nodes: list[Any], outputs: dict[str, int], constants: dict[str, Any]) -> Path:
    """Write a network that selects up to 7 of each class, and goes on with ``nodes``."""
    constants = {"limit": np.int64([7]), "iou": np.float32([0.4]), "score": np.float32([0.3]), **constants}
    select = helper.make_node("NonMaxSuppression", ["boxes", "scores", "limit", "iou", "score"], ["rows"])
    graph = helper.make_graph(
        [select, *nodes],
        "detector",
        [
            helper.make_tensor_value_info("boxes", FLOAT, ["B", "N", 4]),
            helper.make_tensor_value_info("scores", FLOAT, ["B", "C", "N"]),
        ],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    path = folder / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def arrays(images: int, classes: int, count: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(count)
    return generator.random((images, count, 4), np.float32), generator.random((images, classes, count), np.float32)


NODES = [
    helper.make_node("Gather", ["rows", "columns"], ["places"], axis=1),
    helper.make_node("GatherND", ["boxes", "places"], ["chosen"]),
    helper.make_node("Gather", ["rows", "second"], ["class_columns"], axis=1),
    helper.make_node("Squeeze", ["class_columns", "one"], ["classes"]),
    helper.make_node("Shape", ["rows"], ["rows_shape"]),
    helper.make_node("Gather", ["rows_shape", "first"], ["number"], axis=0),
]
CONSTANTS = {"columns": np.int64([0, 2]), "second": np.int64([1]), "one": np.int64([1]), "first": np.int64([0])}


def test_what_follows_selected_boxes_in_a_file(tmp_path: Path) -> None:
    path = onnx_file(tmp_path, NODES, {"rows": INT64, "chosen": FLOAT, "classes": INT64, "number": INT64}, CONSTANTS)
    network = penstock.read_network(path)
    assert [output.name for output in network.outputs] == ["rows", "chosen", "classes", "number", "num_selected"]
    assert network.check(arrays(2, 3, 20)).passed
    network.save(tmp_path / "net.psm")
    with penstock.open_predictor(tmp_path / "net.psm") as predictor:
        for images, classes, count in ((1, 1, 4), (2, 3, 30)):
            boxes, scores = arrays(images, classes, count)
            expected = expected_rows(boxes, scores, 7, 0.4, 0.3, False)
            rows, chosen, found_classes, number, num_selected = predictor.run([boxes, scores])
            assert len(rows) == images * classes * min(7, count)
            assert int(number[0]) == int(num_selected[0]) == len(expected)
            np.testing.assert_array_equal(rows[: len(expected)], expected)
            assert (rows[len(expected) :] == -1).all()
            np.testing.assert_array_equal(chosen[: len(expected)], boxes[expected[:, 0], expected[:, 2]])
            np.testing.assert_array_equal(found_classes[: len(expected)], expected[:, 1])


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("ReduceMax", ["rows"], ["y"], axes=[0]),
        helper.make_node("Concat", ["rows", "rows"], ["y"], axis=0),
        helper.make_node("Gather", ["rows", "first"], ["y"], axis=0),
        helper.make_node("Reshape", ["rows", "pairs"], ["y"]),
        helper.make_node("ArgMax", ["rows"], ["y"], axis=0),
    ],
    ids=lambda node: node.op_type,
)
def test_what_mixes_selected_boxes_is_refused(node: Any, tmp_path: Path) -> None:
    constants = {"first": np.int64([0]), "pairs": np.int64([3, -1])}
    path = onnx_file(tmp_path, [node], {"y": INT64}, constants)
    with raises(UnsupportedError, code="selected_boxes"):
        penstock.read_network(path)


class Detections(nn.Module):
    """Boxes that torchvision's ``nms`` selects, the first ten."""

    def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the boxes with their scores, and all places."""
        kept = torch.ops.torchvision.nms(boxes, scores, 0.4)
        first = kept[:10]
        return torch.cat([boxes[first] * 2, scores[first][:, None]], 1), kept


@pytest.fixture(name="torchvision_nms")
def _torchvision_nms() -> Any:
    """Declare the op as torchvision does, where that is not installed."""
    try:
        return torch.ops.torchvision.nms
    except AttributeError:
        pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    @torch.library.register_fake("torchvision::nms", lib=library)
    def _(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
        return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)

    return library


def test_boxes_that_a_module_selects(torchvision_nms: Any, tmp_path: Path) -> None:
    example = {"boxes": torch.rand(20, 4), "scores": torch.rand(20)}
    shapes = {"boxes": ("N", 4), "scores": ("N",)}
    network = penstock.capture(Detections(), example, shapes=shapes)
    assert [output.sizes for output in network.outputs] == [("min(10,N)", "5"), ("N",), ("1",), ("1",)]
    network.save(tmp_path / "net.psm")
    with penstock.open_predictor(tmp_path / "net.psm") as predictor:
        for count in (1, 8, 60):
            boxes, scores = arrays(1, 1, count)
            boxes[..., 2:] += boxes[..., :2]
            expected = expected_rows(boxes, scores, count, 0.4, None, False)[:, 2]
            rows, kept, num_rows, num_kept = predictor.run([boxes[0], scores[0, 0]])
            assert (int(num_rows[0]), int(num_kept[0])) == (min(10, len(expected)), len(expected))
            np.testing.assert_array_equal(kept[: len(expected)], expected)
            wanted = np.concatenate([boxes[0] * 2, scores[0, 0, :, None]], 1)[expected[:10]]
            np.testing.assert_array_equal(rows[: len(wanted)], wanted)
