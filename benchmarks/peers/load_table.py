"""Prints the results of load.py as a Markdown table: ratios first, then the figures of each system.

python benchmarks/peers/load_table.py build/peers/results-load.jsonl
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jobs import Results
from systems import PENSTOCK, PRECISIONS, SYSTEMS, System
from table import failure_lines, head_lines, lines_of, print_report, shapes_in

from penstock.bench.charts.latency_chart import Line, draw_charts

AT_ONCE = "mixed"
OFFLINE = (AT_ONCE, "shared", "shared:uncached")
SHARES = {"mixed-50": 0.5, "mixed-80": 0.8}
"""Rates as shares of the best peer's capacity."""
GOAL_PEERS = {"4 bit": ("openvino", 1.3), "8 bit": ("vllm", 1.1)}
"""Whose throughput is to be surpassed, and how far."""
CACHE_GOAL = 4.0

Row = dict[str, Any]
Pick = Callable[[Row], float]


def throughput(row: Row) -> float:
    return float(row["tokens_per_s"])


def first_token_p99(row: Row) -> float:
    return float(row["first_token_s"]["99"])


def between_p99(row: Row) -> float:
    return float(row["between_tokens_s"]["99"])


def rows_of(results: Results, shape: str, system: System, measure: str) -> dict[int, Row]:
    """Return the figures by round."""
    key = (shape, system.name, measure)
    return {
        row["round"]: row
        for row in results.rows
        if (row["shape"], row["system"], row["measure"]) == key and "error" not in row
    }


@dataclass(frozen=True)
class Ratio:
    """Penstock's figure divided by another's, where more is better: the median over common rounds."""

    value: float
    other: str
    goal: float

    @property
    def text(self) -> str:
        below = "" if self.value >= self.goal else " **below**"
        return f"{self.value:.2f}{below} (goal {self.goal:g}, {self.other})"


def ratio(own: dict[int, Row], other: dict[int, Row], pick: Pick, less_is_better: bool) -> float | None:
    both = own.keys() & other.keys()
    if not both:
        return None
    pairs = [(pick(own[number]), pick(other[number])) for number in both]
    return statistics.median(b / a if less_is_better else a / b for a, b in pairs)


def to_peer(results: Results, shape: str, precision: str, peer: str, goal: float) -> Ratio | None:
    """Return the ratio of throughput to one peer in the mixed trace, all at once."""
    mine, its = (next(s for s in SYSTEMS if (s.peer, s.precision) == (p, precision)) for p in (PENSTOCK, peer))
    value = ratio(
        rows_of(results, shape, mine, AT_ONCE), rows_of(results, shape, its, AT_ONCE), throughput, less_is_better=False
    )
    return None if value is None else Ratio(value, its.name, goal)


def to_best(results: Results, shape: str, precision: str, measure: str, pick: Pick) -> Ratio | None:
    """Return the ratio of a latency to that of the best peer."""
    mine = next(s for s in SYSTEMS if (s.peer, s.precision) == (PENSTOCK, precision))
    own = rows_of(results, shape, mine, measure)
    found = []
    for system in SYSTEMS:
        if system.precision == precision and system.peer != PENSTOCK:
            value = ratio(own, rows_of(results, shape, system, measure), pick, less_is_better=True)
            if value is not None:
                found.append(Ratio(value, system.name, 1.0))
    return min(found, key=lambda r: r.value) if found else None


def to_uncached(results: Results, shape: str, precision: str) -> Ratio | None:
    mine = next(s for s in SYSTEMS if (s.peer, s.precision) == (PENSTOCK, precision))
    cached, uncached = (rows_of(results, shape, mine, name) for name in ("shared", "shared:uncached"))
    value = ratio(cached, uncached, throughput, less_is_better=False)
    return None if value is None else Ratio(value, "itself without prefix cache", CACHE_GOAL)


