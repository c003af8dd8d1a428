"""Draws what each unit of weights costs: for each layer a bar for each kind of matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.bench.charts.svg import NUM_COLORS, Box, Canvas, Scale, fitted, number

__all__ = ["HEAD", "draw_sensitivity"]

HEAD: Final = "head"
"""The name of the layer of weights outside of layers."""
_WIDTH, _TOP, _LEFT, _RIGHT, _BAR = 760, 96, 72, 24, 10


def draw_sensitivity(losses: Mapping[str, Mapping[str, float]], title: str, about: str, unit: str) -> str:
    """Return an SVG of losses by layer and kind; ``unit`` is the name of the axis."""
    kinds = list(dict.fromkeys(kind for of in losses.values() for kind in of))
    colors = {kind: f"c{index % NUM_COLORS}" for index, kind in enumerate(kinds)}
    height = _TOP + sum(_BAR * len(of) + 14 for of in losses.values()) + 52
    canvas = Canvas(_WIDTH, height)
    canvas.text(24, 26, fitted(title, 16, _WIDTH - 48), size=16, bold=True)
    canvas.text(24, 46, fitted(about, 12, _WIDTH - 48), "faint", size=12)
    x = 24.0
    for kind in kinds:
        canvas.bar(Box(x, 62, x + 12, 74), colors[kind])
        x = canvas.text(x + 18, 73, fitted(kind, 12, 200), size=12).right + 18
    values = [value for of in losses.values() for value in of.values()]
    scale = Scale(min(0.0, *values), max(0.0, *values) * 1.02 or 1e-9, _LEFT, _WIDTH - _RIGHT)
    bottom = height - 44.0
    for tick in scale.ticks():
        canvas.line([(scale(tick), _TOP - 8), (scale(tick), bottom)], "grid")
        canvas.text(scale(tick), bottom + 16, number(tick), "faint", size=11, anchor="middle")
    canvas.text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 34, unit, "faint", size=12, anchor="middle")
    y = float(_TOP)
    for layer, of in losses.items():
        middle = y + _BAR * len(of) / 2
        canvas.text(_LEFT - 8, middle + 4, layer if layer == HEAD else f"layer {layer}", size=12, anchor="end")
        for kind, value in of.items():
            ends = sorted((scale(0), scale(value)))
            canvas.bar(Box(ends[0], y, ends[1], y + _BAR - 2), colors[kind], f"{kind}: {value:+.3f}")
            y += _BAR
        y += 14
    canvas.line([(scale(0), _TOP - 8), (scale(0), bottom)], "faint")
    return canvas.svg()
