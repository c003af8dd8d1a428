"""Draws what a model costs and gains beside another one: bars of the figures, and the divergence over the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.bench.charts.svg import Box, Canvas, Scale, fitted, number
from penstock.bench.quality.verdict import change_in_percent, names_of

if TYPE_CHECKING:
    from penstock.bench.quality.report import Divergence, ModelReport, QualityReport

__all__ = ["draw_quality"]

_WIDTH, _MIDDLE, _TOP, _BAR = 920, 440, 112, 16
_PLOT: Final = Box(_MIDDLE + 72, _TOP, _WIDTH - 32, _TOP + 220)
_LABEL_SIZE, _TICK_SIZE = 12, 11
_LEAST_DIVERGENCE: Final = 1e-9


class _Figure(NamedTuple):
    """A row of bars: its name, the value of each model, and how it is written."""

    name: str
    values: list[float]
    texts: list[str]


def draw_quality(report: QualityReport) -> str:
    """Return an SVG of a report.

    On the left are the figures of each model as bars; each row has a scale of its own.  On the right is the divergence
    that a share of the tokens exceeds, or, for one model, the perplexity after each window.
    """
    models = [report.model, *([report.against] if report.against is not None else [])]
    figures = _figures(models)
    bottom = max(_PLOT.bottom + 48, _TOP + len(figures) * (_BAR * len(models) + 28))
    canvas = Canvas(_WIDTH, int(bottom) + 16)
    names = names_of(models)
    title = " against ".join(names)
    text = report.text
    about = f"{text.name}: {text.num_scored:,} tokens in windows of {text.length:,}, convention of {text.convention}"
    canvas.text(24, 26, fitted(title, 16, _WIDTH - 48), size=16, bold=True)
    canvas.text(24, 46, fitted(about, 12, _WIDTH - 48), "faint", size=12)
    x = 24.0
    for place, name in enumerate(names):
        canvas.bar(Box(x, 62, x + 12, 74), f"c{place}")
        x = canvas.text(x + 18, 73, fitted(name, 12, 400), size=12).right + 18
    _bars(canvas, figures)
    if report.divergence is not None:
        _divergence(canvas, report.divergence)
    else:
        _running(canvas, report.model)
    return canvas.svg()


def _figures(models: Sequence[ModelReport]) -> list[_Figure]:
    rows: list[tuple[str, list[float], str]] = [
        ("weights, MB", [model.weight_bytes / 1e6 for model in models], ",.1f"),
    ]
    speeds = [model.speed for model in models if model.speed is not None]
    if len(speeds) == len(models):
        rows += [
            ("peak memory, MB", [speed.peak_rss_bytes / 1e6 for speed in speeds], ",.0f"),
            ("prefill, tokens/s", [speed.prefill_tokens_per_s for speed in speeds], ",.0f"),
            ("decode, tokens/s", [speed.decode_tokens_per_s for speed in speeds], ",.1f"),
        ]
    rows.append(("perplexity", [model.perplexity for model in models], ",.3f"))
    return [_Figure(name, values, [format(value, form) for value in values]) for name, values, form in rows]


def _bars(canvas: Canvas, figures: Sequence[_Figure]) -> None:
    y = float(_TOP) - 8
    for figure in figures:
        canvas.text(24, y, figure.name, size=_LABEL_SIZE)
        y += 7
        room = _MIDDLE - 24 - 84
        for place, (value, text) in enumerate(zip(figure.values, figure.texts, strict=True)):
            right = 24 + max(1.0, room * value / max(figure.values))
            canvas.bar(Box(24, y, right, y + _BAR - 3), f"c{place}", f"{figure.name}: {text}")
            canvas.text(right + 6, y + _BAR - 5, text, "faint", size=_TICK_SIZE)
            y += _BAR
        y += 21


def _divergence(canvas: Canvas, divergence: Divergence) -> None:
    """Draw the divergence over the share of tokens that exceed it, on logarithmic axes."""
    values = divergence.percentiles
    shares = [100 - 100 * place / (len(values) - 1) for place in range(len(values))]
    points = [(share, value) for share, value in zip(shares, values, strict=True) if share >= 0.5]
    title = "KL divergence that a share of the tokens exceeds, nats"
    if divergence.max <= _LEAST_DIVERGENCE:
        canvas.text(_PLOT.left, _TOP - 16, title, size=_LABEL_SIZE)
        canvas.text(_PLOT.left, _TOP + 20, "none: both compute the same distributions", "faint", size=_LABEL_SIZE)
        return
    low = max(_LEAST_DIVERGENCE, divergence.max * 1e-4)
    up = Scale(low, max(points[-1][1], divergence.mean.value) * 1.6, _PLOT.bottom, _PLOT.top, True)
    across = Scale(0.5, 100, _PLOT.right, _PLOT.left, True)
    canvas.text(_PLOT.left, _TOP - 16, title, size=_LABEL_SIZE)
    _grid(canvas, up, across, [1, 2, 5, 10, 20, 50, 100])
    canvas.text(
        (_PLOT.left + _PLOT.right) / 2, _PLOT.bottom + 36, "share of the tokens, % (logarithmic)", "faint",
        size=_TICK_SIZE, anchor="middle",
    )  # fmt: skip
    canvas.line([(across(share), up(max(value, low))) for share, value in points], "c0", "stroke-width='2'")
    canvas.line(
        [(_PLOT.left, up(divergence.mean.value)), (_PLOT.right, up(divergence.mean.value))],
        "faint",
        "stroke-dasharray='4 4'",
    )
    canvas.text(
        _PLOT.right - 4, up(divergence.mean.value) + 14, f"mean {number(divergence.mean.value)}", "faint",
        size=_TICK_SIZE, anchor="end",
    )  # fmt: skip
    for share, value, name in ((50, divergence.median, "median"), (1, divergence.p99, "99 %")):
        at = across(share), up(max(value, low))
        canvas.circle(*at, 4, "c0", f"{name}: {number(value)}")
        anchor, shift = ("end", -8) if share == 1 else ("start", 8)
        canvas.text(
            at[0] + shift, at[1] - 8 if share == 1 else at[1] + 16, f"{name} {number(value)}", size=11, anchor=anchor
        )
    change = (
        f"perplexity {change_in_percent(divergence.nll_change.value)}, same top token {divergence.same_top.value:.1%}"
    )
    canvas.text(_PLOT.left, _PLOT.bottom + 56, change, size=_LABEL_SIZE)


def _running(canvas: Canvas, model: ModelReport) -> None:
    """Draw the perplexity after each window."""
    values = model.running_perplexity
    canvas.text(_PLOT.left, _TOP - 16, "perplexity of the text up to each window", size=_LABEL_SIZE)
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or high * 0.1
    up = Scale(low - margin, high + margin, _PLOT.bottom, _PLOT.top)
    across = Scale(0, max(1, len(values)), _PLOT.left, _PLOT.right)
    _grid(canvas, up, across, [tick for tick in across.ticks() if tick == int(tick)])
    canvas.text((_PLOT.left + _PLOT.right) / 2, _PLOT.bottom + 36, "windows", "faint", size=_TICK_SIZE, anchor="middle")
    points = [(across(place), up(value)) for place, value in enumerate(values, 1)]
    canvas.line(points, "c0", "stroke-width='2'")
    canvas.circle(*points[-1], 4, "c0", f"{values[-1]:.3f}")


def _grid(canvas: Canvas, up: Scale, across: Scale, ticks: Sequence[float]) -> None:
    for value in up.ticks():
        canvas.line([(_PLOT.left, up(value)), (_PLOT.right, up(value))], "grid")
        canvas.text(_PLOT.left - 8, up(value) + 4, number(value), "faint", size=_TICK_SIZE, anchor="end")
    for value in ticks:
        canvas.text(across(value), _PLOT.bottom + 18, number(value), "faint", size=_TICK_SIZE, anchor="middle")
