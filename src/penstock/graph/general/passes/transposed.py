"""Compute transposed convolutions of few channels whose windows do not overlap as a product and a rearrangement.

With a kernel as large as its strides and no padding, each input pixel alone gives a block of outputs: a convolution of
1 x 1 with an output channel for each place in the block, then depth to space.  The sums are the same, bit for bit; a
tile of weights then has the outputs of several places instead of one.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.graph.general.draft import Draft, DraftCall, Tensor

__all__ = ["split_transposed"]

_TILE: Final = 16
"""Output channels of a tile of weights; with that many the rearrangement costs more than it gains."""


def split_transposed(draft: Draft) -> None:
    """Rewrite the draft in place."""
    calls: list[DraftCall] = []
    for call in draft.calls:
        calls += _split(draft, call) if _can_split(call) else [call]
    draft.calls = calls


def _can_split(call: DraftCall) -> bool:
    if call.op != "conv_transpose":
        return False
    a, weight, bias = call.attrs, call.argument(1).value, call.inputs[2]
    plain = not any(a["pads"]) and not any(a["output_pads"]) and all(size == 1 for size in a["dilations"])
    constant = weight is not None and (bias is None or bias.value is not None)
    places = a["kernel"][0] * a["kernel"][1]
    return (
        plain and constant and a["groups"] == 1 and tuple(a["kernel"]) == tuple(a["strides"])
        and places > 1 and a["out_channels"] < _TILE
    )  # fmt: skip


def _split(draft: Draft, call: DraftCall) -> list[DraftCall]:
    x, out = call.argument(0), call.output
    height, width = call.attrs["kernel"]
    channels, places = call.attrs["out_channels"], height * width
    weight = call.argument(1)
    rows = np.ascontiguousarray(np.asarray(weight.value).transpose(1, 2, 0, 3).reshape(places * channels, 1, 1, -1))
    inputs: list[Tensor | None] = [x, Tensor(draft.free_name(weight.name), weight.dtype, rows.shape, rows), None, None]
    bias = call.inputs[2]
    if bias is not None:
        tiled = np.tile(np.asarray(bias.value).reshape(-1), places)
        inputs[2] = Tensor(draft.free_name(bias.name), bias.dtype, tiled.shape, tiled)
    attrs = {key: value for key, value in call.attrs.items() if key != "output_pads"}
    attrs |= {"out_channels": places * channels, "kernel": (1, 1), "strides": (1, 1)}
    n, h, w = x.shape[:3]
    blocks = Tensor(draft.free_name(out.name), out.dtype, (n, h, w, places * channels))
    split = Tensor(draft.free_name(out.name), out.dtype, (n, h, w, height, width, channels))
    order = (0, 1, 3, 2, 4, 5)
    moved = Tensor(draft.free_name(out.name), out.dtype, tuple(split.shape[axis] for axis in order))
    return [
        DraftCall("conv", call.name, inputs, [blocks], attrs),
        DraftCall("reshape", call.name, [blocks], [split], {"sizes": split.shape}),
        DraftCall("permute", call.name, [split], [moved], {"order": order}),
        DraftCall("reshape", call.name, [moved], [out], {"sizes": out.shape}),
    ]
