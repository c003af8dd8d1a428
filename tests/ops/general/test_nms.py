"""Selection of boxes against onnx's reference evaluator and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import PenstockError
from tests.support.errors import raises
from tests.support.general_ops import check, run
from tests.support.nms_reference import expected_rows

Array = Any


def sample(seed: int, images: int, classes: int, count: int) -> tuple[Array, Array]:
    """Return boxes with exchanged corners among them, and scores of which some are equal."""
    generator = np.random.default_rng(seed)
    boxes = generator.random((images, count, 4), np.float32)
    return boxes, np.round(generator.random((images, classes, count), np.float32), 1)


@pytest.mark.parametrize("centers", [False, True])
@pytest.mark.parametrize("score", [None, 0.4])
def test_boxes_are_those_of_onnx(score: float | None, centers: bool) -> None:
    sizes = ((1, 1, 1), (1, 3, 40), (3, 2, 17), (2, 5, 300))
    for seed, (images, classes, count) in enumerate(sizes):
        boxes, scores = sample(seed, images, classes, count)
        for limit, iou in ((count, 0.5), (min(3, count), 0.1), (count, 0.0), (count, 1.0)):
            rows = np.zeros((images * classes * limit, 3), np.int64)
            selected = expected_rows(boxes, scores, limit, iou, score, centers)
            rows[: len(selected)] = selected
            check(
                "nms", [boxes, scores], rows, np.int64([len(selected)]), limit=[limit], iou=iou,
                filtered=score is not None, score=float(np.float32(score or 0)),
                format="centers" if centers else "corners",
            )  # fmt: skip


def test_boxes_with_exchanged_corners_are_empty_if_ordered() -> None:
    boxes = np.float32([[[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 0.9], [0, 0, 0, 0]]])
    scores = np.float32([[[0.9, 0.8, 0.7, 0.6]]])
    attrs: dict[str, Any] = {"limit": [4], "iou": 0.5, "filtered": False, "score": 0.0}
    for kind, kept in (("ordered", [0, 1, 3]), ("corners", [0, 3])):
        rows = np.zeros((4, 3), np.int64)
        rows[: len(kept)] = [(0, 0, i) for i in kept]
        check("nms", [boxes, scores], rows, np.int64([len(kept)]), format=kind, **attrs)


def test_no_boxes_and_no_room_give_no_rows() -> None:
    attrs: dict[str, Any] = {"iou": 0.5, "filtered": False, "score": 0.0, "format": "corners"}
    many = (65536, 1024, 0, 0)  # 2^26 classes without a box, which cost nothing
    for images, classes, count, limit in ((1, 1, 0, 0), (2, 3, 4, 0), (0, 2, 5, 5), (2, 0, 5, 5), many):
        boxes, scores = sample(0, images, classes, count)
        rows = np.zeros((images * classes * limit, 3), np.int64)
        check("nms", [boxes, scores], rows, np.int64([0]), limit=[limit], **attrs)


def test_nan_scores_come_first_unless_filtered() -> None:
    boxes = np.float32([[[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]])
    scores = np.float32([[[0.5, np.nan, 0.9]]])
    attrs: dict[str, Any] = {"limit": [3], "iou": 0.5, "score": 0.6, "format": "corners"}
    rows = np.int64([[0, 0, 1], [0, 0, 2], [0, 0, 0]])
    check("nms", [boxes, scores], rows, np.int64([3]), filtered=False, **attrs)
    check("nms", [boxes, scores], np.int64([[0, 0, 2], [0] * 3, [0] * 3]), np.int64([1]), filtered=True, **attrs)


@pytest.mark.parametrize(
    ("wrong", "rows"),
    [({"limit": [6]}, 6), ({"limit": [-1]}, 0), ({"limit": [1, 1]}, 1), ({"iou": -0.1}, 5), ({"iou": 1.5}, 5),
     ({"iou": float("nan")}, 5), ({"format": "polygons"}, 5)],
    ids=str,
)  # fmt: skip
def test_wrong_attributes_of_nms_are_refused(wrong: dict[str, Any], rows: int) -> None:
    attrs = {"limit": [5], "iou": 0.5, "filtered": False, "score": 0.0, "format": "corners"}
    outputs = [((rows, 3), np.int64), ((1,), np.int64)]
    (name,) = wrong
    with raises(PenstockError, param=name):
        run("nms", [*sample(0, 1, 1, 5)], outputs, **{**attrs, **wrong})


def test_other_boxes_than_scores_are_refused() -> None:
    boxes, scores = sample(0, 2, 1, 5)
    attrs: dict[str, Any] = {"limit": [4], "iou": 0.5, "filtered": False, "score": 0.0, "format": "corners"}
    for wrong in (boxes[:, :4], boxes[:1], boxes[..., :3]):
        with raises(PenstockError, param="boxes"):
            run("nms", [wrong, scores], [((8, 3), np.int64), ((1,), np.int64)], **attrs)


def test_a_request_of_too_many_comparisons_is_refused() -> None:
    boxes, scores = np.zeros((1, 1 << 19, 4), np.float32), np.zeros((1, 1, 1 << 19), np.float32)
    most = (1 << 17) + 1
    with raises(PenstockError, param="limit"):
        run(
            "nms", [boxes, scores], [((most, 3), np.int64), ((1,), np.int64)], limit=[most], iou=0.5, filtered=False,
            score=0.0, format="corners",
        )  # fmt: skip
