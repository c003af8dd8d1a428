"""Draws latency over load: two charts side by side, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.bench.charts.svg import NUM_COLORS, Box, Canvas, Scale, fitted, number, spread, text_box
from penstock.bench.open_model import describe_threads

if TYPE_CHECKING:
    from penstock.bench.online import OnlineReport, RateReport
    from penstock.cluster.simulate import SimulationReport

__all__ = ["Line", "draw_charts", "draw_latency", "draw_policies"]

_WIDTH, _HEIGHT, _TOP, _BOTTOM, _LEFT = 460, 348, 98, 56, 74
_PERCENTILES = (50, 90, 99)
_LABEL_SIZE, _TICK_SIZE = 12, 11
_LOG_RATIO = 50
"""Latencies that differ by more than this factor are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Line:
    """A line of a chart; its points are (requests per second, milliseconds), or those of the chart's axes."""

    label: str
    points: Sequence[tuple[float, float]]


def draw_latency(report: OnlineReport, title: str) -> str:
    """Return an SVG of the time to the first token and the time between tokens over the rate of requests.

    Lines show the 50th, 90th and 99th percentile.  The offline run gives the capacity, drawn as a dashed line.
    """
    runs = [run for run in report.runs if run.rate > 0]

    def lines(pick: Callable[[RateReport], dict[int, float]]) -> list[Line]:
        return [
            Line(f"p{percentile}", [(run.rate, 1e3 * pick(run)[percentile]) for run in runs])
            for percentile in _PERCENTILES
        ]

    about = (
        f"{report.network}, {report.scheme}, {report.cpu_level} x "
        f"{describe_threads(report.num_threads, report.num_ranks)}; "
        f"{report.trace.num_requests} requests, Poisson arrivals"
    )
    first, between = lines(lambda run: run.first_token_s), lines(lambda run: run.between_tokens_s)
    return draw_charts(title, about, report.runs[0].requests_per_s, first, between)


def draw_policies(reports: Sequence[SimulationReport], title: str) -> str:
    """Return an SVG of simulated clusters: first token (90th percentile) and cached prompt tokens over the replicas.

    A line is a policy.
    """

    def lines(pick: Callable[[SimulationReport], float]) -> list[Line]:
        policies = dict.fromkeys(report.policy for report in reports)
        points = {name: sorted((r.replicas, pick(r)) for r in reports if r.policy == name) for name in policies}
        return [Line(name, of_policy) for name, of_policy in points.items()]

    costs = reports[0].costs
    about = f"{costs['model']}, {costs['machine']}; {reports[0].requests:,} requests"
    first, cached = lines(lambda report: 1e3 * report.ttft["p90"]), lines(lambda report: 100 * report.hit_rate)
    canvas = _canvas(title, about, first)
    axes = _Axes("90th percentile of the time to the first token, ms", "replicas", "ms", "replicas")
    _chart(canvas, axes, None, first, 0)
    axes = _Axes("prompt tokens from the caches, %", "replicas", "%", "replicas")
    _chart(canvas, axes, None, cached, _WIDTH)
    return canvas.svg()


@dataclass(frozen=True)
class _Axes:
    """The name of a chart, that of its horizontal axis, and the units of both."""

    name: str
    across: str = "requests per second"
    unit: str = "ms"
    across_unit: str = "requests/s"


def draw_charts(title: str, about: str, capacity: float, first: Sequence[Line], between: Sequence[Line]) -> str:
    """Return an SVG of two charts: time to the first token, and time between tokens, over the rate of requests."""
    canvas = _canvas(title, about, max(first, between, key=len))
    _chart(canvas, _Axes("time to the first token, ms"), capacity, first, 0)
    _chart(canvas, _Axes("time between tokens, ms"), capacity, between, _WIDTH)
    return canvas.svg()


