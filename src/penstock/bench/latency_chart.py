"""Draws latency over load: two charts side by side, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from penstock.bench.svg import outlined

if TYPE_CHECKING:
    from penstock.bench.online import OnlineReport, RateReport

__all__ = ["Line", "draw_charts", "draw_latency"]

_WIDTH, _HEIGHT, _TOP, _BOTTOM, _LEFT, _RIGHT = 460, 348, 98, 56, 70, 68
_COLORS = {50: "#1d4ed8", 90: "#7c3aed", 99: "#c2410c"}
_INK, _FAINT, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
_TICKS = 5


@dataclass(frozen=True)
class Line:
    """A line of a chart; its points are (requests per second, milliseconds)."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]


def draw_latency(report: OnlineReport, title: str) -> str:
    """Return an SVG of the time to the first token and the time between tokens over the rate of requests.

    Lines show the 50th, 90th and 99th percentile.  The offline run gives the capacity, drawn as a dashed line.
    """
    runs = [run for run in report.runs if run.rate > 0]

    def lines(pick: Callable[[RateReport], dict[int, float]]) -> list[Line]:
        return [
            Line(f"p{percentile}", color, [(run.rate, 1e3 * pick(run)[percentile]) for run in runs])
            for percentile, color in _COLORS.items()
        ]

    about = (
        f"{report.network}, {report.scheme}, {report.cpu_level} x {report.num_threads} threads; "
        f"{report.trace.num_requests} requests, Poisson arrivals"
    )
    first, between = lines(lambda run: run.first_token_s), lines(lambda run: run.between_tokens_s)
    return draw_charts(title, about, report.runs[0].requests_per_s, first, between)


def draw_charts(title: str, about: str, capacity: float, first: Sequence[Line], between: Sequence[Line]) -> str:
    """Return an SVG of two charts: time to the first token, and time between tokens, over the rate of requests."""
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {2 * _WIDTH} {_HEIGHT}' {_FONT}>",
            f"<rect width='{2 * _WIDTH}' height='{_HEIGHT}' fill='white'/>",
            f"<text x='24' y='26' font-size='16' font-weight='600' fill='{_INK}'>{escape(title)}</text>",
            f"<text x='24' y='44' font-size='12' fill='{_FAINT}'>{escape(about)}</text>",
            _chart("time to the first token, ms", capacity, first, 0),
            _chart("time between tokens, ms", capacity, between, _WIDTH),
            "</svg>",
        ]
    )


def _chart(name: str, capacity: float, lines: Sequence[Line], left: int) -> str:
    max_x = _nice(max([capacity, *(x for line in lines for x, _ in line.points)]))
    max_y = _nice(max([1e-3, *(y for line in lines for _, y in line.points)]))
    x0, x1, y0, y1 = left + _LEFT, left + _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, _TOP

    def at(x: float, y: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * x / max_x, y0 + (y1 - y0) * y / max_y

    parts = [f"<text x='{x0}' y='{_TOP - 24}' font-size='13' fill='{_INK}'>{name}</text>"]
    for tick in range(_TICKS + 1):
        x, y = at(max_x * tick / _TICKS, max_y * tick / _TICKS)
        parts += [
            f"<line x1='{x0}' y1='{y:.1f}' x2='{x1}' y2='{y:.1f}' stroke='{_GRID}'/>",
            f"<text x='{x0 - 8}' y='{y + 4:.1f}' font-size='11' text-anchor='end' fill='{_FAINT}'>"
            f"{max_y * tick / _TICKS:g}</text>",
            f"<text x='{x:.1f}' y='{y0 + 16}' font-size='11' text-anchor='middle' fill='{_FAINT}'>"
            f"{max_x * tick / _TICKS:g}</text>",
        ]
    parts.append(
        f"<text x='{(x0 + x1) / 2:.1f}' y='{y0 + 36}' font-size='12' text-anchor='middle' fill='{_FAINT}'>"
        "requests per second</text>"
    )
    x, _ = at(capacity, 0)
    parts += [
        f"<line x1='{x:.1f}' y1='{y0}' x2='{x:.1f}' y2='{y1}' stroke='{_FAINT}' stroke-dasharray='4 4'/>",
        f"<text x='{x:.1f}' y='{y1 - 6}' font-size='11' text-anchor='middle' fill='{_FAINT}'>capacity</text>",
    ]
    return "\n".join(parts + _lines([(line, [at(*point) for point in line.points]) for line in lines]))


def _lines(placed: Sequence[tuple[Line, list[tuple[float, float]]]]) -> list[str]:
    """Draw the lines, with labels at their right ends that do not overlap."""
    parts = []
    last_label = float("inf")
    for line, points in sorted(placed, key=lambda pair: -pair[1][-1][1] if pair[1] else 0.0):
        text = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f"<polyline points='{text}' fill='none' stroke='{line.color}' stroke-width='2'/>")
        parts += [f"<circle cx='{px:.1f}' cy='{py:.1f}' r='3.5' fill='{line.color}'/>" for px, py in points]
        if points:
            last_label = min(points[-1][1] + 4, last_label - 14)
            parts.append(outlined(points[-1][0] + 8, last_label, line.label, f"font-size='12' fill='{line.color}'", 4))
    return parts


def _nice(value: float) -> float:
    """Return the smallest number of the form 1, 2 or 5 times a power of ten that is at least ``value``."""
    power = 1e-9
    while True:
        for factor in (1, 2, 5):
            if factor * power >= value:
                return factor * power
        power *= 10
