"""Passes over drafts of general networks."""

from __future__ import annotations

from penstock.graph.general.draft import Draft
from penstock.graph.general.passes.chains import join_chains
from penstock.graph.general.passes.fuse_conv import fuse_convolutions
from penstock.graph.general.passes.layout import move_permutes
from penstock.graph.general.passes.patterns import recognise
from penstock.graph.general.passes.reshapes import merge_reshapes
from penstock.graph.general.passes.transposed import split_transposed
from penstock.graph.general.passes.winograd import transform_convolutions

__all__ = ["optimise"]


def optimise(draft: Draft, *, winograd: bool = True) -> None:
    """Rewrite a draft in place: ops in pieces become one, images become NHWC, and convolutions take what follows.

    ``winograd``: convolutions of 3x3 become ``conv_winograd`` where that is faster; weights take 16/9 of the room.
    """
    draft.prune()
    recognise(draft)
    merge_reshapes(draft)
    move_permutes(draft)
    merge_reshapes(draft)
    fuse_convolutions(draft)
    split_transposed(draft)
    if winograd:
        transform_convolutions(draft)
    join_chains(draft)
