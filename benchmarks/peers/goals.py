"""The goals of Penstock as ratios, and the measured ratios: medians of pairs that are close in time.

In every ratio more is better: tokens per second over the peer's, the peer's seconds or bytes over
Penstock's.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from jobs import Results
from protocol import CONTEXT_LEN, DECODE_STEPS
from systems import PENSTOCK, SYSTEMS, System

COLUMNS = ("decode:1", "decode:8", "decode:32", "prefill:512", "start", "memory:1", "memory:8", "memory:32")
_ALIKE = {"start": 3.0, "memory:1": 1.0, "memory:8": 1.0, "memory:32": 1.0}
GOALS: dict[str, dict[str, float]] = {
    "4 bit": {"decode:8": 1.5, "decode:32": 1.5, "prefill:512": 1.25, **_ALIKE},
    "8 bit": {"decode:8": 1.5, "decode:32": 1.15, "prefill:512": 1.05, **_ALIKE},
    "bf16": {"decode:8": 1.3, "decode:32": 1.1, "prefill:512": 1.0, **_ALIKE},
}
BATCH_1_GOALS = {
    "4 bit": {"348m": 1.4, "1.1b": 1.15},
    "8 bit": {"348m": 1.4, "1.1b": 1.15},
    "bf16": {"348m": 1.2, "1.1b": 1.1},
}
START_PEERS = ("openvino", "onnxruntime")
"""The goal of the start compares only with these."""
AGREE = 1.10
"""Probes agree when the highest is at most this many times the lowest."""
MIN_PAIRS = 5
MIN_SHARE = 0.95

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One ratio.  ``pairs`` are those whose probes agree, of ``rounds``; ``share`` is of the probed bandwidth."""

    shape: str
    precision: str
    column: str
    ratio: float
    best: System
    goal: float
    pairs: int
    rounds: int
    share: float | None = None

    @property
    def by_share(self) -> bool:
        """True if at batch 1 at least five pairs whose probes agree reach 95 % of the bandwidth."""
        return self.share is not None and self.share >= MIN_SHARE and self.pairs >= MIN_PAIRS

    @property
    def met(self) -> bool:
        return self.ratio >= self.goal or self.by_share


def goal_of(shape: str, precision: str, column: str) -> float:
    return BATCH_1_GOALS[precision][shape] if column == "decode:1" else GOALS[precision][column]


def rows_of(results: Results, shape: str, system: System, column: str) -> dict[int, Row]:
    """Return the figures of a column by round."""
    measure = column.replace("memory", "decode")
    return {
        row["round"]: row
        for row in results.rows
        if (row["shape"], row["system"], row["measure"]) == (shape, system.name, measure) and "error" not in row
    }


def value_of(row: Row, column: str) -> float:
    """Return tokens per second, seconds or bytes."""
    name = {"start": "seconds", "memory": "peak_rss_bytes"}.get(column.partition(":")[0], "tokens_per_s")
    return float(row[name])


def gain(own: float, other: float, column: str) -> float:
    return own / other if column.startswith(("decode", "prefill")) else other / own


def steady(*rows: Row) -> bool:
    """Return True if all probes around these figures agree."""
    probes = [row[name] for row in rows for name in ("probe_before", "probe_after")]
    return max(probes) <= AGREE * min(probes)


def bytes_per_token(header: Row, shape: str, system: System, row: Row) -> float:
    """Return the bytes that a token reads at batch 1: weights and, for Penstock, keys and values in mid-run."""
    if system.peer == PENSTOCK:
        positions = CONTEXT_LEN + DECODE_STEPS / 2
        return float(row["weight_bytes_per_token"] + positions * row["kv_bytes_per_position"])
    return float(header["bits"][f"{shape} {system.name}"] * header["weights_read"][shape] / 8)


def share_of(header: Row, shape: str, system: System, row: Row) -> float:
    """Return the share of the mean of the two bandwidths probed around a figure of batch 1."""
    read = bytes_per_token(header, shape, system, row) * row["tokens_per_s"]
    return float(read / statistics.mean((row["probe_before"], row["probe_after"])))


def cell(results: Results, shape: str, precision: str, column: str) -> Cell | None:
    """Return the ratio to the best peer of the precision; None if either is missing."""
    own: dict[int, Row] = {}
    best: tuple[float, System, dict[int, Row]] | None = None
    for system in SYSTEMS:
        rows = rows_of(results, shape, system, column) if system.precision == precision else {}
        if system.peer == PENSTOCK:
            own = rows or own
        elif rows and (column != "start" or system.peer in START_PEERS):
            value = gain(statistics.median(value_of(row, column) for row in rows.values()), 1.0, column)
            if best is None or value > best[0]:
                best = (value, system, rows)
    if best is None or not own:
        return None
    _, system, rows = best
    return _paired(results, (shape, precision, column), own, system, rows)


def _paired(
    results: Results, key: tuple[str, str, str], own: dict[int, Row], best: System, rows: dict[int, Row]
) -> Cell | None:
    shape, precision, column = key
    both = sorted(own.keys() & rows.keys())
    if not both:
        return None
    agreeing = [number for number in both if steady(own[number], rows[number])]
    counted = agreeing if column == "decode:1" and len(agreeing) >= MIN_PAIRS else both
    ratio = statistics.median(
        gain(value_of(own[number], column), value_of(rows[number], column), column) for number in counted
    )
    share = None
    if column == "decode:1" and agreeing:
        mine = next(s for s in SYSTEMS if s.peer == PENSTOCK and s.precision == precision)
        share = statistics.median(share_of(results.header, shape, mine, own[number]) for number in agreeing)
    goal = goal_of(shape, precision, column)
    return Cell(shape, precision, column, ratio, best, goal, len(agreeing), len(both), share)
