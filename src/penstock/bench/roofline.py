"""Draws a profile as SVG: the kinds of op under the roofline of the machine.

The roofline model: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.bench.svg import Box, Canvas, Scale, distance, fitted, line_boxes, nearest, number, place_label, text_box

if TYPE_CHECKING:
    from penstock.bench.profile import PhaseReport, ProfileReport, Row

__all__ = ["draw_roofline"]

_WIDTH, _HEIGHT = 960, 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 92, 64
_COLORS: Final = {"prefill": "c1", "decode": "c0"}
_SIZE: Final = 13
_LINE_HEIGHT: Final = _SIZE * 1.2
_NAME_AT = 0.22
"""The position of the label along the memory line, as a share of its length."""
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
    hard = _draw_limits(canvas, limits)
    _draw_points(canvas, limits, points, hard)
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
    threads = f"{report.num_threads} thread{'s' if report.num_threads > 1 else ''}"
    title = f"{model}: {report.network}, {report.scheme}, {report.cpu_level} x {threads}"
    canvas.text(_LEFT, 32, fitted(title, 18, _PLOT.right - _LEFT), size=18, bold=True)
    x = float(_LEFT)
    for phase in report.phases:
        if phase.phase == "prefill":
            text = f"prefill: {phase.num_tokens:,} tokens in {phase.plain_s * 1e3:,.1f} ms"
        else:
            text = (
                f"decode: batch {phase.num_requests}, context {phase.context:,}, {phase.plain_s * 1e3:,.2f} ms a step"
            )
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


def _draw_limits(canvas: Canvas, limits: _Roofline) -> list[Box]:
    """Draw the memory line, the peaks and their names, and return the boxes that labels avoid."""
    memory = limits.memory_line()
    canvas.line(memory, "ink", "stroke-width='2'")
    lines = [list(line_boxes(memory))]
    for peak in limits.peaks.values():
        line = limits.peak_line(peak)
        canvas.line(line, "ink", "stroke-width='2'" if peak == limits.highest else "stroke-dasharray='6 4'")
        lines.append(list(line_boxes(line)))
    hard = [box for boxes in lines for box in boxes]
    free = _PLOT.top
    for name, peak in sorted(limits.peaks.items(), key=lambda item: -item[1]):
        text = f"{name} {number(peak / 1e9)} GOP/s"
        y = max(limits.up(peak) - 8, free + _SIZE)
        hard.append(_name(canvas, text, y, hard))
        free = hard[-1].bottom
    (x1, y1), (x2, y2) = memory
    if math.hypot(x2 - x1, y2 - y1) > 260:
        # The name follows the line, on its upper side.
        angle = math.atan2(y2 - y1, x2 - x1)
        x, y = x1 + (x2 - x1) * _NAME_AT, y1 + (y2 - y1) * _NAME_AT
        x, y = x + 10 * math.sin(angle), y - 10 * math.cos(angle)
        text = f"memory {number(limits.bandwidth / 1e9)} GB/s"
        canvas.turned_text(x, y, text, math.degrees(angle))
        half = len(text) * _SIZE * 0.3
        along = half * math.cos(angle), half * math.sin(angle)
        lift = 5 * math.sin(angle), -5 * math.cos(angle)
        ends = [(x + lift[0] - along[0], y + lift[1] - along[1]), (x + lift[0] + along[0], y + lift[1] + along[1])]
        hard += line_boxes(ends, 8)
    else:
        _label(canvas, (f"memory {number(limits.bandwidth / 1e9)} GB/s", "ink"), memory[0], 2, hard, [])
    return hard


def _name(canvas: Canvas, text: str, y: float, hard: Sequence[Box]) -> Box:
    """Write the name of a peak above the right end of its line, or below it if another line is in the way."""
    above = text_box(_PLOT.right - 4, y, text, _SIZE, "end")
    below = y + 8 + _LINE_HEIGHT
    is_free = not any(above.overlap(box) for box in hard)
    return canvas.text(_PLOT.right - 4, y if is_free else below, text, anchor="end")


def _draw_points(canvas: Canvas, limits: _Roofline, points: Sequence[_Point], hard: list[Box]) -> None:
    """Draw the circles, then the labels, each at a free place near its circle."""
    circles = [(*limits.at(p.intensity, p.rate), max(3.5, 30 * math.sqrt(p.share))) for p in points]
    ordered = sorted(zip(circles, points, strict=True), key=lambda both: -both[1].share)
    for (x, y, radius), point in ordered:
        title = f"{point.label}: {number(point.rate / 1e9)} GOP/s, {number(point.intensity)} operations per byte"
        canvas.circle(x, y, radius, _COLORS[point.phase], title, 0.35)
    soft = [Box(x - r, y - r, x + r, y + r) for x, y, r in circles]
    for (x, y, radius), point in ordered:
        _label(canvas, (point.label, _COLORS[point.phase]), (x, y), radius, hard, soft)


def _label(
    canvas: Canvas,
    text: tuple[str, str],
    at: tuple[float, float],
    radius: float,
    hard: list[Box],
    soft: Sequence[Box],
) -> None:
    """Write a label (text, color) near a point, and a line to it from afar.  Leave it out if no place is free."""
    size = len(text[0]) * _SIZE * 0.6 + 2, _LINE_HEIGHT
    box = place_label(at, radius, size, hard, soft, _PLOT)
    if box is None:
        return
    if distance(box, at) > radius + 10:
        leader = [at, nearest(box, at)]
        canvas.line(leader, text[1], "stroke-opacity='0.5'")
        hard += [piece for piece in line_boxes(leader, 2) if distance(piece, at) > radius]
    canvas.text(box.left + 1, box.bottom - _SIZE * 0.35, text[0], text[1])
    hard.append(box)
