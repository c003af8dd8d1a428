"""What the documents say is true: commands run, files and names exist, every dependency is accounted for."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PATHS = re.compile(r"`((?:penstock|core|tests|benchmarks|demo|examples|docs)/[\w./*-]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_files_that_documents_name_exist(document: Path) -> None:
    for name in PATHS.findall(document.read_text()):
        assert list(ROOT.glob(name.rstrip("/"))), f"{document.name} names {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_dependency_has_a_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    text = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in wanted:
        name = re.split(r"[<>=\[ ]", requirement)[0]
        assert name == "penstock" or re.search(rf"^\| {re.escape(name)} ", text, re.MULTILINE), name


def test_every_make_target_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        for target in re.findall(r"\bmake ([a-z][\w-]*)", " ".join(re.findall(r"`[^`]+`", document.read_text()))):
            assert target in targets, f"{document.name} names make {target}"


def test_subcommands_that_documents_name_exist() -> None:
    from penstock.cli.main import make_parser

    parser = make_parser()
    subcommands = set(parser._subparsers._group_actions[0].choices)  # type: ignore[union-attr,arg-type]
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:sh|console)\n(.*?)```", document.read_text(), re.DOTALL):
            for line in block.splitlines():
                words = shlex.split(line.lstrip("$ "), comments=True)
                if words and Path(words[0]).name == "penstock" and len(words) > 1 and not words[1].startswith("-"):
                    assert words[1] in subcommands, f"{document.name}: {line}"
