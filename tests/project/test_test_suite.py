"""The tests themselves: where they lie, what they import, how they are called."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS, PACKAGE = ROOT / "tests", ROOT / "src" / "penstock"
BESIDE = ("benchmarks", "devices", "examples", "golden", "invariants", "kernels", "project", "ranks", "support")
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


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


# One test for all files: a parameter for each would make a fifth of the suite's tests.
def test_files_import_no_test_modules() -> None:
    """Shared helpers are in tests/support or a conftest.py."""
    for file, node in ((one, node) for one in FILES for node in nodes_of(one)):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            is_test = parts[0] == "tests" and any(part.startswith("test_") for part in parts)
            assert not is_test, f"{name_of(file)} imports {module}"


def test_names_are_short() -> None:
    names = [(name_of(path), path.stem) for path in FILES]
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                names.append((name_of(path), node.name))
    long = [(file, name) for file, name in names if len(name) > MAX_NAME_LEN]
    assert not long, f"{MAX_NAME_LEN} characters at most: {long}"
