"""benchmarks/sensitivity.py: which weights are rounded together, and the picture."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from penstock.bench.charts.sensitivity_chart import draw_sensitivity

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import sensitivity  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
LOSSES = {
    "0": {"q|k|v": -0.01, "o": 0.02, "gate|up": 0.25, "down": 0.1},
    "1": {"q|k|v": 0.0, "o": 0.02, "gate|up": 0.2, "down": 0.1},
    "head": {"head": 0.05},
}


def test_groups_of_the_demo_are_its_layers_and_the_head() -> None:
    original = sensitivity.weights_of(ROOT / "demo" / "model")
    rounded = sensitivity.weights_of(ROOT / "demo" / "model", "w4a16")
    assert {sensitivity.group_of(name) for name in original} == {
        ("head", "head"),
        *((str(layer), kind) for layer in range(6) for kind in sensitivity.KINDS),
    }
    assert original.keys() == rounded.keys()
    for name, weight in original.items():
        error = np.abs(rounded[name] - weight).max() / np.abs(weight).max()
        assert 0 < error < 0.2, name


@pytest.mark.parametrize("sign", [1, -1])
def test_the_picture_has_a_bar_for_each_loss(sign: int) -> None:
    losses = {layer: {kind: sign * value for kind, value in of.items()} for layer, of in LOSSES.items()}
    root = ElementTree.fromstring(draw_sensitivity(losses, "title", "about", "change, %"))  # noqa: S314 - our own picture
    width = float(root.get("width", 0))
    bars = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    assert len(bars) == 9
    for bar in bars:
        assert 0 <= float(bar.get("x", -1)) <= float(bar.get("x", 0)) + float(bar.get("width", -1)) <= width
    assert {"layer 0", "layer 1", "head", "gate|up"} <= {one.text for one in root.iter(f"{SVG}text")}


def test_the_table_has_a_row_for_each_layer() -> None:
    lines = sensitivity.table(LOSSES).splitlines()
    assert lines[2] == "| 0 | -0.010 % | +0.020 % | +0.250 % | +0.100 % |"
    assert lines[-1] == "Output head: +0.050 %"
