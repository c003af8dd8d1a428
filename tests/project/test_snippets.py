"""The commands and programs that the tutorial and the guides show run, in their order, outside the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import ROOT, Runner, blocks
from tests.system_packages import PACKAGES, skip_reason

PAGES = sorted([*(ROOT / "docs" / "tutorial").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")])
RUNNABLE = [page for page in PAGES if any(block.is_runnable for block in blocks(page))]
SHORT = [page for page in RUNNABLE if any(block.is_runnable and not block.is_long for block in blocks(page))]
LONG = [page for page in RUNNABLE if any(block.is_long for block in blocks(page))]


def run_page(page: Path, folder: Path, with_long: bool) -> None:
    shown = [block for block in blocks(page) if block.is_runnable and (with_long or not block.is_long)]
    needed = [name for name in PACKAGES if any(re.search(rf"\b{name} ", block.code) for block in shown)]
    if reason := skip_reason(*needed):
        pytest.skip(reason)
    runner = Runner(folder)
    try:
        for block in shown:
            runner.run(block)
    finally:
        runner.close()


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.stem)
def test_snippets_of_a_page_run(page: Path, short_folder: Path) -> None:
    run_page(page, short_folder, with_long=False)


@pytest.mark.long
@pytest.mark.parametrize("page", LONG, ids=lambda page: page.stem)
def test_whole_page_runs(page: Path, short_folder: Path) -> None:
    run_page(page, short_folder, with_long=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_that_do_not_run_say_why(page: Path) -> None:
    for block in blocks(page):
        if block.mark.startswith("not run: "):
            assert len(block.mark) > len("not run: ") + 10, f"{page.name}:{block.line}"
