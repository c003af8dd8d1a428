"""The compiler launcher of the tests copies an object that another build of the run compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.builds import tool
from tests.support.command import ROOT

SOURCE = "int twice(int number) { return 2 * number; }\n"


@pytest.fixture
def compiled(tmp_path: Path):
    """Compile a text by the launcher in a folder of its own; return how many objects the run has compiled."""
    objects = tmp_path / "objects"
    objects.mkdir()

    def run(name: str, compiler: str, text: str, *options: str) -> int:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "twice.cpp").write_text(text)
        script = ROOT / "tests" / "support" / "compile_once.py"
        command = [sys.executable, "-I", script, compiler, *options, "-o", "twice.o", "-c", folder / "twice.cpp"]
        environment = os.environ | {"PENSTOCK_TEST_OBJECTS": str(objects)}
        subprocess.run(list(map(str, command)), cwd=folder, env=environment, check=True)
        assert (folder / "twice.o").stat().st_size
        return sum(path.suffix == "" for path in objects.iterdir())

    return run


def test_a_link_to_the_compiler_shares_its_objects(compiled, tmp_path: Path) -> None:
    link = tmp_path / "g++-of-another-build"
    link.symlink_to(tool("c++"))
    assert compiled("first", "c++", SOURCE, "-O2") == 1
    assert compiled("second", str(link), SOURCE, "-O2", "-I/usr/include") == 1


def test_other_options_or_another_text_are_compiled(compiled) -> None:
    assert compiled("first", "c++", SOURCE, "-O2") == 1
    assert compiled("second", "c++", SOURCE, "-O1") == 2
    assert compiled("third", "c++", SOURCE.replace("2", "3"), "-O2") == 3
