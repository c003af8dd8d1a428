"""The reader of torchvision's ``nms``."""

from __future__ import annotations

from penstock.graph.general.draft import Tensor
from penstock.graph.general.selections import select_boxes
from penstock.graph.general.torch.writer import Writer, reader

__all__: list[str] = []


@reader("torchvision.nms.default")
def _nms(w: Writer, boxes: Tensor, scores: Tensor, iou: float) -> Tensor:
    """Write the places [selected] of [N, 4] boxes, whose corners are ordered, from the highest score down."""
    count = scores.shape[0]
    boxes, scores = w.as_float(w.reshape(boxes, (1, count, 4))), w.as_float(w.reshape(scores, (1, 1, count)))
    rows = select_boxes(w.draft, boxes, scores, count, w.name, iou=float(iou), format="ordered")
    return w.reshape(w.sliced(rows, 1, 2, 3), rows.shape[:1])
