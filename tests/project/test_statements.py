"""The list of what MindSpore's documents state: each statement once, and the test or command that shows it."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.cli.main import make_parser

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "from-mindspore.md"
COUNTS = {"OV": 23, "SV": 16, "LI": 34, "OF": 21, "DI": 17}
"""The statements of each document: the overview, Serving, language models, offline and distributed inference."""


class Statement(NamedTuple):
    """A row of the list."""

    name: str
    text: str
    here: str
    shown_by: str


def statements() -> list[Statement]:
    rows = re.findall(r"^\| ([A-Z]{2}-\d\d) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    return [Statement(*row) for row in rows]


@cache
def names_in(file: str) -> set[str]:
    body = ast.parse((ROOT / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_statement_of_the_documents_has_a_row() -> None:
    names = [f"{document}-{number:02}" for document, count in COUNTS.items() for number in range(1, count + 1)]
    assert len(names) == 111
    assert [row.name for row in statements()] == names


@pytest.mark.parametrize("document", COUNTS)
def test_what_shows_a_statement_exists(document: str) -> None:
    """One test or several, or a command that the parser takes."""
    parser = make_parser()
    for row in statements():
        if not row.name.startswith(document):
            continue
        if row.shown_by.startswith("`penstock "):
            assert parser.parse_args(shlex.split(row.shown_by.strip("`"))[1:]), row
        else:
            for test in row.shown_by.split("; "):
                file, _, name = test.strip("`").partition("` `")
                assert name in names_in(file), row
