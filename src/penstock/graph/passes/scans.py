"""The division of ops with recurrent states: each rank has some heads, with their channels and their states."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import InvalidArgumentError
from penstock.graph.ir import AttrValue, Graph, Node
from penstock.graph.passes.cut import Cut, cut_heads

__all__ = ["SCANS", "ScanCut", "cut_scan"]

SCANS = {"gated_delta": (3, 7), "gated_delta_tiled": (3, 7), "ssm_scan": (2, 6)}
"""By op the places of the state and of the weights among its inputs: gates are before the state, behind the channels.

The first weight, and the second one of ssm_scan, is of the convolution, whose rows are channels; the others are vectors
with an element for each head.
"""


@dataclass(frozen=True)
class ScanCut:
    """The cut of an op: ``heads`` and ``units`` in heads of its gates and of its state, ``out`` in columns of results.

    ``sections``: where each kind of channels begins, and how its columns are cut.  ``attrs``: the attributes of each
    rank.
    """

    heads: Cut
    units: Cut
    out: Cut
    sections: tuple[tuple[int, Cut], ...]
    attrs: tuple[dict[str, AttrValue], ...]

    def channels(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of channels that a rank has."""
        ranges = ((first, cut.ranges[rank]) for first, cut in self.sections)
        return tuple((first + start, first + stop) for first, (start, stop) in ranges)


def cut_scan(graph: Graph, node: Node, world: int) -> ScanCut | None:
    """Return how an op of ``SCANS`` is cut; None if it has fewer heads than ranks, or its heads are in tiled order.

    A rank has whole groups of heads with their keys (B of ssm_scan) and queries (C).  If there are more ranks than
    groups, several ranks have the keys and queries of the same one, and each a part of its heads.
    """
    if node.op == "gated_delta_tiled":
        return None  # the columns of a rank's heads would be apart
    is_delta = node.op == "gated_delta"
    groups = int(node.attrs["key_heads" if is_delta else "groups"])
    blocks = groups if is_delta else int(node.attrs["blocks"])
    dim = int(node.attrs["head_dim" if is_delta else "state_dim"])
    try:
        units, own_groups = cut_heads(blocks, groups, world)
    except InvalidArgumentError:
        return None
    channels, heads = (graph.values[node.inputs[i].name].shape[1].offset for i in (0, 1))
    inner = groups * dim
    values = channels - 2 * inner
    own, shared = units.times(values // blocks), own_groups.times(dim)
    sections = ((0, own), (values, shared), (values + inner, shared))
    if is_delta:
        sections = ((0, shared), (inner, shared), (2 * inner, own))
    attrs: list[dict[str, AttrValue]] = [
        {"key_heads": units.size(rank)} if is_delta else {"blocks": units.size(rank), "groups": own_groups.size(rank)}
        for rank in range(world)
    ]
    width = math.prod(dim.offset for dim in graph.values[node.outputs[0]].shape[1:])
    return ScanCut(units.times(heads // blocks), units, units.times(width // blocks), sections, tuple(attrs))
