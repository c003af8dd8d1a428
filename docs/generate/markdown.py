"""Pieces of Markdown that the generated pages share."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_CELL_LEN = 200


def page(title: str, *parts: str) -> str:
    """Return a page: its title, and the parts with a blank line between them."""
    return "\n\n".join([f"# {title}", *(part.strip("\n") for part in parts if part)]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; ValueError names a cell that is too long for one."""
    lines = [[escape(str(cell)) for cell in row] for row in rows]
    for line in lines:
        for cell in line:
            if len(cell) > MAX_CELL_LEN:
                raise ValueError(f"a cell has more than {MAX_CELL_LEN} characters: {cell}")
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(head), ["---"] * len(head), *lines])


def escape(text: str) -> str:
    """Return a text for a table: one line, with escaped bars."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms and their explanations, for texts that are too long for a table."""
    return "\n\n".join(f"{term}\n:   {' '.join(text.split()) or 'No description.'}" for term, text in items)


def code(text: object) -> str:
    """Return inline code."""
    return f"`{text}`"


def summary(thing: object) -> str:
    """Return the first paragraph of a docstring, as one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).replace("``", "`")


def described_fields(kind: type) -> dict[str, str]:
    """Return what the docstring of a class says about each of its fields.

    The docstring describes a field after its name in double backquotes and a colon; names may share a description.
    """
    text = " ".join((inspect.getdoc(kind) or "").split("\n\nRaises")[0].split())
    names = r"``\w+``(?:(?:,| and) ``\w+``)*"
    pieces = re.split(rf"({names}): ", text)[1:]
    found: dict[str, str] = {}
    for head, body in zip(pieces[::2], pieces[1::2], strict=True):
        for name in re.findall(r"``(\w+)``", head):
            found[name] = (body[0].upper() + body[1:]).strip().replace("``", "`")
    return found


def fields(kind: Any) -> str:
    """Return the fields of a dataclass: name, type, default, and description."""
    described = described_fields(kind)
    items = []
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        shown = "required" if default is dataclasses.MISSING else f"default {code(repr(default))}"
        if dataclasses.is_dataclass(default):
            shown = f"the defaults of {type(default).__name__}"
        items.append((f"`{field.name}`: {code(field.type)}, {shown}", described.get(field.name, "")))
    return definitions(items)
