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


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> Any:
    """Return a node whose inputs and outputs have names with spaces between them."""
    return helper.make_node(op, inputs.split(" "), outputs.split(" "), **attrs)


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
            assert (rows[len(expected) :] == 0).all()
            np.testing.assert_array_equal(chosen[: len(expected)], boxes[expected[:, 0], expected[:, 2]])
            np.testing.assert_array_equal(found_classes[: len(expected)], expected[:, 1])


NUMBERS: dict[str, Any] = {
    "zero": np.array(0), "step": np.array(1), "size": np.array(7), "first": np.int64([0]), "second": np.int64([1]),
    "third": np.int64([2]), "minus": np.int64([-1]), "columns": np.int64([0, 2]), "pairs": np.int64([-1, 4]),
    "seven": np.arange(21).reshape(7, 3), "two": np.arange(14).reshape(7, 2), "wide": np.float32(np.eye(3)),
    "square": np.float32(np.arange(49).reshape(7, 7)), "many": np.int64([7, 3]),
    "triple": np.int64([-1]), "threes": np.int64([-1, 3]), "image": np.zeros((1, 1, 4, 4), "f4"),
}  # fmt: skip
SHAPE = [node("Shape", "rows", "shape"), node("Gather", "shape first", "number")]
NEXT = [*SHAPE, node("Add", "number second", "next")]
SCALARS = [*SHAPE, node("Squeeze", "number first", "n"), node("Squeeze", "minus first", "end")]

