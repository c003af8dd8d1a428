"""Prints a results file as Markdown: ratios first, then the values, the limits and the versions.

python benchmarks/peers/table.py build/peers/results.jsonl
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from goals import COLUMNS, Cell, bytes_per_token, cell, rows_of, share_of, value_of
from jobs import Results
from systems import PENSTOCK, PRECISIONS, SHAPES, SYSTEMS, System

TITLES = {
    "decode:1": "decode 1",
    "decode:8": "decode 8",
    "decode:32": "decode 32",
    "prefill:512": "prefill 512",
    "start": "start",
    "memory:1": "memory 1",
    "memory:8": "memory 8",
    "memory:32": "memory 32",
}
MIB = 1 << 20
PREFILL_SHARE = 0.8
"""Of the arithmetic peak, that a whole prefill is to reach."""


def lines_of(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table; the first row is its head."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in body), ""]


def ratio_text(found: Cell | None) -> str:
    if found is None:
        return "-"
    mark = "" if found.ratio >= found.goal else " by bandwidth" if found.by_share else " **below**"
    clause = ""
    if found.share is not None:
        clause = f"; {found.share:.0%} of the bandwidth, {found.pairs} of {found.rounds} pairs agree"
    return f"{found.ratio:.2f}{mark} (goal {found.goal:g}, {found.best.name}{clause})"


def shapes_in(results: Results) -> list[str]:
    return [shape for shape in SHAPES if any(row["shape"] == shape for row in results.rows)]


def ratio_lines(results: Results) -> list[str]:
    lines = ["## Penstock / best peer of the same precision", ""]
    below = []
    for shape in shapes_in(results):
        rows = [[shape, *TITLES.values()]]
        for precision in PRECISIONS:
            cells = [cell(results, shape, precision, column) for column in COLUMNS]
            if any(cells):
                rows.append([precision, *(ratio_text(found) for found in cells)])
            below += [found for found in cells if found is not None and not found.met]
        lines += lines_of(rows)
    names = [f"{c.shape} {c.precision} {TITLES[c.column]} ({c.ratio:.2f} of {c.goal:g})" for c in below]
    told = f"Below their goal: {', '.join(names)}." if names else "Every ratio that was measured reaches its goal."
    return [*lines, told, *absent_lines(results), ""]


def absent_lines(results: Results) -> list[str]:
    """Return lines that name the peers that were not measured, because ratios are to the best measured peer."""
    lines = []
    for shape in shapes_in(results):
        ran = {row["system"] for row in results.rows if row["shape"] == shape}
        precisions = {system.precision for system in SYSTEMS if system.name in ran}
        absent = [one.name for one in SYSTEMS if one.name not in ran and one.precision in precisions]
        if absent:
            lines.append(f"{shape}, not run: {', '.join(absent)}.")
    return lines


def peak_lines(results: Results) -> list[str]:
    """Return Penstock's prefill as a share of the highest arithmetic peak probed.

    Only the layers count, without attention; the head computes one row.
    """
    shares = []
    for shape in shapes_in(results):
        for system in SYSTEMS:
            rows = rows_of(results, shape, system, "prefill:512").values() if system.peer == PENSTOCK else ()
            if rows:
                rate = statistics.median(value_of(row, "prefill:512") for row in rows)
                kind = "bf16" if system.precision == "bf16" else "int8"
                peak = max(limits[kind] for limits in results.limits)
                share = 2 * results.header["layer_weights"][shape] * rate / peak
                below = "" if share >= PREFILL_SHARE else f" **below** {PREFILL_SHARE:.0%}"
                shares.append(f"{shape} {system.precision} {share:.0%}{below}")
    return [f"Penstock's prefill as a share of the arithmetic peak: {', '.join(shares)}.", ""] if shares else []


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return the median, and the range if there are several values."""
    median = f"{statistics.median(values):,.{digits}f}"
    if len(values) < 2:
        return median
    return f"{median} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def _value_text(results: Results, shape: str, system: System, column: str) -> str:
    rows = rows_of(results, shape, system, column).values()
    if not rows:
        measure = column.replace("memory", "decode")
        failed = any(
            (row["shape"], row["system"], row["measure"]) == (shape, system.name, measure) for row in results.rows
        )
        return "failed" if failed else "-"
    values = [value_of(row, column) for row in rows]
    if column.startswith("memory"):
        return f"{statistics.median(values) / MIB:,.0f}"
    return spread(values, 2 if column == "start" else 1 if column == "decode:1" else 0)


