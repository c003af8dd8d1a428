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

    def run(name: str, compiler: str, text: str, *options: str, header: str = "") -> int:
        folder = tmp_path / name
        (folder / "include").mkdir(parents=True, exist_ok=True)
        (folder / "include" / "factor.h").write_text(header)
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
    assert compiled("third", "c++", SOURCE, "-O2", "-Wno-unused-function") == 1


def test_other_options_or_another_text_are_compiled(compiled) -> None:
    assert compiled("first", "c++", SOURCE, "-O2") == 1
    assert compiled("second", "c++", SOURCE, "-O1") == 2
    assert compiled("third", "c++", SOURCE.replace("2", "3"), "-O2") == 3


def test_the_place_of_the_standard_does_not_matter(compiled) -> None:
    """Versions of CMake put it elsewhere.  Of several levels of optimization the last one counts."""
    assert compiled("first", "c++", SOURCE, "-O2", "-fPIC", "-std=c++20", "-Os") == 1
    assert compiled("second", "c++", SOURCE, "-O2", "-std=c++20", "-fPIC", "-Os") == 1
    assert compiled("third", "c++", SOURCE, "-Os", "-std=c++20", "-fPIC", "-O2") == 2
    assert compiled("fourth", "c++", SOURCE, "-O2", "-std=c++17", "-fPIC", "-Os") == 3


def test_a_file_with_the_same_headers_is_not_preprocessed(compiled, tmp_path: Path) -> None:
    """The second compiler fails if it is run; dependencies are those of the second folder."""
    source = '#include "factor.h"\nint twice(int number) { return kFactor * number; }\n'
    log = tmp_path / "log"
    spy = tmp_path / "c++"
    spy.write_text(f'#!/bin/sh\necho >> {log}\nexec {tool("c++")} "$@"\n')
    spy.chmod(0o755)
    options = ("-Iinclude", "-MD", "-MT", "twice.o", "-MF", "twice.d")

    def num_runs() -> int:
        return len(log.read_text().splitlines())

    assert compiled("first", str(spy), source, *options, header="enum { kFactor = 2 };\n") == 1
    before = num_runs()
    assert compiled("second", str(spy), source, *options, header="enum { kFactor = 2 };\n") == 1
    assert num_runs() == before
    dependencies = (tmp_path / "second" / "twice.d").read_text()
    assert dependencies.startswith("twice.o:")
    assert str(tmp_path / "second" / "include" / "factor.h") in dependencies
    assert str(tmp_path / "first") not in dependencies
    assert compiled("third", str(spy), source, *options, header="enum { kFactor = 3 };\n") == 2
    assert compiled("second", str(spy), source, *options, "-DkOther", header="enum { kFactor = 2 };\n") == 2
    assert num_runs() > before + 2
