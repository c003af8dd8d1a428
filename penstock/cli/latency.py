"""Latency against load as a picture: two charts side by side, as SVG."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.online import OnlineReport, RateReport

__all__ = ["draw_latency"]

_WIDTH, _HEIGHT, _TOP, _BOTTOM, _LEFT = 460, 320, 70, 56, 70
_COLORS = {50: "#1d4ed8", 90: "#7c3aed", 99: "#c2410c"}
_INK, _FAINT, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
_TICKS = 5


def draw_latency(report: OnlineReport, title: str) -> str:
    """An SVG: time to the first token, and time between tokens, over the rate of requests; the 50th, 90th and 99th
    percentiles.  The offline run is no point of it: it gives the capacity, a dashed line.
    """
    runs = [run for run in report.runs if run.rate > 0]
    capacity = report.runs[0].requests_per_s
    charts = [
        _chart(runs, capacity, "time to the first token, ms", lambda run: run.first_token_s, 0),
        _chart(runs, capacity, "time between tokens, ms", lambda run: run.between_tokens_s, _WIDTH),
    ]
    about = f"{report.network}, {report.scheme}, {report.cpu_level} x {report.num_threads} threads"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {2 * _WIDTH} {_HEIGHT}' {_FONT}>",
            f"<rect width='{2 * _WIDTH}' height='{_HEIGHT}' fill='white'/>",
            f"<text x='24' y='26' font-size='16' font-weight='600' fill='{_INK}'>{escape(title)}</text>",
            f"<text x='24' y='44' font-size='12' fill='{_FAINT}'>{escape(about)}; "
            f"{report.trace.num_requests} requests, Poisson arrivals</text>",
            *charts,
            "</svg>",
        ]
    )


def _chart(
    runs: list[RateReport], capacity: float, name: str, pick: Callable[[RateReport], dict[int, float]], left: int
) -> str:
    most_x = _nice(max([capacity, *(run.rate for run in runs)]))
    most_y = _nice(max([1e-6, *(1e3 * max(pick(run).values()) for run in runs)]))
    x0, x1, y0, y1 = left + _LEFT, left + _WIDTH - 56, _HEIGHT - _BOTTOM, _TOP

    def at(x: float, y: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * x / most_x, y0 + (y1 - y0) * y / most_y

    parts = [f"<text x='{x0}' y='{_TOP - 10}' font-size='13' fill='{_INK}'>{name}</text>"]
    for tick in range(_TICKS + 1):
        x, y = at(most_x * tick / _TICKS, most_y * tick / _TICKS)
        parts += [
            f"<line x1='{x0}' y1='{y:.1f}' x2='{x1}' y2='{y:.1f}' stroke='{_GRID}'/>",
            f"<text x='{x0 - 8}' y='{y + 4:.1f}' font-size='11' text-anchor='end' fill='{_FAINT}'>"
            f"{most_y * tick / _TICKS:g}</text>",
            f"<text x='{x:.1f}' y='{y0 + 16}' font-size='11' text-anchor='middle' fill='{_FAINT}'>"
            f"{most_x * tick / _TICKS:g}</text>",
        ]
    parts.append(
        f"<text x='{(x0 + x1) / 2:.1f}' y='{y0 + 36}' font-size='12' text-anchor='middle' fill='{_FAINT}'>"
        "requests per second</text>"
    )
    x, _ = at(capacity, 0)
    parts += [
        f"<line x1='{x:.1f}' y1='{y0}' x2='{x:.1f}' y2='{y1}' stroke='{_FAINT}' stroke-dasharray='4 4'/>",
        f"<text x='{x - 5:.1f}' y='{y1 + 12}' font-size='11' text-anchor='end' fill='{_FAINT}'>capacity</text>",
    ]
    last_label = float("inf")
    for percentile, color in sorted(_COLORS.items()):
        points = [at(run.rate, 1e3 * pick(run)[percentile]) for run in runs]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f"<polyline points='{line}' fill='none' stroke='{color}' stroke-width='2'/>")
        parts += [f"<circle cx='{px:.1f}' cy='{py:.1f}' r='3.5' fill='{color}'/>" for px, py in points]
        if points:
            last_label = min(points[-1][1] + 4, last_label - 14)  # upwards, never one over another
            parts.append(
                f"<text x='{points[-1][0] + 8:.1f}' y='{last_label:.1f}' font-size='12' fill='{color}'>"
                f"p{percentile}</text>"
            )
    return "\n".join(parts)


def _nice(value: float) -> float:
    """The next number of the form 1, 2 or 5 times a power of ten."""
    power = 1e-9
    while True:
        for factor in (1, 2, 5):
            if factor * power >= value:
                return factor * power
        power *= 10
