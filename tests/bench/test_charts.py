"""Charts: texts lie neither over each other nor on lines, whatever the data; axes end with it; dark colors."""

from __future__ import annotations

import math
import re
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest

from penstock.bench.charts.latency_chart import Line, draw_charts
from penstock.bench.charts.roofline import draw_roofline
from penstock.bench.charts.svg import Box, Scale, fitted, number, spread, text_box
from penstock.bench.charts.timeline import draw_timeline
from penstock.bench.phase_report import PhaseReport, ProfileReport, Row
from penstock.core.spans import SPAN

SVG = "{http://www.w3.org/2000/svg}"
PEAKS = {"int8": 900e9, "bf16": 450e9, "f32": 225e9}


def text_boxes(picture: str) -> list[tuple[str, Box]]:
    """The texts that are not turned, and their boxes."""
    root = ElementTree.fromstring(picture)  # noqa: S314 - our own picture
    return [
        (
            one.text or "",
            text_box(
                float(one.get("x", 0)), float(one.get("y", 0)), one.text or "", float(one.get("font-size", 0)),
                one.get("text-anchor", "start"),
            ),
        )
        for one in root.iter(f"{SVG}text")
        if one.get("transform") is None
    ]  # fmt: skip


def check_texts(picture: str) -> None:
    """No two texts overlap, and each lies within the picture."""
    width, height = (float(ElementTree.fromstring(picture).get(name, 0)) for name in ("width", "height"))  # noqa: S314
    boxes = text_boxes(picture)
    for (one, first), (other, second) in combinations(boxes, 2):
        assert first.overlap(second) < 1, f"{one!r} and {other!r}"
    for text, box in boxes:
        assert Box(-2, 0, width + 2, height).contains(box), text


def profile_of(points: list[tuple[float, float, float]], peaks: dict[str, float] = PEAKS) -> ProfileReport:
    """A report with ops at (operations per byte, operations per second, share), in two phases."""
    kinds = [
        Row(
            f"linear layers.{n}.proj", "linear", 1, share, 0.0, 1.0, rate / intensity, rate, list(peaks)[n % len(peaks)]
        )
        for n, (intensity, rate, share) in enumerate(points)
    ]
    phases = [
        PhaseReport(name, 512, 1, 128, 1, 2, 3, 3, 1.0, 0.1, 34e9, peaks, kinds[at::2], [], {}, {})
        for at, name in enumerate(("prefill", "decode"))
    ]
    return ProfileReport("llama", "w8a8", "avx512", 2, "bf16", "mmap", 0.0, phases)


def random_points(count: int) -> list[tuple[float, float, float]]:
    random = np.random.default_rng(0)
    intensities, parts = 10 ** random.uniform(-1, 3, count), random.uniform(0.05, 0.9, count)
    shares = random.dirichlet(np.ones(count) / 2)
    return [(i, min(34e9 * i, 900e9) * p, s) for i, p, s in zip(intensities, parts, shares, strict=True)]


CLOUDS = {
    "random": random_points(24),
    "one place": [(2.0, 30e9, 1 / 20)] * 20,
    "one point": [(2.0, 30e9, 0.9)],
    "no point": [],
    "on the memory line": [(x, 34e9 * x, 0.08) for x in np.geomspace(0.5, 20, 12)],
    "on a peak": [(x, 450e9, 0.08) for x in np.geomspace(20, 400, 12)],
    "huge ranges": [(10.0**n, 10.0 ** (3 + n), 0.1) for n in range(-3, 7)],
    "many": random_points(60),
}


@pytest.mark.parametrize("points", CLOUDS.values(), ids=CLOUDS)
def test_texts_of_a_roofline_do_not_overlap(points: list[tuple[float, float, float]]) -> None:
    check_texts(draw_roofline(profile_of(points), "demo.psm"))


@pytest.mark.parametrize(
    "peaks", [{"int8": 1e12, "bf16": 0.99e12, "f32": 0.98e12}, {"int8": 1e9, "bf16": 1e9, "f32": 1e9}]
)
def test_names_of_equal_peaks_do_not_overlap(peaks: dict[str, float]) -> None:
    check_texts(draw_roofline(profile_of(random_points(9), peaks), "a" * 200))


@pytest.mark.parametrize("points", [CLOUDS["random"], CLOUDS["on the memory line"], CLOUDS["on a peak"]])
def test_labels_of_a_roofline_are_not_on_lines(points: list[tuple[float, float, float]]) -> None:
    picture = draw_roofline(profile_of(points), "demo.psm")
    labels = [(text, box) for text, box in text_boxes(picture) if "proj" in text or "GOP/s" in text]
    lines = re.findall(r"<path d='M([\d. L-]+)' fill='none' class='stroke-ink'", picture)
    assert len(labels) > 9
    assert len(lines) == 4
    for line in lines:
        (x1, y1), (x2, y2) = (map(float, point.split()) for point in line.split("L"))
        for step in np.linspace(0, 1, 400):
            at = x1 + (x2 - x1) * step, y1 + (y2 - y1) * step
            for text, box in labels:
                is_on = box.left < at[0] < box.right and box.top < at[1] < box.bottom
                assert not is_on, text