def _limit_texts(results: Results, shape: str, system: System) -> list[str]:
    """Return bits per weight, the share of the bandwidth at batch 1, and the bandwidths probed there."""
    rows = list(rows_of(results, shape, system, "decode:1").values())
    if not rows:
        return ["-", "-", "-"]
    header = results.header
    if system.peer == PENSTOCK:
        read = bytes_per_token(header, shape, system, {**rows[0], "kv_bytes_per_position": 0})
    else:
        read = bytes_per_token(header, shape, system, rows[0])
    bits = read * 8 / header["weights_read"][shape]
    shares = [share_of(header, shape, system, row) for row in rows]
    probes = [row[name] / 1e9 for row in rows for name in ("probe_before", "probe_after")]
    return [f"{bits:.2f}", f"{statistics.median(shares):.2f}", f"{min(probes):.0f} to {max(probes):.0f}"]


def value_lines(results: Results) -> list[str]:
    lines = [
        "## Values",
        "",
        "Decode and prefill in tokens/s, medians (least to most of the rounds); start in s; memory: peak resident MiB",
        "at that batch and a context of 128; share: bytes read per token times tokens/s over the bandwidth probed.",
        "",
    ]
    for shape in shapes_in(results):
        titles = list(TITLES.values())
        rows = [[f"{shape}: system", "bits/weight", titles[0], "share", "probed GB/s", *titles[1:]]]
        for system in SYSTEMS:
            if any((row["shape"], row["system"]) == (shape, system.name) for row in results.rows):
                values = [_value_text(results, shape, system, column) for column in COLUMNS]
                bits, share, probes = _limit_texts(results, shape, system)
                rows.append([f"{system.name} ({system.precision})", bits, values[0], share, probes, *values[1:]])
        lines += lines_of(rows)
    return lines


def failure_lines(results: Results) -> list[str]:
    done = results.done()
    failed = {
        f"- {row['shape']} {row['system']} {row['measure']}: {row['error']}"
        for row in results.rows
        if "error" in row and (row["shape"], row["system"], row["measure"], row["round"]) not in done
    }
    return ["## Failed", "", *sorted(failed), ""] if failed else []


def _times(number: int) -> str:
    return "once, at the beginning" if number == 1 else f"{number} times, beginning and end included"


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return least if least == most else f"{least} to {most}"


def head_lines(results: Results) -> list[str]:
    header = results.header
    limits = {name: [one[name] / 1e9 for one in results.limits] for name in ("read", "int8", "bf16", "f32")}
    peaks = ", ".join(f"{name} {_range(limits[name])}" for name in ("int8", "bf16", "f32"))
    options = ", ".join(f"{name} {value}" for name, value in header["options"].items()) or "defaults"
    names = ", ".join(f"{peer} {version}" for peer, version in header["versions"].items())
    return [
        f"# Penstock and its peers, {header['date']}",
        "",
        f"{header['machine']}; {header['threads']} threads. Limits, probed {_times(len(results.limits))}: reading "
        f"{_range(limits['read'])} GB/s; peaks in GOP/s: {peaks}.",
        f"Versions: {names}. Penstock's options: {options}.",
        "",
    ]


def report(results: Results) -> str:
    lines = [*head_lines(results), *ratio_lines(results), *peak_lines(results)]
    return "\n".join([*lines, *value_lines(results), *failure_lines(results)])


def print_report(text_of: Callable[[Results], str], doc: str | None) -> None:
    """Run the command line of a table: print a results file with ``text_of``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    results = Results.read(parser.parse_args().results)
    if not results.header:
        raise SystemExit(f"{results.path}: no such results")
    print(text_of(results))


if __name__ == "__main__":
    print_report(report, __doc__)