FOLLOWED: dict[str, tuple[list[Any], dict[str, int]]] = {
    "only the number": (SHAPE, {"number": INT64}),
    "only zeros": ([*SHAPE, node("ConstantOfShape", "number", "y")], {"y": FLOAT}),
    "the smaller number as a value": (
        [*SHAPE, node("Min", "number third", "least"), node("Add", "rows least", "y"),
         node("Slice", "rows first least first", "z"), node("Slice", "z first second first", "one")],
        {"y": INT64, "z": INT64, "one": INT64, "rows": INT64},
    ),
    "only the smaller number": ([*SHAPE, node("Min", "number third", "y")], {"y": INT64}),
    "their number and a size": (
        [node("Shape", "rows", "y"), node("Concat", "y triple second y", "z", axis=0)], {"y": INT64, "z": INT64},
    ),
    "twice their number": ([*SHAPE, node("Add", "number number", "y")], {"y": INT64}),
    "three for each": (
        [node("Reshape", "rows triple", "x"), node("Add", "x second", "y"), node("Shape", "y", "number"),
         node("Reshape", "y threes", "t"), node("ReduceSum", "t second", "z", keepdims=0)],
        {"y": INT64, "number": INT64, "z": INT64},
    ),
    "three for each of the first": (
        [*SHAPE, node("Min", "number third", "least"), node("Slice", "rows first least first", "x"),
         node("Reshape", "x triple", "y"), node("Shape", "y", "number_of_y")],
        {"y": INT64, "number_of_y": INT64},
    ),
    "places in all images": (
        [node("Gather", "rows first", "i", axis=1), node("Gather", "rows third", "k", axis=1),
         node("Shape", "boxes", "s"), node("Gather", "s second", "N"), node("Mul", "i N", "start"),
         node("Add", "start k", "at"), node("Squeeze", "at second", "places"), node("Reshape", "boxes pairs", "all"),
         node("Gather", "all places", "y")],
        {"y": FLOAT},
    ),
    "its own num_selected": ([node("Identity", "scores", "num_selected")], {"num_selected": FLOAT, "rows": INT64}),
    "each box": (
        [node("Cast", "rows", "f", to=FLOAT), node("MatMul", "f wide", "m"), node("Softmax", "m", "p", axis=1),
         node("Concat", "p f", "c", axis=1), node("ReduceSum", "c second", "sum", keepdims=1),
         node("Transpose", "c", "t", perm=[1, 0]), *SCALARS, node("Range", "zero n step", "range"),
         node("Mod", "range size", "places"), node("Unsqueeze", "places second", "at"),
         node("GatherElements", "square at", "e", axis=0)],
        {"sum": FLOAT, "t": FLOAT, "e": FLOAT},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_computed_of_each_box(name: str, tmp_path: Path) -> None:
    nodes, outputs = FOLLOWED[name]
    network = penstock.read_network(onnx_file(tmp_path, nodes, outputs, NUMBERS))
    assert [output.name for output in network.outputs][: len(outputs)] == list(outputs)
    boxes, scores = arrays(2, 1, 20)
    for wanted in (scores, np.where(np.arange(20) == 5, scores + 1, 0), scores * 0):
        assert network.check([boxes, np.float32(wanted)]).passed


REFUSED: dict[str, list[Any]] = {
    "a maximum": [node("ReduceMax", "rows", "y", axes=[0])],
    "one behind the other": [node("Concat", "rows rows", "y", axis=0)],
    "one of them": [node("Gather", "rows first", "y", axis=0)],
    "other sizes": [node("Reshape", "rows whole", "y")],
    "the place of the largest": [node("ArgMax", "rows", "y", axis=0)],
    "the last": [node("Slice", "rows minus far first", "y")],
    "all but the last": [node("Slice", "rows first minus first", "y")],
    "from the last to the first": [node("Slice", "rows minus before first minus", "y")],
    "a row of a table by their number": [*NEXT, node("Slice", "seven number next first", "y")],
    "what follows that row": [
        *NEXT, node("Slice", "seven number next first", "x"), node("ReduceSum", "x", "y"),
    ],
    "numbers down from theirs": [*SCALARS, node("Add", "n end", "last"), node("Range", "last end end", "y")],
    "a diagonal": [*SCALARS, node("Trilu", "square n", "y")],
    "a scale": [*NEXT, node("Concat", "second second number next", "to", axis=0), node("Resize", "image   to", "y")],
    "as many of a table": [*SHAPE, node("TopK", "square number", "y places", axis=1, sorted=0)],
    "the square of their number": [*SHAPE, node("Mul", "number number", "y")],
    "one more than their number": [*SHAPE, node("Add", "number second", "y")],
    "the first third of three for each": [
        node("Reshape", "rows triple", "x"), *SHAPE, node("Slice", "x first number first", "y"),
    ],
    "three for each beside their number": [
        node("Reshape", "rows triple", "x"), *SHAPE, node("ConstantOfShape", "number", "f"),
        node("Cast", "f", "z", to=INT64), node("Add", "x z", "y"),
    ],
    "columns of all boxes": [node("Transpose", "rows", "t"), node("Reshape", "t triple", "y")],
    "a table of the most": [node("Add", "rows seven", "y")],
    "a table of the most by their side": [node("Concat", "rows two", "y", axis=1)],
    "as wide as the most": [node("Gather", "rows first", "x", axis=1), node("Expand", "x many", "y")],
    "pairs of them": [
        node("Cast", "rows", "f", to=FLOAT), node("Transpose", "f", "t"), node("MatMul", "f t", "y"),
    ],
    "boxes of boxes": [
        node("Gather", "rows columns", "at", axis=1), node("GatherND", "boxes at", "x"),
        node("Unsqueeze", "x first", "b"), node("ReduceSum", "b third", "s", keepdims=0),
        node("Unsqueeze", "s first", "c"), node("NonMaxSuppression", "b c limit", "y"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_selected_boxes_is_refused(name: str, tmp_path: Path) -> None:
    constants = {**NUMBERS, "whole": np.int64([3, -1]), "far": np.int64([99]), "before": np.int64([-99])}
    path = onnx_file(tmp_path, REFUSED[name], {"y": INT64}, constants)
    with raises(UnsupportedError, code="selected_boxes"):
        penstock.read_network(path, sizes={"B": 1, "C": 1, "N": 20})


def test_boxes_that_decide_what_runs_are_refused(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [node("Identity", "rows", "z")], "branch", [], [helper.make_tensor_value_info("z", INT64, None)]
    )
    condition = [*SHAPE, node("Greater", "number second", "is_more")]
    for nodes in (
        [*condition, node("If", "is_more", "y", then_branch=branch, else_branch=branch)],
        [node("Gather", "rows first", "x", axis=1), node("Squeeze", "x", "y")],
    ):
        with raises(UnsupportedError, code="unsupported_nodes"):
            penstock.read_network(onnx_file(tmp_path, nodes, {"y": INT64}, NUMBERS))


def test_thresholds_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    for value in (-np.inf, np.nan):
        path = onnx_file(tmp_path, [], {"rows": INT64}, {"score": np.float32([value])})
        with raises(UnsupportedError, code="unsupported_nodes"):
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


class Batched(nn.Module):
    """``torchvision.ops.batched_nms``, as it is written there for up to 4000 numbers."""

    def forward(self, boxes: Tensor, scores: Tensor, labels: Tensor) -> list[Tensor]:
        """Return the first five boxes with their scores and labels."""
        if boxes.numel() > 4000:
            raise NotImplementedError
        if boxes.numel() == 0:
            kept = torch.empty((0,), dtype=torch.int64, device=boxes.device)
        else:
            offsets = labels.to(boxes) * (boxes.max() + torch.tensor(1).to(boxes))
            kept = torch.ops.torchvision.nms(boxes + offsets[:, None], scores, 0.4)
        kept = kept[:5]
        return [boxes[kept], scores[kept], labels[kept], boxes.new_ones(len(kept))]


def test_boxes_that_a_module_selects_of_each_label(torchvision_nms: Any, tmp_path: Path) -> None:
    example = {"boxes": torch.rand(20, 4), "scores": torch.rand(20), "labels": torch.arange(20) % 3}
    network = penstock.capture(Batched(), example, shapes={"boxes": ("N", 4), "scores": ("N",), "labels": ("N",)})
    network.save(tmp_path / "net.psm")
    with penstock.open_predictor(tmp_path / "net.psm") as predictor:
        for count in (1, 3, 40):
            boxes, scores = (array[0] for array in arrays(1, 1, count))
            boxes[:, 2:] += boxes[:, :2]
            labels = np.arange(count) % 3
            moved = boxes + np.float32(labels * (boxes.max() + 1))[:, None]
            kept = expected_rows(moved[None], scores[None], count, 0.4, None, False)[:5, 2]
            *found, number = predictor.run([boxes, scores[0], labels])
            assert int(number[0]) == len(kept)
            for ours, all_of_them in zip(found, (boxes, scores[0], labels, np.ones(count)), strict=True):
                np.testing.assert_array_equal(ours[: len(kept)], all_of_them[kept])


class Squeezed(nn.Module):
    """Selected boxes in a form that one of them does not have."""

    def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
        """Return their places."""
        return torch.ops.torchvision.nms(boxes, scores, 0.4)[None].squeeze()


def test_a_squeeze_of_selected_boxes_is_refused(torchvision_nms: Any) -> None:
    with raises(UnsupportedError, code="selected_boxes"):
        penstock.capture(Squeezed(), {"boxes": torch.rand(20, 4), "scores": torch.rand(20)})
