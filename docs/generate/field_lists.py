"""Docstrings as the site shows them: descriptions of fields become lists."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

FIELD = r"``\w+``(?:(?:,| and) ``\w+``)*"


def with_lists(text: str) -> str:
    """Return a docstring in which a paragraph of fields (a name in double backquotes, a colon, a text) is a list."""
    return "\n\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    plain = " ".join(text.split())
    if text.startswith((" ", "-")) or not re.match(rf"{FIELD}: ", plain):
        return text
    pieces = re.split(rf"(?:^|(?<=[.;]) )(?={FIELD}: )", plain)
    return "\n".join(f"- {piece.strip()}" for piece in pieces if piece.strip())


class FieldLists(Extension):
    """Change the docstring of every object that is read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
