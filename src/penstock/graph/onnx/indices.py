"""Ops that read and write by index."""

from __future__ import annotations

import numpy as np

from penstock.graph.general.draft import Tensor
from penstock.graph.general.selections import select_boxes
from penstock.graph.general.sizes import SizeLike, smallest
from penstock.graph.ir import DType
from penstock.graph.onnx.context import Site
from penstock.graph.onnx.registry import reads

__all__: list[str] = []


@reads("Gather")
def _gather(site: Site) -> Tensor:
    x = site.x(0)
    made: Tensor = site.add("gather", x, site.x(1), axis=site.axis(site.int_attr("axis"), x.rank))
    return made


@reads("GatherElements")
def _gather_elements(site: Site) -> Tensor:
    x = site.x(0)
    made: Tensor = site.add("gather_elements", x, site.x(1), axis=site.axis(site.int_attr("axis"), x.rank))
    return made


@reads("GatherND")
def _gather_nd(site: Site) -> Tensor:
    site.expect(site.x(1).rank > 0, "indices of one dimension or more")
    site.fixed(site.x(1).shape[-1], "the number of indices")
    made: Tensor = site.add("gather_nd", site.x(0), site.x(1), batch_dims=site.int_attr("batch_dims"))
    return made


@reads("ScatterElements", "Scatter")
def _scatter_elements(site: Site) -> Tensor:
    x = site.x(0)
    made: Tensor = site.add(
        "scatter_elements",
        x,
        site.x(1),
        site.x(2),
        axis=site.axis(site.int_attr("axis"), x.rank),
        reduction=site.str_attr("reduction", "none"),
    )
    return made


@reads("ScatterND")
def _scatter_nd(site: Site) -> Tensor:
    made: Tensor = site.add("scatter_nd", site.x(0), site.x(1), site.x(2), reduction=site.str_attr("reduction", "none"))
    return made


@reads("OneHot")
def _one_hot(site: Site) -> Tensor:
    indices = site.cast(site.x(0), DType.I64)
    depth = site.sizes(1)[0] if site.raw(1).dtype.kind in "iuO" else int(site.numbers(1).reshape(-1)[0])
    values = site.x(2)
    axis = site.axis(site.int_attr("axis", -1), indices.rank + 1)
    low = site.binary("lt", indices, 0)
    span = site.reshape(site.constant([depth]), ())
    indices = site.add("where", low, site.binary("add", indices, span), indices)
    wide = site.reshape(indices, (*indices.shape[:axis], 1, *indices.shape[axis:]))
    places = site.add("iota", range=(0, 1, depth))
    along = site.reshape(places, [depth if at == axis else 1 for at in range(wide.rank)])
    off, on = (site.reshape(site.cut(values, 0, at, at + 1), ()) for at in (0, 1))
    made: Tensor = site.add("where", site.binary("eq", wide, along), on, off)
    return made


@reads("ReverseSequence")
def _reverse_sequence(site: Site) -> Tensor:
    """Element i of the time axis is that of length - 1 - i before the length, and i itself behind it."""
    x, lengths = site.x(0), site.cast(site.x(1), DType.I64)
    batch, time = site.int_attr("batch_axis", 1), site.int_attr("time_axis", 0)
    site.expect({batch, time} == {0, 1} and x.rank >= 2, "batch_axis and time_axis of 0 and 1")
    steps: SizeLike = x.shape[time]

    def along(tensor: Tensor, axis: int) -> Tensor:
        return site.reshape(tensor, [tensor.shape[0] if at == axis else 1 for at in range(2)])

    place = along(site.add("iota", range=(0, 1, steps)), time)
    last = along(site.binary("sub", lengths, 1), batch)
    behind = site.binary("gt", place, last)
    index = site.add("where", behind, place, site.binary("sub", last, place))
    index = site.reshape(index, (*index.shape, *[1] * (x.rank - 2)))
    full = site.add("expand", index, sizes=x.shape) if x.rank > 2 else index
    made: Tensor = site.add("gather_elements", x, full, axis=time)
    return made


@reads("NonMaxSuppression")
def _non_max_suppression(site: Site) -> Tensor:
    """Write rows (image, class, box), with room for as many as can be selected."""
    boxes, scores = site.x(0), site.x(1)
    site.expect(boxes.rank == scores.rank == 3, "boxes [images, boxes, 4] and scores [images, classes, boxes]")
    limit: SizeLike = site.whole(2)[0] if site.has(2) else 0
    score = float(site.numbers(4).reshape(-1)[0]) if site.has(4) else 0.0
    if not np.isfinite(score):
        raise site.refused(f"score_threshold must be finite, not {score}; leave it out to keep all boxes")
    return select_boxes(
        site.draft,
        boxes,
        scores,
        smallest(max(limit, 0), scores.shape[2]),
        site.node.name,
        iou=float(site.numbers(3).reshape(-1)[0]) if site.has(3) else 0.0,
        filtered=site.has(4),
        score=score,
        format="centers" if site.int_attr("center_point_box") else "corners",
    )
