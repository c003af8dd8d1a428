"""Transposed convolutions of few channels become a convolution of 1 x 1 and a rearrangement, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.graph.general.draft import Draft
from penstock.graph.general.lower import write_network
from penstock.graph.general.passes import optimise
from penstock.graph.ir import DType
from penstock.networks.predictor import open_predictor

PLAIN: dict[str, Any] = {
    "strides": (2, 3),
    "pads": (0, 0, 0, 0),
    "dilations": (1, 1),
    "output_pads": (0, 0),
    "groups": 1,
}


def layer(outputs: int, kernel: tuple[int, int], bias: bool = True, **attrs: Any) -> Draft:
    random = np.random.default_rng(0)
    draft = Draft("layer")
    x = draft.input("x", DType.F32, (2, 5, 4, 7))
    weight = draft.constant(random.standard_normal((outputs, *kernel, 7)).astype(np.float32))
    values = draft.constant(random.standard_normal(outputs).astype(np.float32)) if bias else None
    y = draft.add("conv_transpose", x, weight, values, **PLAIN | attrs)
    draft.output("y", draft.add("unary", y, kind="sigmoid"))
    return draft


@pytest.mark.parametrize(("outputs", "bias"), [(1, True), (3, False), (15, True)])
def test_windows_side_by_side_become_places(outputs: int, bias: bool, tmp_path: Path) -> None:
    draft = layer(outputs, (2, 3), bias)
    optimise(draft)
    assert [call.op for call in draft.calls] == ["conv", "reshape", "permute", "reshape"]
    plain, split = tmp_path / "plain.psm", tmp_path / "split.psm"
    write_network(layer(outputs, (2, 3), bias), plain, optimised=False)
    write_network(layer(outputs, (2, 3), bias), split)
    x = np.random.default_rng(1).standard_normal((2, 5, 4, 7)).astype(np.float32)
    with open_predictor(plain, threads=1) as one, open_predictor(split, threads=2) as other:
        assert one.run([x])[0].tobytes() == other.run([x])[0].tobytes()


@pytest.mark.parametrize(
    ("outputs", "kernel", "attrs"),
    [(16, (2, 3), {}), (3, (3, 3), {}), (3, (2, 3), {"pads": (0, 1, 0, 1)}), (3, (2, 3), {"output_pads": (1, 0)}),
     (3, (1, 1), {"strides": (1, 1)})],
)  # fmt: skip
def test_others_stay(outputs: int, kernel: tuple[int, int], attrs: dict[str, Any]) -> None:
    draft = layer(outputs, kernel, **attrs)
    optimise(draft)
    assert [call.op for call in draft.calls] == ["conv_transpose"]
