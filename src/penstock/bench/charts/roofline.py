"""Draws a profile as SVG: the kinds of op under the roofline of the machine.

The roofline model: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.bench.charts.svg import (
    CHAR_WIDTH,
    LEADER_LEN,
    Box,
    Canvas,
    Scale,
    distance,
    fitted,
    line_boxes,
    nearest,
    number,
    place_label,
    spread,
)
from penstock.bench.open_model import describe_threads

if TYPE_CHECKING:
    from penstock.bench.phase_report import PhaseReport, ProfileReport, Row

__all__ = ["draw_roofline"]

_WIDTH, _HEIGHT = 960, 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 136, 92, 64
_COLORS: Final = {"prefill": "c1", "mixed": "c2", "decode": "c0"}
_SIZE: Final = 13
_LINE_HEIGHT: Final = _SIZE * 1.2
_NAME_AT: Final = (0.22, 0.35, 0.5, 0.12, 0.65, 0.8)
"""Positions for the label of the memory line, as fractions of its length; the first one without a circle is used."""
_MIN_SHARE = 0.002
"""Ops with a smaller share of the step are not drawn."""
_PLOT: Final = Box(_LEFT, _TOP, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM)


@dataclass(frozen=True)
class _Point:
    phase: str
    label: str
    intensity: float
    rate: float
    share: float


@dataclass(frozen=True)
class _Roofline:
    """The measured limits, and the scales that map operations per byte and operations per second to pixels."""

    bandwidth: float
    peaks: dict[str, float]
    across: Scale
    up: Scale

    @property
    def highest(self) -> float:
        """The highest peak of arithmetic."""
        return max(self.peaks.values())

    def at(self, intensity: float, rate: float) -> tuple[float, float]:
        """Return the pixels of a point."""
        return self.across(intensity), self.up(rate)

    def memory_line(self) -> list[tuple[float, float]]:
        """Return the ends of the memory line: where it enters the plot, and the ridge."""
        start = max(self.across.low, self.up.low / self.bandwidth)
        return [self.at(start, start * self.bandwidth), self.at(self.highest / self.bandwidth, self.highest)]

    def peak_line(self, peak: float) -> list[tuple[float, float]]:
        """Return the ends of the line of a peak: from the memory line to the right."""
        return [self.at(peak / self.bandwidth, peak), (_PLOT.right, self.up(peak))]


def draw_roofline(report: ProfileReport, model: str) -> str:
    """Return the SVG: the measured limits, and a circle per kind of op whose area is its share of the time."""
    points = [point for phase in report.phases for point in _points(phase)]
    used = {row.peak for phase in report.phases for row in phase.kinds if row.num_ops}
    peaks = {name: max(phase.ops_per_s[name] for phase in report.phases) for name in ("int8", "bf16", "f32")}
    limits = _limits(
        points,
        {name: value for name, value in peaks.items() if name in used or not used},
        max(phase.read_bytes_per_s for phase in report.phases),
    )
    canvas = Canvas(_WIDTH, _HEIGHT)
    _title(canvas, report, model)
    _axes(canvas, limits)
    circles = [(*limits.at(p.intensity, p.rate), max(3.5, 30 * math.sqrt(p.share))) for p in points]
    soft = [Box(x - r, y - r, x + r, y + r) for x, y, r in circles]
    hard = _draw_limits(canvas, limits, soft)
    _draw_points(canvas, list(zip(circles, points, strict=True)), hard, soft)
    return canvas.svg()


def _limits(points: Sequence[_Point], peaks: dict[str, float], bandwidth: float) -> _Roofline:
    """Return the limits with scales that end a little beyond the points and the ridge."""
    ridges = [peak / bandwidth for peak in peaks.values()]
    intensities = [point.intensity for point in points] + ridges
    low_x, high_x = min(intensities) / 1.6, max(intensities) * 1.6
    rates = [point.rate for point in points] + list(peaks.values())
    low_y, high_y = min(rates) / 1.6, max(rates) * 1.6
    across = Scale(low_x, high_x, _PLOT.left, _PLOT.right, is_log=True)
    return _Roofline(bandwidth, peaks, across, Scale(low_y, high_y, _PLOT.bottom, _PLOT.top, is_log=True))


def _points(phase: PhaseReport) -> Iterator[_Point]:
    for row in phase.kinds:
        share = row.seconds / phase.wall_s
        if row.num_ops and row.num_bytes and row.busy_seconds and share >= _MIN_SHARE:
            name = row.name.removeprefix("linear ")
            label = f"{name} {share:.0%}" if share >= 0.01 else name
            yield _Point(phase.phase, label, row.num_ops / row.num_bytes, _rate(row), share)


def _rate(row: Row) -> float:
    return row.num_ops / row.busy_seconds


def _title(canvas: Canvas, report: ProfileReport, model: str) -> None:
    threads = describe_threads(report.num_threads)
    title = f"{model}: {report.network}, {report.scheme}, {report.cpu_level} x {threads}"
    canvas.text(_LEFT, 32, fitted(title, 18, _WIDTH - 24 - _LEFT), size=18, bold=True)
    x = float(_LEFT)
    for phase in report.phases:
        seconds = phase.plain_s or phase.wall_s
        if phase.phase != "decode":
            text = f"{phase.phase}: {phase.num_tokens:,} tokens in {seconds * 1e3:,.1f} ms"
        else:
            text = f"decode: batch {phase.num_requests}, context {phase.context:,}, {seconds * 1e3:,.2f} ms a step"
        canvas.circle(x + 6, 56, 6, _COLORS[phase.phase], opacity=0.75)
        x = canvas.text(x + 18, 60, text).right + 24
    note = "area and percentage: share of the phase's time; above the memory line: data from CPU caches"
    canvas.text(_LEFT, 80, note, "faint", size=12)


def _axes(canvas: Canvas, limits: _Roofline) -> None:
    for value in limits.across.ticks(8):
        x = limits.across(value)
        canvas.line([(x, _PLOT.top), (x, _PLOT.bottom)], "grid")
        canvas.text(x, _PLOT.bottom + 20, number(value), "faint", anchor="middle")
    for value in limits.up.ticks(8):
        y = limits.up(value)
        canvas.line([(_PLOT.left, y), (_PLOT.right, y)], "grid")
        canvas.text(_PLOT.left - 8, y + 4, number(value / 1e9), "faint", anchor="end")
    canvas.text((_PLOT.left + _PLOT.right) / 2, _HEIGHT - 18, "operations per byte", anchor="middle")
    canvas.turned_text(20, (_PLOT.top + _PLOT.bottom) / 2, "GOP/s", -90)


def _draw_limits(canvas: Canvas, limits: _Roofline, soft: Sequence[Box]) -> list[Box]:
    """Draw the memory line and the peaks with their names, and return the boxes that labels avoid.

    ``soft``: the boxes of the circles; only the label of the memory line avoids them.
    """
    memory = limits.memory_line()
    canvas.line(memory, "ink", "stroke-width='2'")
    hard = list(line_boxes(memory))
    peaks = list(limits.peaks.items())
    heights = spread([limits.up(peak) + 4 for _, peak in peaks], _LINE_HEIGHT, _PLOT.top + _SIZE, _PLOT.bottom)
    for (name, peak), height in zip(peaks, heights, strict=True):
        line = limits.peak_line(peak)
        canvas.line(line, "ink", "stroke-width='2'" if peak == limits.highest else "stroke-dasharray='6 4'")
        hard += line_boxes(line)
        if abs(height - 4 - line[1][1]) > 3:
            canvas.line([line[1], (_PLOT.right + 10, height - 4)], "faint")
        canvas.text(_PLOT.right + 12, height, f"{name} {number(peak / 1e9)} GOP/s")
    hard += _name_memory(canvas, memory, f"memory {number(limits.bandwidth / 1e9)} GB/s", (hard, soft))
    return hard


def _name_memory(
    canvas: Canvas, line: Sequence[tuple[float, float]], text: str, obstacles: tuple[list[Box], Sequence[Box]]
) -> list[Box]:
    """Write the name of the memory line along its upper side, and return the boxes that it covers.

    ``obstacles``: boxes of lines, and of circles.
    """
    hard, soft = obstacles
    (x1, y1), (x2, y2) = line
    length, half, lift = math.hypot(x2 - x1, y2 - y1), len(text) * _SIZE * CHAR_WIDTH / 2, 5
    if length < 4 * half:
        _label(canvas, (text, "ink"), line[0], 2, (hard, []), soft)
        return []
    angle = math.atan2(y2 - y1, x2 - x1)
    candidates = []
    for share in _NAME_AT:
        share = min(max(share, half / length), 1 - half / length)
        x = x1 + (x2 - x1) * share + 10 * math.sin(angle)
        y = y1 + (y2 - y1) * share - 10 * math.cos(angle)
        cx, cy = x + lift * math.sin(angle), y - lift * math.cos(angle)
        along = half * math.cos(angle), half * math.sin(angle)
        boxes = list(line_boxes([(cx - along[0], cy - along[1]), (cx + along[0], cy + along[1])], 8))
        candidates.append((sum(box.overlap(circle) for box in boxes for circle in soft), x, y, boxes))
    _, x, y, boxes = min(candidates, key=lambda candidate: candidate[0])
    canvas.turned_text(x, y, text, math.degrees(angle))
    return boxes


def _draw_points(
    canvas: Canvas,
    points: Sequence[tuple[tuple[float, float, float], _Point]],
    hard: list[Box],
    soft: Sequence[Box],
) -> None:
    """Draw the circles, then the labels, each at a free place near its circle."""
    ordered = sorted(points, key=lambda pair: -pair[1].share)
    for (x, y, radius), point in ordered:
        title = f"{point.label}: {number(point.rate / 1e9)} GOP/s, {number(point.intensity)} operations per byte"
        canvas.circle(x, y, radius, _COLORS[point.phase], title, 0.35)
    texts: list[Box] = []
    for (x, y, radius), point in ordered:
        _label(canvas, (point.label, _COLORS[point.phase]), (x, y), radius, (hard, texts), soft)


def _label(
    canvas: Canvas,
    text: tuple[str, str],
    at: tuple[float, float],
    radius: float,
    obstacles: tuple[list[Box], list[Box]],
    soft: Sequence[Box],
) -> None:
    """Write a label (text, color) near a point, and a line to it from afar.  Leave it out if no place is free.

    ``obstacles``: boxes of lines, and boxes of labels; both grow.
    """
    hard, texts = obstacles
    size = len(text[0]) * _SIZE * CHAR_WIDTH + 2, _LINE_HEIGHT
    box = place_label(at, radius, size, (hard, texts, soft), _PLOT)
    if box is None:
        return
    if distance(box, at) > radius + LEADER_LEN:
        leader = [at, nearest(box, at)]
        canvas.line(leader, text[1], "stroke-opacity='0.5'")
        hard += [piece for piece in line_boxes(leader, 2) if distance(piece, at) > radius]
    canvas.bar(box, "ground")  # hides the grid behind it
    canvas.text(box.left + 1, box.bottom - _SIZE * 0.35, text[0], text[1])
    texts.append(box)
