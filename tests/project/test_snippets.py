"""The commands and programs that the documents show run, in their order, outside the repository."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from penstock.cli.main import COMMANDS, make_parser
from tests.support.documents import ROOT, Runner, blocks, inline_commands
from tests.system_packages import PACKAGES, skip_reason

PAGES = sorted(
    [
        *(path for path in (ROOT / "docs").rglob("*.md") if "history" not in path.parts),
        *ROOT.glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "demo").rglob("*.md"),
    ]
)
BUILDS_LIBRARIES = "devices"
"""A page whose commands build one library after the other, as tests/devices does in the long tests."""
RUNNABLE = [page for page in PAGES if any(block.is_runnable for block in blocks(page))]


def known_options(command: str) -> set[str]:
    """The options of a command and of its own subcommands, and those before it."""
    parsers, options = [make_parser([command])], set()
    for parser in parsers:
        for action in parser._actions:
            options |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return options


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.exhaustive if page.stem == BUILDS_LIBRARIES else (), id=page.stem)
        for page in RUNNABLE
    ],
)
def test_snippets_of_a_page_run(page: Path, short_folder: Path) -> None:
    shown = [block for block in blocks(page) if block.is_runnable]
    needed = [name for name in PACKAGES if any(re.search(rf"\b{name} ", block.code) for block in shown)]
    if reason := skip_reason(*needed):
        pytest.skip(reason)
    runner = Runner(short_folder)
    try:
        for block in shown:
            runner.run(block)
    finally:
        runner.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        place = f"{page.name}:{block.line}"
        assert not block.is_code or block.is_runnable or block.test or len(block.reason) > 20, place
        if block.test:
            file, _, name = block.test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), f"{place}: {block.test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_within_sentences_exist(page: Path) -> None:
    """A command in a sentence or a table is one of penstock's, with options that it has."""
    for command, options in inline_commands(page):
        assert command in COMMANDS, f"{page.name}: penstock {command}"
        known = known_options(command)
        assert set(options) <= known, f"{page.name}: penstock {command} {set(options) - known}"
