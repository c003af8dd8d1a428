"""SVG charts: a canvas that knows the boxes of its texts, colors for light and dark, axes, and places for labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CHAR_WIDTH", "LEADER_LEN", "NUM_COLORS", "Box", "Canvas", "Scale", "distance", "fitted", "line_boxes", "nearest",
    "number", "place_label", "spread", "text_box",
]  # fmt: skip

CHAR_WIDTH = 0.6
"""The width of a character as a share of the font size; wider than the mean of the fonts of browsers."""
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_LIGHT = {
    "ground": "#ffffff", "ink": "#1f2937", "faint": "#5b6472", "grid": "#e5e7eb",
    "c0": "#1d4ed8", "c1": "#c2410c", "c2": "#7c3aed", "c3": "#0b7285", "c4": "#a21caf", "c5": "#4d7c0f",
}  # fmt: skip
_DARK = {
    "ground": "#1e2129", "ink": "#e5e7eb", "faint": "#a3abb8", "grid": "#373c47",
    "c0": "#8ab4ff", "c1": "#ff9d6c", "c2": "#c4a5ff", "c3": "#5bc0d3", "c4": "#f0a1f5", "c5": "#b5d567",
}  # fmt: skip
NUM_COLORS = 6
LEADER_LEN = 10
"""A label that is farther from its circle, in pixels, gets a line to it."""


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Return the area of the intersection."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide * high if wide > 0 and high > 0 else 0.0

    def contains(self, other: Box) -> bool:
        """Return True if the other box lies within this one."""
        return (
            self.left <= other.left
            and self.top <= other.top
            and self.right >= other.right
            and self.bottom >= other.bottom
        )


@dataclass
class Canvas:
    """The elements of a picture, and the boxes of its texts.

    Colors are classes: "ink", "faint", "grid", and "c0" to "c5" for series.  A style sheet in the picture gives them
    other values where the reader prefers dark colors.
    """

    width: int
    height: int
    parts: list[str] = field(default_factory=list)
    texts: list[Box] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        color: str = "ink",
        *,
        size: int = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> Box:
        """Write a line of text with its baseline at y, and return its box."""
        box = text_box(x, y, text, size, anchor)
        weight = " font-weight='600'" if bold else ""
        self.parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}'{weight} class='fill-{color}'>"
            f"{escape(text)}</text>"
        )
        self.texts.append(box)
        return box

    def turned_text(self, x: float, y: float, text: str, degrees: float, color: str = "ink", size: int = 13) -> None:
        """Write a line of text around its middle, turned."""
        self.parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='middle' class='fill-{color}' "
            f"transform='rotate({degrees:.1f} {x:.1f} {y:.1f})'>{escape(text)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, style: str = "") -> None:
        """Draw a line through points."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f"<path d='M{path}' fill='none' class='stroke-{color}' {style}/>")

    def circle(self, x: float, y: float, radius: float, color: str, title: str = "", opacity: float = 1.0) -> None:
        """Draw a circle; a browser shows the title where the pointer rests."""
        inner = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius:.1f}' fill-opacity='{opacity:g}' "
            f"class='fill-{color} stroke-{color}'>{inner}</circle>"
        )

    def bar(self, box: Box, color: str, title: str = "") -> None:
        """Draw a filled rectangle."""
        inner = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f"<rect x='{box.left:.1f}' y='{box.top:.1f}' width='{box.right - box.left:.1f}' "
            f"height='{box.bottom - box.top:.1f}' class='fill-{color}'>{inner}</rect>"
        )

    def svg(self) -> str:
        """Return the picture."""
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' width='{self.width}' "
            f'height=\'{self.height}\' font-family="{_FONT}" role="img">'
        )
        dark = f"@media (prefers-color-scheme: dark) {{{_rules(_DARK)}}}"
        ground = f"<rect width='{self.width}' height='{self.height}' class='fill-ground'/>"
        return "\n".join([head, f"<style>{_rules(_LIGHT)} {dark}</style>", ground, *self.parts, "</svg>"]) + "\n"


def _rules(colors: dict[str, str]) -> str:
    return " ".join(f".fill-{name}{{fill:{value}}} .stroke-{name}{{stroke:{value}}}" for name, value in colors.items())


