"""What the documents say is true: commands run, files and names exist, every dependency is accounted for."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.command import environment
from tests.support.documents import commands

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PATHS = re.compile(r"`((?:src|core|tests|benchmarks|demo|examples|docs)/[\w./*-]+)`")


# The log is history: it names files as they were called on the day of an entry.
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name != "log.md"], ids=lambda p: p.name)
def test_files_that_documents_name_exist(document: Path) -> None:
    for name in PATHS.findall(document.read_text()):
        assert list(ROOT.glob(name.rstrip("/"))), f"{document.name} names {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    """Also in a checkout, where a stub stands in the place of a generated page."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if "history" not in d.parts], ids=lambda p: p.name)
def test_lines_and_cells_are_short(document: Path) -> None:
    is_code = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if line.lstrip().startswith("|") and not is_code:
            longest = max(len(cell.strip()) for cell in re.split(r"(?<!\\)\|", line))
            assert longest <= 200, f"{document.name}:{number}: a cell of {longest} characters"
        else:
            assert len(line) <= 120, f"{document.name}:{number}: {len(line)} characters"


def test_steps_of_a_request_name_what_there_is() -> None:
    """Each step of docs/explanation/request.md is one file of its own, which defines the names of the step."""
    section = (ROOT / "docs" / "explanation" / "request.md").read_text().split("\n## ")[1]
    steps = re.split(r"\n\d\. ", section.split("\n\nA disconnect")[0])[1:]
    files = [re.findall(r"\]\(\.\./\.\./([^)]+)\)", step) for step in steps]
    assert len(steps) == 8
    assert all(len(named) == 1 for named in files)
    assert len({named[0] for named in files}) == 8
    for (file,), step in zip(files, steps, strict=True):
        defined = definitions(ROOT / file)
        named = re.findall(r"`([A-Za-z_.]+)`", step)
        assert named, step
        assert set(named) <= defined, f"{file} does not define {set(named) - defined}"


def definitions(file: Path) -> set[str]:
    """The names of functions, classes and methods of a file."""
    body = ast.parse(file.read_text()).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in body if isinstance(node, kinds)]
    inner = {f"{one.name}.{node.name}" for one in top for node in one.body if isinstance(node, kinds)}
    return {node.name for node in top} | inner


def test_the_architecture_names_every_folder() -> None:
    package, text = ROOT / "src" / "penstock", (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    parents = [package, *(package / name for name in ("models", "checkpoint", "text", "engine", "graph"))]
    folders = [child for parent in parents for child in parent.iterdir() if (child / "__init__.py").exists()]
    assert [str(folder.relative_to(package)) for folder in folders if f"{folder.name}/" not in text] == []


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_commands_that_documents_show_are_understood(document: Path) -> None:
    from penstock.cli.main import make_parser

    parser = make_parser()
    for words in commands(document):
        assert parser.parse_args(words[1:]), words  # a wrong option or subcommand exits


@pytest.mark.long
def test_commands_of_the_readme_run(tmp_path: Path) -> None:
    """All that need no more than the demo, in their order; the service, which does not end, is asked for its help."""
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    ran = [words for words in commands(ROOT / "README.md") if "my-checkpoint" not in words]
    assert [words[1] for words in ran] == [
        "doctor",
        "run",
        "export",
        "convert",
        "inspect",
        "advise",
        "bench",
        "eval",
        "profile",
        "run",
        "chat",
        "batch",
        "serve",
    ]
    ran[-1].append("--help")
    for words in ran:
        run([sys.executable, "-m", *words], tmp_path)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200, 200]


def test_python_of_the_readme_runs(tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "length" in run([sys.executable, "-c", script], tmp_path)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
