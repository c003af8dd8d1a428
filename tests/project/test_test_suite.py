"""The tests themselves: where they lie, what they import, how they are called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS, PACKAGE = ROOT / "tests", ROOT / "src" / "penstock"
BESIDE = ("benchmarks", "devices", "examples", "golden", "invariants", "kernels", "project", "support")
"""Folders of tests and helpers that belong to no single folder of the package."""
MAX_NAME_LEN = 59
FILES = sorted(TESTS.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def test_folders_mirror_those_of_the_package() -> None:
    tested = {path.parent.relative_to(TESTS) for path in FILES if path.name.startswith("test_")}
    unknown = [one for one in tested if one.parts[0] not in BESIDE and not (PACKAGE / one).is_dir()]
    assert not unknown, f"no folders of the package: {unknown}"
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.glob("*/__init__.py")}
    assert not folders - tested, f"no tests: {folders - tested}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_import_no_test_modules(path: Path) -> None:
    """Shared helpers are in tests/support or a conftest.py."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            assert parts[0] != "tests" or not any(part.startswith("test_") for part in parts), f"imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_names_are_short(path: Path) -> None:
    names = [path.stem]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            names.append(node.name)
    long = [name for name in names if len(name) > MAX_NAME_LEN]
    assert not long, f"{MAX_NAME_LEN} characters at most: {long}"
