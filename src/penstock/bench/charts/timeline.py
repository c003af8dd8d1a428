"""Draws a step over time as SVG: what each thread computes, and when it waits."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.bench.charts.svg import CHAR_WIDTH, NUM_COLORS, Box, Canvas, Scale, fitted, number, text_box

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.bench.phase_report import PhaseReport, ProfileReport

__all__ = ["draw_timeline"]

_WIDTH: Final = 960
_LEFT, _RIGHT, _TOP = 92, 28, 84
_TRACK, _PHASE_HEAD, _AXIS = 30, 34, 44
_LABEL_SIZE: Final = 11
_MIN_BAR: Final = 0.3
"""Narrower bars, in pixels, are not drawn."""


def draw_timeline(report: ProfileReport, model: str) -> str:
    """Return the SVG: for each phase the first step of its median pass, with a track for each thread.

    The ops that take most of the time have a color each; gray is a wait for other threads before an op.
    """
    steps = [(phase, phase.spans[0]) for phase in report.phases if phase.spans]
    colors = _colors(steps)
    tracks = {id(phase): sorted({int(thread) for thread in spans["thread"] if thread >= 0}) for phase, spans in steps}
    height = _TOP + sum(_PHASE_HEAD + _TRACK * len(tracks[id(phase)]) + _AXIS for phase, _ in steps)
    canvas = Canvas(_WIDTH, height)
    title = f"{model}: {report.network}, {report.scheme}, {report.cpu_level}"
    canvas.text(24, 32, fitted(title, 18, _WIDTH - 48), size=18, bold=True)
    _legend(canvas, colors)
    y = float(_TOP)
    for phase, spans in steps:
        y = _draw_phase(canvas, phase, spans, tracks[id(phase)], colors, y)
    return canvas.svg()


def _colors(steps: list[tuple[PhaseReport, NDArray[np.void]]]) -> dict[str, str]:
    """Return the colors of the ops that take most of the time, longest first."""
    times: Counter[str] = Counter()
    for phase, spans in steps:
        for node, _, _, _, _, begin, end in spans.tolist():
            if node >= 0:
                times[phase.nodes[node].op] += (end - begin) / max(1e-9, phase.wall_s)
    return {op: f"c{index}" for index, (op, _) in enumerate(times.most_common(NUM_COLORS))}


def _legend(canvas: Canvas, colors: dict[str, str]) -> None:
    x = 24.0
    for name, color in [*colors.items(), ("other ops", "faint"), ("waits", "grid")]:
        if x + 24 + len(name) * 12 * CHAR_WIDTH > _WIDTH - 24:
            return
        canvas.bar(Box(x, 50, x + 14, 62), color)
        x = canvas.text(x + 20, 61, name, size=12).right + 18


def _draw_phase(
    canvas: Canvas, phase: PhaseReport, spans: NDArray[np.void], tracks: list[int], colors: dict[str, str], top: float
) -> float:
    """Draw the tracks of a phase, and return where the next one begins."""
    zero, last = int(spans["begin_ns"].min()), int(spans["end_ns"].max())
    scale = Scale(0, max(1, last - zero) / 1e6, _LEFT, _WIDTH - _RIGHT)
    size = f"{phase.num_tokens:,} tokens" if phase.phase == "prefill" else f"batch {phase.num_requests}"
    canvas.text(
        24, top + 20, f"{phase.phase}, {size}, step 1 of {phase.num_steps}: {number((last - zero) / 1e6)} ms", bold=True
    )
    top += _PHASE_HEAD
    bottom = top + _TRACK * len(tracks)
    for value in scale.ticks(8):
        canvas.line([(scale(value), top), (scale(value), bottom + 4)], "grid")
        if text_box(scale(value), 0, number(value), _LABEL_SIZE, "middle").right < _WIDTH:
            canvas.text(scale(value), bottom + 18, number(value), "faint", size=_LABEL_SIZE, anchor="middle")
    canvas.text(24, bottom + 18, "ms", "faint", size=_LABEL_SIZE)
    for index, thread in enumerate(tracks):
        canvas.text(24, top + index * _TRACK + 19, f"thread {thread}", "faint", size=_LABEL_SIZE)
    for node, _, thread, _, arrive, begin, end in spans.tolist():
        if node >= 0:
            y = top + tracks.index(thread) * _TRACK
            row = phase.nodes[node]
            x_arrive, x_begin, x_end = (scale((at - zero) / 1e6) for at in (max(arrive, zero), begin, end))
            if x_begin - x_arrive >= _MIN_BAR:
                canvas.bar(Box(x_arrive, y + 6, x_begin, y + _TRACK - 6), "grid", f"wait before {row.name}")
            if x_end - x_begin >= _MIN_BAR:
                microseconds = number((end - begin) / 1e3)
                canvas.bar(Box(x_begin, y + 3, x_end, y + _TRACK - 3), colors.get(row.op, "faint"),
                           f"{row.name}: {microseconds} us")  # fmt: skip
            if len(row.op) * _LABEL_SIZE * CHAR_WIDTH + 6 < x_end - x_begin:
                canvas.text(x_begin + 3, y + 19, row.op, "ground", size=_LABEL_SIZE)
    return bottom + _AXIS