def ratio_lines(results: Results) -> list[str]:
    lines = ["## Penstock to its peers", ""]
    for shape in shapes_in(results):
        head = ["mixed, all at once"]
        for measure in SHARES:
            share = f"{SHARES[measure]:.0%}".replace("%", " %")
            head += [f"p99 first token at {share}", f"p99 between tokens at {share}"]
        head.append("shared beginning")
        rows = [[shape, *head]]
        for precision in PRECISIONS:
            if precision in GOAL_PEERS:
                found = [
                    to_peer(results, shape, precision, *GOAL_PEERS[precision]),
                    *(
                        to_best(results, shape, precision, measure, pick)
                        for measure in SHARES
                        for pick in (first_token_p99, between_p99)
                    ),
                    to_uncached(results, shape, precision),
                ]
                rows.append([precision, *("-" if each is None else each.text for each in found)])
        lines += lines_of(rows)
    return lines


def _cell(rows: dict[int, Row], pick: Pick, digits: int) -> str:
    return f"{statistics.median(pick(row) for row in rows.values()):,.{digits}f}" if rows else "-"


def value_lines(results: Results) -> list[str]:
    lines = ["## Values", "", "Latencies: 50th / 90th / 99th percentile.", ""]
    for shape in shapes_in(results):
        head = ["trace", "system", "due, 1/s", "done, 1/s", "new tokens/s", "first token, s", "between tokens, ms"]
        table = [[f"{shape}: {head[0]}", *head[1:], "request, s", "peak MiB"]]
        for precision in PRECISIONS:
            for measure in (*OFFLINE, *SHARES):
                for system in SYSTEMS:
                    rows = rows_of(results, shape, system, measure)
                    if system.precision == precision and rows:
                        table.append(_values(results, shape, system, measure, rows))
        lines += lines_of(table)
    return lines


def _values(results: Results, shape: str, system: System, measure: str, rows: dict[int, Row]) -> list[str]:
    def spread(name: str, scale: float, digits: int) -> str:
        return " / ".join(_cell(rows, lambda row, at=at: scale * row[name][at], digits) for at in ("50", "90", "99"))

    capacity = results.header.get("capacity", {}).get(f"{shape} {system.precision}", 0.0)
    return [
        measure,
        system.name,
        f"{SHARES[measure] * capacity:.2f}" if measure in SHARES else "all",
        _cell(rows, lambda row: row["requests_per_s"], 2),
        _cell(rows, throughput, 0),
        spread("first_token_s", 1, 2),
        spread("between_tokens_s", 1e3, 0),
        spread("request_s", 1, 1),
        _cell(rows, lambda row: row["peak_rss_bytes"] / (1 << 20), 0),
    ]


def pictures(results: Results) -> dict[str, str]:
    """Return SVGs by shape and precision: the 99th percentiles of each system at the two rates."""
    drawn = {}
    for shape in shapes_in(results):
        for precision in PRECISIONS:
            key = f"{shape} {precision}"
            capacity = results.header.get("capacity", {}).get(key)
            if capacity:
                first, between = (
                    _lines(results, shape, precision, pick, capacity) for pick in (first_token_p99, between_p99)
                )
                about = f"99th percentiles; {results.header['machine']}; {results.header['date']}"
                drawn[key] = draw_charts(f"Under load: {key}", about, capacity, first, between)
    return drawn


def _lines(results: Results, shape: str, precision: str, pick: Pick, capacity: float) -> list[Line]:
    lines = []
    for system in SYSTEMS:
        found = {name: rows_of(results, shape, system, name) for name in SHARES}
        points = [
            (SHARES[name] * capacity, 1e3 * statistics.median(pick(row) for row in rows.values()))
            for name, rows in found.items()
            if rows
        ]
        if system.precision == precision and points:
            lines.append(Line(system.peer, points))
    return lines


def report(results: Results) -> str:
    return "\n".join([*head_lines(results), *ratio_lines(results), *value_lines(results), *failure_lines(results)])


if __name__ == "__main__":
    print_report(report, __doc__)