def fitted(text: str, size: float, width: float) -> str:
    """Return a text that fits into a width, with an ellipsis in its middle if it is cut."""
    most = max(3, int(width / (size * CHAR_WIDTH)))
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}\u2026{text[len(text) - most // 2 :]}"


def text_box(x: float, y: float, text: str, size: float, anchor: str = "start") -> Box:
    """Return the box of a line of text, with a little room around it."""
    width = len(text) * size * CHAR_WIDTH
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return Box(left - 1, y - size * 0.85, left + width + 1, y + size * 0.3)


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels, from ``low`` at ``begin`` to ``high`` at ``end``."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixels of a value."""
        if self.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.begin + part * (self.end - self.begin)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values within the scale, at most ``most``."""
        if self.is_log and self.high >= 10 * self.low:
            return _log_ticks(self.low, self.high, most)
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        while (self.high - self.low) / step > most - 1:
            step *= 2.5 if f"{step:e}".startswith("2") else 2
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**n for n in decades for f in factors if low * 0.999 <= f * 10.0**n <= high * 1.001]
        if len(ticks) <= most:
            return ticks
    skip = math.ceil(len(ticks) / most)
    return ticks[::skip]


def number(value: float) -> str:
    """Return a number as ticks and labels show it: three digits, with commas, or as a power of ten."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.2g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def line_boxes(points: Sequence[tuple[float, float]], reach: float = 4) -> Iterator[Box]:
    """Return small boxes along a line, which labels avoid."""
    for (x1, y1), (x2, y2) in pairwise(points):
        steps = max(1, math.ceil(math.hypot(x2 - x1, y2 - y1) / (2 * reach)))
        for step in range(steps + 1):
            x, y = x1 + (x2 - x1) * step / steps, y1 + (y2 - y1) * step / steps
            yield Box(x - reach, y - reach, x + reach, y + reach)


def place_label(
    at: tuple[float, float],
    radius: float,
    size: tuple[float, float],
    obstacles: tuple[Sequence[Box], Sequence[Box], Sequence[Box]],
    room: Box,
) -> Box | None:
    """Return a free place for a label of a point, near it if possible, or None.

    ``at`` and ``radius``: the point's circle.  ``size``: width and height of the label.  ``obstacles``: lines, texts
    and circles.  The place is within ``room`` and covers no line and no text.  If possible it covers no circle, and the
    line from it to the point crosses no text.
    """
    lines, texts, circles = (_corners(boxes) for boxes in obstacles)
    near = sorted(_near(at, radius, size), key=lambda place: distance(place, at))
    far = sorted(_grid(size, room), key=lambda place: distance(place, at))
    firm = np.concatenate([lines, texts])
    passes = (
        (near, np.concatenate([firm, circles]), texts),
        (near, firm, texts),
        (far, np.concatenate([firm, circles]), texts),
        (far, firm, texts[:0]),
    )
    for places, covered, crossed in passes:
        for box in places:
            if room.contains(box) and not _covers(box, covered) and not _crosses(box, at, radius, crossed):
                return box
    return None


def _corners(boxes: Sequence[Box]) -> NDArray[np.float64]:
    """Return boxes as an array [boxes, 4]."""
    return np.array([(box.left, box.top, box.right, box.bottom) for box in boxes], np.float64).reshape(-1, 4)


def _covers(box: Box, corners: NDArray[np.float64]) -> bool:
    left, top, right, bottom = corners.T
    return bool(np.any((left < box.right) & (right > box.left) & (top < box.bottom) & (bottom > box.top)))


def _crosses(box: Box, at: tuple[float, float], radius: float, texts: NDArray[np.float64]) -> bool:
    """Return True if the line from a label to its point crosses a text."""
    if distance(box, at) <= radius + LEADER_LEN:
        return False
    x, y = (np.linspace(a, b, 60)[:, None] for a, b in zip(at, nearest(box, at), strict=True))
    left, top, right, bottom = texts.T
    return bool(np.any((left < x + 1) & (right > x - 1) & (top < y + 1) & (bottom > y - 1)))


def _near(at: tuple[float, float], radius: float, size: tuple[float, float]) -> Iterator[Box]:
    (x, y), (width, height) = at, size
    for gap in (4, 10, 18, 30, 44, 60, 84):
        for degrees in range(0, 360, 10):
            reach = radius + gap
            cx, cy = x + reach * math.cos(math.radians(degrees)), y + reach * math.sin(math.radians(degrees))
            left = cx if degrees < 90 or degrees > 270 else cx - width
            top = cy - height / 2
            yield Box(left, top, left + width, top + height)


def _grid(size: tuple[float, float], room: Box) -> Iterator[Box]:
    width, height = size
    for row in range(int((room.bottom - room.top) / height * 2) - 1):
        for column in range(int((room.right - room.left - width) / 20) + 1):
            left, top = room.left + 20 * column, room.top + height / 2 * row
            yield Box(left, top, left + width, top + height)


def distance(box: Box, at: tuple[float, float]) -> float:
    """Return the distance of a point from a box."""
    x, y = nearest(box, at)
    return math.hypot(x - at[0], y - at[1])


def nearest(box: Box, at: tuple[float, float]) -> tuple[float, float]:
    """Return the place of a box that is nearest to a point."""
    return min(max(at[0], box.left), box.right), min(max(at[1], box.top), box.bottom)


def spread(targets: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions near the wanted ones, at least ``gap`` apart and between ``low`` and ``high`` if they fit."""
    order = sorted(range(len(targets)), key=lambda index: targets[index])
    gap = min(gap, (high - low) / max(1, len(targets) - 1))
    placed = [min(max(targets[index], low), high) for index in order]
    for number_of, _ in enumerate(placed[1:], 1):
        placed[number_of] = max(placed[number_of], placed[number_of - 1] + gap)
    limit = high
    for number_of in reversed(range(len(placed))):
        placed[number_of] = min(placed[number_of], limit)
        limit = placed[number_of] - gap
    positions = [0.0] * len(targets)
    for index, position in zip(order, placed, strict=True):
        positions[index] = position
    return positions
