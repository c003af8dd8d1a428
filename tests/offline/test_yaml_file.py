"""YAML files that cost far more than their size are refused in one sentence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.errors import InvalidFileError
from penstock.offline.yaml_file import read_yaml
from tests.support.errors import raises


def _levels(first: str, line: str) -> str:
    lines = [first]
    for i in range(1, 10):
        lines.append(line.format(i=i, aliases=",".join([f"*a{i - 1}"] * 9)))
    return "\n".join(lines) + "\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_levels("a0: &a0 [x]", "a{i}: &a{i} [{aliases}]"), "expected at most 65536 values once aliases are replaced"),
        (_levels("a0: &a0 {x: 1}", "a{i}: &a{i} {{<<: [{aliases}]}}"), "once aliases are replaced"),
        ("a: &a [*a]\n", "line 1: an alias contains itself"),
        ("a: " + "[" * 60_000, "recursion"),
        ("a: " + "9" * 60_000, "Exceeds the limit"),
        ("a: " + "1:" * 30_000 + "1", ""),
        ("a: [" + "x," * 100_000 + "]", "expected at most 65536 bytes"),
    ],
    ids=["lists", "merges", "cycle", "nesting", "digits", "base-60", "size"],
)
def test_costly_files_are_refused_in_seconds(text: str, message: str, tmp_path: Path) -> None:
    path, start = tmp_path / "a.yaml", time.process_time()
    path.write_text(text)
    if message:
        with raises(InvalidFileError, param="path", match=rf"a\.yaml: .*{message}"):
            read_yaml(path)
    else:
        read_yaml(path)
    assert time.process_time() - start < 10


def test_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &base {x: 1, y: [1, 2]}\nother: *base\nmerged: {<<: *base, z: 3}\n")
    base = {"x": 1, "y": [1, 2]}
    assert read_yaml(path) == {"base": base, "other": base, "merged": base | {"z": 3}}
    path.write_text("")
    with raises(InvalidFileError, param="path", match="expected a mapping"):
        read_yaml(path)
