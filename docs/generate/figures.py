"""The page of current figures: pictures of tables in history/performance.md, which says how they were measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from generate.markdown import page, table
from penstock.bench.charts.svg import Box, Canvas, Scale, number

RECORD = Path(__file__).parents[1] / "history" / "performance.md"
SECTION = "Beside other engines (Zen 4, "
SHAPES = {"348M": "a Llama of 348 million parameters", "1.1B": "a Llama of 1.1 billion parameters"}
PRECISIONS = ("4 bit", "8 bit", "bf16")
PICTURES = (
    ("decode 1", "One request: tokens per second", True),
    ("decode 8", "Eight requests at once: tokens per second", True),
    ("decode 32", "32 requests at once: tokens per second", True),
    ("prefill 512", "A prompt of 512 tokens: tokens per second", True),
    ("memory 1", "Peak memory with one request: MiB", False),
)
_WIDTH, _ROW, _LEFT, _RIGHT, _TOP = 820, 22, 190, 90, 56


@dataclass(frozen=True)
class Row:
    """A row of a table: the system, and the median of each column."""

    system: str
    values: dict[str, float]

    @property
    def precision(self) -> str:
        """The group of the row."""
        name = self.system.rpartition(" ")[2].lower()
        return "bf16" if name in ("bf16", "fp16") else "8 bit" if "8_0" in name or name in ("w8a8", "int8") else "4 bit"


def rows_of(shape: str) -> list[Row]:
    """Return the rows of the table of a shape."""
    lines = iter(section().splitlines())
    head = next(line for line in lines if line.startswith(f"| {shape}: system "))
    names = [cell.strip() for cell in head.strip("|").split("|")]
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            return found
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        medians = {name: re.match(r"[\d.,]+", cell) for name, cell in zip(names, cells, strict=True)}
        values = {name: float(one[0].replace(",", "")) for name, one in medians.items() if one and name != names[0]}
        found.append(Row(cells[0], values))
    return found


def section() -> str:
    """Return the section of the record that the page shows."""
    return next(part for part in RECORD.read_text().split("\n## ") if part.startswith(SECTION))


def draw_bars(rows: list[Row], column: str, title: str, about: str) -> str:
    """Return a picture of one column: a bar for each system, in groups by precision, Penstock in color."""
    groups = [(name, [row for row in rows if row.precision == name and column in row.values]) for name in PRECISIONS]
    height = _TOP + sum(28 + _ROW * len(group) for _, group in groups) + 12
    canvas = Canvas(_WIDTH, height)
    canvas.text(16, 24, title, size=16, bold=True)
    canvas.text(16, 43, about, "faint", size=12)
    scale = Scale(0, max(row.values[column] for row in rows if column in row.values), _LEFT, _WIDTH - _RIGHT)
    y = float(_TOP)
    for name, group in groups:
        canvas.text(16, y + 17, name, bold=True)
        y += 28
        for row in group:
            value = row.values[column]
            is_ours = row.system.startswith("Penstock")
            canvas.text(_LEFT - 8, y + 14, row.system, "ink" if is_ours else "faint", anchor="end", bold=is_ours)
            canvas.bar(Box(_LEFT, y + 3, scale(value), y + _ROW - 4), "c3" if is_ours else "grid", row.system)
            canvas.text(scale(value) + 6, y + 14, number(value), "ink" if is_ours else "faint")
            y += _ROW
    return canvas.svg()


def pages() -> dict[str, str]:
    """Return the page and its pictures."""
    made: dict[str, str] = {}
    title = section().splitlines()[0]
    anchor = re.sub(r"[^\w]+", "-", title.lower()).strip("-")
    parts = [
        "How fast Penstock computes, and how much memory it takes, beside other engines. The models have random "
        "weights and real shapes. The machine has two cores of an AMD Zen 4 processor. "
        f"[Performance](history/performance.md#{anchor}) records versions, commands, ranges and other machines, also "
        "figures below their goals.",
    ]
    for shape, words in SHAPES.items():
        rows = rows_of(shape)
        parts.append(f"## {shape}: {words}")
        for column, heading, more_is_better in PICTURES:
            path = f"assets/figures/{shape.lower()}-{column.replace(' ', '-')}.svg"
            about = f"{shape}, Zen 4, 2 threads; {'more' if more_is_better else 'less'} is better"
            made[path] = draw_bars(rows, column, heading, about)
            parts.append(f"![{heading}]({path}){{ .figure }}")
        columns = ["decode 1", "decode 8", "decode 32", "prefill 512", "start", "memory 1"]
        cells = [
            [row.system, *(number(row.values[one]) if one in row.values else "" for one in columns)] for row in rows
        ]
        head = [
            "system",
            *(f"{one}, {unit}" for one, unit in zip(columns, ["tokens/s"] * 4 + ["s", "MiB"], strict=True)),
        ]
        parts.append(table(head, cells))
    made["figures.md"] = page("Current figures", *parts)
    return made
