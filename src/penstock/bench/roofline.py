"""Draws a profile as SVG: the kinds of op under the roofline of the machine.

The roofline model: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from penstock.bench.svg import outlined

if TYPE_CHECKING:
    from penstock.bench.profile import PhaseReport, ProfileReport, Row

__all__ = ["draw_roofline"]

_WIDTH, _HEIGHT = 960, 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 40, 92, 64
_COLORS = {"prefill": "#c2410c", "decode": "#1d4ed8"}
_INK, _FAINT, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
_TEXT_HEIGHT, _TEXT_WIDTH = 16, 7.6
_NAME_AT = 0.22
"""The position of the label along the memory line, as a share of its length."""
_MIN_SHARE = 0.002
"""Ops with a smaller share of the step are not drawn."""


@dataclass(frozen=True)
class _Point:
    phase: str
    label: str
    intensity: float
    rate: float
    share: float


@dataclass
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: _Box) -> float:
        """Return the area of the intersection."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide * high if wide > 0 and high > 0 else 0.0


class _Scale:
    """Maps operations per byte and operations per second to pixels, both logarithmically."""

    def __init__(self, points: list[_Point], roofs: dict[str, float], bandwidth: float) -> None:
        ridge = max(roofs.values()) / bandwidth
        self.low_x = 10 ** math.floor(math.log10(min([p.intensity for p in points] + [1.0]) * 0.8))
        self.high_x = max([p.intensity for p in points] + [ridge]) * 4
        lowest = min([p.rate for p in points] + [bandwidth * self.low_x * 4])
        self.low_y = 10 ** math.floor(math.log10(lowest * 0.8))
        self.high_y = max(roofs.values()) * 1.8

    def x(self, intensity: float) -> float:
        """Return the pixels from the left edge."""
        part = math.log(intensity / self.low_x) / math.log(self.high_x / self.low_x)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def y(self, rate: float) -> float:
        """Return the pixels from the top edge."""
        part = math.log(rate / self.low_y) / math.log(self.high_y / self.low_y)
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)


