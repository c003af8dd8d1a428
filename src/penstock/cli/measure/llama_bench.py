"""The figures of ``penstock bench`` in the form of llama-bench: a table in Markdown."""

from __future__ import annotations

import statistics
from typing import Final

from penstock.bench.measure import Report

__all__ = ["markdown_table"]

_COLUMNS: Final = (("model", 30, False), ("size", 10, True), ("params", 10, True), ("backend", 10, False),
                   ("threads", 7, True), ("test", 15, True), ("t/s", 20, True))  # fmt: skip


def markdown_table(report: Report) -> list[str]:
    """Return the lines of the table; with a column of joules per token where the machine counts them.

    As there, ``pp512`` is a prompt of 512 tokens, ``tg128`` are 128 tokens from an empty context at batch 1, and the
    deviation is that of the repetitions.
    """
    columns = [*_COLUMNS, *([("J/token", 10, True)] if report.joules_per_token else [])]
    tests = [
        (f"pp{report.prompt_tokens}", report.prefill_runs, "prefill"),
        (f"tg{report.new_tokens}", report.generation_runs, "generation"),
    ]
    rows = []
    for name, rates, kind in tests:
        deviation = statistics.stdev(rates) if len(rates) > 1 else 0.0
        row = [
            f"{report.network} {report.scheme.upper()}",
            _size(report.model_bytes),
            _count(report.num_parameters),
            "CPU",
            str(report.num_threads * report.num_ranks),
            name,
            f"{statistics.mean(rates):.2f} \u00b1 {deviation:.2f}",
        ]
        rows.append([*row, f"{report.joules_per_token[kind]:.2f}"] if report.joules_per_token else row)
    widths = [max(width, *(len(row[at]) for row in rows)) for at, (_, width, _) in enumerate(columns)]
    lines = [_line([name for name, _, _ in columns], widths, columns)]
    rules = [
        "-" * (width - 1) + ":" if right else "-" * width for (_, _, right), width in zip(columns, widths, strict=True)
    ]
    lines.append(_line(rules, widths, columns))
    return lines + [_line(row, widths, columns) for row in rows]


def _line(cells: list[str], widths: list[int], columns: list[tuple[str, int, bool]]) -> str:
    padded = [
        f"{cell:>{width}}" if right else f"{cell:<{width}}"
        for cell, width, (_, _, right) in zip(cells, widths, columns, strict=True)
    ]
    return f"| {' | '.join(padded)} |"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.2f} M"
