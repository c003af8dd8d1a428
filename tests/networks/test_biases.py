"""Biases behind the reshape of a linear layer's rows become the layer's own, without a change of a bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.graph.general.draft import Draft, Tensor
from penstock.graph.general.lower import write_network
from penstock.graph.general.passes import optimise
from penstock.graph.ir import DType
from penstock.networks.predictor import open_predictor


def layer(kind: str = "add", bias_shape: tuple[int, ...] = (12,), swapped: bool = False, heads: int = 1) -> Draft:
    """Return a linear layer over the rows of x, with its bias after a reshape to [2, 3, heads, 12 / heads]."""
    random = np.random.default_rng(0)
    draft = Draft("layer")
    x = draft.input("x", DType.F32, (2, 3, 8))
    rows = draft.add("reshape", x, sizes=(6, 8))
    weight = draft.constant(random.standard_normal((12, 8)).astype(np.float32))
    y = draft.add("linear", rows, weight, None)
    shaped = draft.add("reshape", y, sizes=(2, 3, 12) if heads == 1 else (2, 3, heads, 12 // heads))
    bias: Tensor = draft.constant(random.standard_normal(bias_shape).astype(np.float32))
    draft.output("y", draft.add("binary", *((bias, shaped) if swapped else (shaped, bias)), kind=kind))
    return draft


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("shape", [(12,), (1, 1, 12), (1,), ()])
def test_a_bias_becomes_the_layers(shape: tuple[int, ...], swapped: bool, tmp_path: Path) -> None:
    draft = layer("add", shape, swapped)
    optimise(draft)
    assert [call.op for call in draft.calls if call.op != "reshape"] == ["linear"]
    plain, fused = tmp_path / "plain.psm", tmp_path / "fused.psm"
    write_network(layer("add", shape, swapped), plain, optimised=False)
    write_network(layer("add", shape, swapped), fused)
    x = np.random.default_rng(1).standard_normal((2, 3, 8)).astype(np.float32)
    with open_predictor(plain, threads=1) as one, open_predictor(fused, threads=1) as other:
        assert one.run([x])[0].tobytes() == other.run([x])[0].tobytes()


@pytest.mark.parametrize(("shape", "heads"), [((3, 12), 1), ((4,), 3), ((3, 4), 3)])
def test_other_constants_stay(shape: tuple[int, ...], heads: int) -> None:
    """A number of each row, and channels that the reshape splits."""
    draft = layer("add", shape, heads=heads)
    optimise(draft)
    assert [call.op for call in draft.calls if call.op != "reshape"] == ["linear", "binary"]