def draw_roofline(report: ProfileReport, model: str) -> str:
    """Return the SVG: the measured limits, and a circle per kind of op whose area is its share of the time."""
    points = [point for phase in report.phases for point in _points(phase)]
    used = {row.peak for phase in report.phases for row in phase.kinds if row.num_ops}
    roofs = {name: max(phase.ops_per_s[name] for phase in report.phases) for name in ("int8", "bf16", "f32")}
    roofs = {name: value for name, value in roofs.items() if name in used}
    bandwidth = max(phase.read_bytes_per_s for phase in report.phases)
    scale = _Scale(points, roofs, bandwidth)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' "
        f"height='{_HEIGHT}' {_FONT} font-size='13'>",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='white'/>",
        *_title(report, model),
        *_grid(scale),
        *_roofs(scale, roofs, bandwidth),
        *_draw_points(scale, points, _roof_boxes(scale, roofs, bandwidth)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _points(phase: PhaseReport) -> Iterator[_Point]:
    for row in phase.kinds:
        share = row.seconds / phase.wall_s
        if row.num_ops and row.num_bytes and row.busy_seconds and share >= _MIN_SHARE:
            name = row.name.removeprefix("linear ")
            label = f"{name} {share:.0%}" if share >= 0.01 else name
            yield _Point(phase.phase, label, row.num_ops / row.num_bytes, _rate(row), share)


def _rate(row: Row) -> float:
    return row.num_ops / row.busy_seconds


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"


def _title(report: ProfileReport, model: str) -> Iterator[str]:
    threads = f"{report.num_threads} thread{'s' if report.num_threads > 1 else ''}"
    yield _text(
        _LEFT,
        32,
        f"{model}: {report.network}, {report.scheme}, {report.cpu_level} x {threads}",
        f"font-size='18' font-weight='600' fill='{_INK}'",
    )
    x = float(_LEFT)
    for phase in report.phases:
        if phase.phase == "prefill":
            text = f"prefill: {phase.num_tokens:,} tokens in {phase.plain_s * 1e3:,.1f} ms"
        else:
            text = (
                f"decode: batch {phase.num_requests}, context {phase.context:,}, {phase.plain_s * 1e3:,.2f} ms a step"
            )
        yield f"<circle cx='{x + 6:.0f}' cy='56' r='6' fill='{_COLORS[phase.phase]}' fill-opacity='0.75'/>"
        yield _text(x + 18, 60, text, f"fill='{_INK}'")
        x += 48 + len(text) * _TEXT_WIDTH
    note = "area and percentage: share of the phase's time; above the memory line: data from CPU caches"
    yield _text(_LEFT, 80, note, f"fill='{_FAINT}' font-size='12'")


def _decades(low: float, high: float) -> Iterator[float]:
    exponent = math.ceil(math.log10(low) - 1e-9)
    while 10.0**exponent <= high:
        yield 10.0**exponent
        exponent += 1


def _grid(scale: _Scale) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in _decades(scale.low_x, scale.high_x):
        x = scale.x(value)
        yield f"<path d='M{x:.1f} {_TOP}V{bottom}' stroke='{_GRID}'/>"
        yield _text(x, bottom + 20, f"{value:,g}", f"text-anchor='middle' fill='{_FAINT}'")
    for value in _decades(scale.low_y, scale.high_y):
        y = scale.y(value)
        yield f"<path d='M{_LEFT} {y:.1f}H{right}' stroke='{_GRID}'/>"
        yield _text(_LEFT - 8, y + 4, f"{value / 1e9:,g}", f"text-anchor='end' fill='{_FAINT}'")
    middle = (_LEFT + right) / 2
    yield _text(middle, _HEIGHT - 18, "operations per byte", f"text-anchor='middle' fill='{_INK}'")
    turn = f"transform='rotate(-90 20 {(_TOP + bottom) / 2:.0f})' text-anchor='middle' fill='{_INK}'"
    yield _text(20, (_TOP + bottom) / 2, "GOP/s", turn)


def _roofs(scale: _Scale, roofs: dict[str, float], bandwidth: float) -> Iterator[str]:
    right = scale.high_x
    highest = max(roofs.values())
    start = max(scale.low_x, scale.low_y / bandwidth)
    x1, y1 = scale.x(start), scale.y(start * bandwidth)
    x2, y2 = scale.x(highest / bandwidth), scale.y(highest)
    yield f"<path d='M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}' stroke='{_INK}' stroke-width='2'/>"
    # The label follows the line, where there are few ops.
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    x, y = x1 + (x2 - x1) * _NAME_AT, y1 + (y2 - y1) * _NAME_AT
    yield _text(x, y - 8, f"memory {bandwidth / 1e9:.0f} GB/s", f"text-anchor='middle' fill='{_INK}' "
                f"transform='rotate({angle:.1f} {x:.1f} {y:.1f})'")  # fmt: skip
    for name, peak in roofs.items():
        y = scale.y(peak)
        style = "stroke-width='2'" if peak == highest else "stroke-dasharray='6 4'"
        yield f"<path d='M{scale.x(peak / bandwidth):.1f} {y:.1f}H{scale.x(right):.1f}' stroke='{_INK}' {style}/>"
        yield _text(scale.x(right), y - 7, f"{name} {peak / 1e9:,.0f} GOP/s", f"text-anchor='end' fill='{_INK}'")


def _roof_boxes(scale: _Scale, roofs: dict[str, float], bandwidth: float) -> list[_Box]:
    """Return the boxes of the roofs that labels avoid: their lines, in short pieces, and their names."""
    highest = max(roofs.values())
    ridge = scale.x(highest / bandwidth)
    boxes, intensity = [], scale.low_x
    while scale.x(intensity) < ridge:
        x, y = scale.x(intensity), scale.y(intensity * bandwidth)
        boxes.append(_Box(x - 5, y - 4, x + 5, y + 4))
        intensity *= 1.06
    for peak in roofs.values():
        y = scale.y(peak)
        boxes.append(_Box(_WIDTH - _RIGHT - 110, y - 20, _WIDTH - _RIGHT, y))
        boxes.append(_Box(scale.x(peak / bandwidth), y - 2, _WIDTH - _RIGHT, y + 2))
    return boxes


def _draw_points(scale: _Scale, points: list[_Point], roofs: list[_Box]) -> Iterator[str]:
    """Draw the circles, then the labels, each at the place around its circle that covers least."""
    circles = [(scale.x(p.intensity), scale.y(p.rate), max(3.5, 30 * math.sqrt(p.share))) for p in points]
    for (x, y, radius), point in sorted(zip(circles, points, strict=True), key=lambda both: -both[1].share):
        yield (
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius:.1f}' fill='{_COLORS[point.phase]}' fill-opacity='0.35' "
            f"stroke='{_COLORS[point.phase]}'><title>{escape(point.label)}: {point.rate / 1e9:,.1f} GOP/s, "
            f"{point.intensity:.3g} operations per byte</title></circle>"
        )
    taken = [*roofs, *(_Box(x - r * 0.8, y - r * 0.8, x + r * 0.8, y + r * 0.8) for x, y, r in circles)]
    for (x, y, radius), point in sorted(zip(circles, points, strict=True), key=lambda both: -both[1].share):
        box = min(_places(x, y, radius, len(point.label) * _TEXT_WIDTH), key=lambda place: _cost(place, taken, x, y))
        taken += [box, box]  # a label on a label is worse than on a circle
        near_x, near_y = min(max(x, box.left), box.right), min(max(y, box.top + 4), box.bottom - 2)
        if math.hypot(near_x - x, near_y - y) > radius + 10:
            yield (
                f"<path d='M{x:.1f} {y:.1f}L{near_x:.1f} {near_y:.1f}' stroke='{_COLORS[point.phase]}' "
                "stroke-opacity='0.5'/>"
            )
        yield outlined(box.left, box.bottom - 4, point.label, f"fill='{_COLORS[point.phase]}'", 3)


def _places(x: float, y: float, radius: float, width: float) -> Iterator[_Box]:
    for away in (4, 14, 26, 40, 56, 74, 94, 116):
        for angle in (0, 180, -35, 35, -145, 145, -70, 70, -110, 110):
            reach = radius + away
            cx, cy = x + reach * math.cos(math.radians(angle)), y + reach * math.sin(math.radians(angle))
            left = cx if abs(angle) < 90 else cx - width
            yield _Box(left, cy - _TEXT_HEIGHT / 2, left + width, cy + _TEXT_HEIGHT / 2)


def _cost(box: _Box, taken: list[_Box], x: float, y: float) -> float:
    """Return the cost of a label's place: what it covers, then its distance from the point."""
    inside = _Box(_LEFT, _TOP - 6, _WIDTH - 4, _HEIGHT - _BOTTOM - 2)
    outside = (box.right - box.left) * _TEXT_HEIGHT - box.overlap(inside)
    covered = sum(box.overlap(other) for other in taken)
    near_x, near_y = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
    return 20 * (outside + covered) + math.hypot(near_x - x, near_y - y)