def _canvas(title: str, about: str, lines: Sequence[Line]) -> Canvas:
    """Return a canvas for two charts with so many lines, under a title."""
    canvas = Canvas(2 * _WIDTH, max(_HEIGHT, _TOP + _BOTTOM + 18 * len(lines)))
    width = 2 * _WIDTH - 48
    canvas.text(24, 26, fitted(title, 16, width), size=16, bold=True)
    canvas.text(24, 46, fitted(about, 12, width), "faint", size=12)
    return canvas


def _chart(canvas: Canvas, axes: _Axes, capacity: float | None, lines: Sequence[Line], left: int) -> None:
    labels = max([len(line.label) for line in lines] or [0]) * _LABEL_SIZE * 0.6
    plot = Box(left + _LEFT, _TOP, left + _WIDTH - 24 - labels, canvas.height - _BOTTOM)
    rates = [capacity or 0.0, *(x for line in lines for x, _ in line.points)]
    values = [y for line in lines for _, y in line.points if y > 0] or [1.0]
    is_log = axes.unit != "%" and max(values) > _LOG_RATIO * min(values)
    low = min(values) * 0.8 if is_log else 0.0
    across = Scale(0, max(max(rates), 1e-9), plot.left, plot.right)
    up = Scale(low, max(values) * (1.25 if is_log else 1.0), plot.bottom, plot.top, is_log)
    canvas.text(plot.left, _TOP - 28, f"{axes.name}{' (logarithmic)' if is_log else ''}")
    _axes(canvas, plot, across, up)
    middle = (plot.left + plot.right) / 2
    canvas.text(middle, plot.bottom + 38, axes.across, "faint", size=_LABEL_SIZE, anchor="middle")
    if capacity is not None:
        _mark_capacity(canvas, plot, across(capacity))
    _draw_lines(canvas, plot, axes, lines, lambda point: (across(point[0]), up(max(point[1], low or point[1]))))


def _mark_capacity(canvas: Canvas, plot: Box, x: float) -> None:
    canvas.line([(x, plot.bottom), (x, plot.top)], "faint", "stroke-dasharray='4 4'")
    half = len("capacity") * _TICK_SIZE * 0.3
    canvas.text(
        min(max(x, plot.left + half), plot.right - half),
        plot.top - 8,
        "capacity",
        "faint",
        size=_TICK_SIZE,
        anchor="middle",
    )


def _axes(canvas: Canvas, plot: Box, across: Scale, up: Scale) -> None:
    for value in up.ticks():
        canvas.line([(plot.left, up(value)), (plot.right, up(value))], "grid")
        canvas.text(plot.left - 8, up(value) + 4, number(value), "faint", size=_TICK_SIZE, anchor="end")
    free = float("-inf")
    for value in across.ticks():
        box = text_box(across(value), plot.bottom + 16, number(value), _TICK_SIZE, "middle")
        if box.left > free:
            canvas.text(across(value), plot.bottom + 16, number(value), "faint", size=_TICK_SIZE, anchor="middle")
            free = box.right + 4


def _draw_lines(
    canvas: Canvas,
    plot: Box,
    axes: _Axes,
    lines: Sequence[Line],
    at: Callable[[tuple[float, float]], tuple[float, float]],
) -> None:
    """Draw the lines, with labels in the margin at the height of their last points."""
    polylines = [(line, [at(point) for point in line.points]) for line in lines if line.points]
    heights = spread([points[-1][1] + 4 for _, points in polylines], _LABEL_SIZE * 1.3, plot.top + 6, plot.bottom)
    for index, ((line, points), height) in enumerate(zip(polylines, heights, strict=True)):
        color = f"c{index % NUM_COLORS}"
        canvas.line(points, color, "stroke-width='2'")
        for (x, y), (rate, value) in zip(points, line.points, strict=True):
            canvas.circle(
                x, y, 3.5, color, f"{line.label}: {number(value)} {axes.unit} at {number(rate)} {axes.across_unit}"
            )
        x, y = points[-1]
        if plot.right - x > 4 or abs(height - 4 - y) > 6:
            canvas.line([(x, y), (plot.right + 6, height - 4)], color, "stroke-opacity='0.4'")
        canvas.text(plot.right + 10, height, line.label, color, size=_LABEL_SIZE)
