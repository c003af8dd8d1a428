"""The tests themselves: where they lie, what they import, how they are called."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from penstock import errors
from tests.support.order import SLOWEST, in_order

ROOT = Path(__file__).parents[2]
TESTS, PACKAGE = ROOT / "tests", ROOT / "src" / "penstock"
BESIDE = ("benchmarks", "devices", "examples", "general", "golden", "invariants", "kernels", "project", "ranks",
          "support")  # fmt: skip
"""Folders of tests and helpers that belong to no single folder of the package."""
MAX_NAME_LEN = 59
FILES = sorted(TESTS.rglob("*.py"))
TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
IMPORT_OF_TESTS = re.compile(r"^\s*(?:from|import)\s+tests\b[^\n(]*(?:\([^)]*)?\btest_", re.MULTILINE)
CLOCK = re.compile(r"\b(?:monotonic|perf_counter|time\.time)(?:_ns)?\(\)")
BY_SENTENCE = re.compile(r"pytest\.raises\(\s*(\w+),\s*match=")
MAX_BY_SENTENCE = 150
"""Tests that match an error of Penstock only by its sentence: never more than this; lower it with each one replaced."""


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def test_folders_mirror_those_of_the_package() -> None:
    tested = {path.parent.relative_to(TESTS) for path in FILES if path.name.startswith("test_")}
    unknown = [one for one in tested if not {*one.parts} & {*BESIDE} and not (PACKAGE / one).is_dir()]
    assert not unknown, f"no folders of the package: {unknown}"
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.glob("*/__init__.py")}
    assert not folders - tested, f"no tests: {folders - tested}"


def import_statements(text: str) -> list[ast.stmt]:
    """The imports of a file that imports test modules, or looks like it."""
    if not re.search(IMPORT_OF_TESTS, text):
        return []
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


# One test for all files: a parameter for each would make a fifth of the suite's tests.
def test_files_import_no_test_modules() -> None:
    """Shared helpers are in tests/support or a conftest.py."""
    for file, node in ((one, node) for one in FILES for node in import_statements(one.read_text())):
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
    names += [(name_of(path), name) for path in FILES for name in re.findall(TEST, path.read_text())]
    long = [(file, name) for file, name in names if len(name) > MAX_NAME_LEN]
    assert not long, f"{MAX_NAME_LEN} characters at most: {long}"


def test_errors_are_matched_by_field_and_code() -> None:
    """New tests use ``raises`` of tests/support/errors.py with ``param`` or ``code``; the old ones become fewer."""
    matches = [match for path in FILES for match in re.findall(BY_SENTENCE, path.read_text())]
    num_matches = sum(name in errors.__all__ for name in matches)
    assert num_matches <= MAX_BY_SENTENCE, f"{num_matches} of pytest.raises(<error of Penstock>, match=...)"


def test_no_assertion_reads_a_clock() -> None:
    """A busy machine fails it.  Tests wait for events (tests/support/waiting.py), give a clock, or count the work."""
    reading = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        if re.search(CLOCK, text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assert) and re.search(CLOCK, ast.unparse(node.test))
    ]
    assert not reading, f"elapsed time is asserted: {reading}"


def test_the_files_that_are_begun_first_exist() -> None:
    assert not [name for name in SLOWEST if not (TESTS / name).is_file()]


def test_the_slowest_files_are_begun_first() -> None:
    files = [TESTS / name for name in ("auto/test_a.py", "auto/test_b.py", SLOWEST[1], "auto/test_b.py", SLOWEST[0])]
    found = in_order([*enumerate(files)], lambda item: item[1])
    assert [number for number, _ in found] == [4, 2, 1, 3, 0]