def lines_of(*series: list[tuple[float, float]]) -> list[Line]:
    return [Line(f"system number {n}", points) for n, points in enumerate(series)]


LOADS = {
    "usual": lines_of([(1, 10), (2, 20)], [(1, 12), (2, 30)], [(1, 15), (2, 80)]),
    "one point": lines_of([(1.5, 10)]),
    "none": [],
    "empty lines": lines_of([], []),
    "equal ends": lines_of(*[[(1, 10), (2, 20)]] * 9),
    "many": lines_of(*[[(1, n), (2, 20 + n / 100)] for n in range(1, 25)]),
    "huge ranges": lines_of([(0.001, 0.002), (900, 3)], [(0.001, 5), (900, 123_456)]),
    "zeros": lines_of([(0, 0), (0, 0)]),
    "tiny": lines_of([(1e-7, 1e-6), (2e-7, 2e-6)]),
}


@pytest.mark.parametrize("lines", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("capacity", [0.0, 2.5, 1e5])
def test_texts_of_latencies_do_not_overlap(lines: list[Line], capacity: float) -> None:
    check_texts(draw_charts("a model" * 40, "about" * 60, capacity, lines, lines))


def steps_of(num_threads: int, num_nodes: int, width_ns: int) -> ProfileReport:
    """A report whose phases have a step of ops of equal length, with waits between them."""
    report = profile_of([])
    for phase in report.phases:
        phase.nodes[:] = [Row(f"layers.{n}.proj", f"op_number_{n % 9}") for n in range(num_nodes)]
        noted = [(-1, 0, 0, 0, 0, 0, num_nodes * width_ns)]
        for thread in range(num_threads):
            for n in range(num_nodes):
                noted.append((n, 0, thread, 0, n * width_ns, n * width_ns + width_ns // 3, (n + 1) * width_ns))
        phase.spans.append(np.array(noted, SPAN))
    return report


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_threads", "num_nodes", "width_ns"), [(1, 1, 1), (2, 7, 10**6), (64, 300, 10**9), (3, 0, 5)]
)
def test_texts_of_a_timeline_do_not_overlap(num_threads: int, num_nodes: int, width_ns: int) -> None:
    check_texts(draw_timeline(steps_of(num_threads, num_nodes, width_ns), "m" * 200))


def test_pictures_have_dark_colors() -> None:
    for picture in (draw_roofline(profile_of(CLOUDS["random"]), "m"), draw_charts("m", "", 1.0, LOADS["usual"], [])):
        light, _, dark = picture.partition("@media (prefers-color-scheme: dark)")
        assert ".fill-ground{fill:#ffffff}" in light
        assert ".fill-ground{fill:#1e2129}" in dark
        assert not re.search(r"(?:fill|stroke)='(?:#|white|black)", picture)


def test_axes_end_where_data_ends() -> None:
    picture = draw_charts("m", "", 2.1, [Line("p50", [(1.0, 10.0), (2.1, 33.0)])], [])
    circles = [one for one in ElementTree.fromstring(picture).iter(f"{SVG}circle")]  # noqa: S314, C416
    assert float(circles[-1].get("cy", 0)) == 98.0  # the highest value is the top of the plot
    dashed = re.search(r"<path d='M([\d.]+) [^']*' fill='none' class='stroke-faint'", picture)
    assert dashed is not None
    assert float(dashed[1]) == float(circles[-1].get("cx", 0))


@pytest.mark.parametrize(
    ("low", "high", "is_log"), [(0, 1, False), (0, 87, False), (3.1, 4.5, True), (1e-3, 1e9, True), (0.2, 90, True)]
)
def test_ticks_are_few_and_round(low: float, high: float, is_log: bool) -> None:
    scale = Scale(low, high, 0, 100, is_log)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 7
    assert all(low * 0.99 <= tick <= high * 1.01 for tick in ticks)
    assert all(0 <= scale(tick) <= 100 + 1e-9 for tick in ticks)


def test_numbers_positions_and_long_texts() -> None:
    shown = {0: "0", 0.5: "0.5", 1234.5: "1,234", 0.012345: "0.0123", 1e6: "1,000,000", 2.50: "2.5", 3e-7: "3e-07"}
    assert {value: number(value) for value in shown} == shown
    found = spread([5, 5, 5, 90], 10, 0, 92)
    assert all(math.isclose(gap, 10) or gap > 10 for gap in np.diff(sorted(found)))
    assert fitted("a" * 100, 10, 60) == "aaaa\u2026aaaaa"
    assert fitted("short", 10, 60) == "short"
