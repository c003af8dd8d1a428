"""Bundles of newer formats: a minor one opens with a word, a major one is refused by name, whoever opens it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import LLM, lite, pipeline
from penstock.core import native
from penstock.errors import UnsupportedError
from tests.devices.conftest import ROOT
from tests.support.command import environment
from tests.support.errors import raises

BUNDLE = ROOT / "tests" / "golden" / "1.0" / "w8a8.psm"
MINOR = "header.minor: the file has format 1.9, this version reads 1.1"
MAJOR = "header.major: this version reads format 1, the file has format 2.0"


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("newer")
    found = {}
    for name, at, number in (("major", 8, 2), ("minor", 10, 9)):
        data = bytearray(BUNDLE.read_bytes())
        data[at : at + 2] = number.to_bytes(2, "little")
        found[name] = folder / f"{name}.psm"
        found[name].write_bytes(data)
    return found


PENSTOCK = (sys.executable, "-m", "penstock")
COMMANDS = {
    "run": lambda path: (*PENSTOCK, "run", path, "a", "--max-tokens", "3", "--temperature", "0"),
    "infer": lambda path: (*PENSTOCK, "infer", "--model", path, "a", "--max-tokens", "3", "--temperature", "0"),
    "infer lite": lambda path: (*PENSTOCK, "infer", "--backend", "lite", "--model", path, "a", "--max-tokens", "3"),
    "inspect": lambda path: (*PENSTOCK, "inspect", path, "--verify"),
}


def finished(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, env=environment())


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str, newer: dict[str, Path]) -> None:
    done = finished(*COMMANDS[name](newer["minor"]))
    assert (done.returncode, done.stderr.count(MINOR)) == (0, 1), done.stderr
    assert done.stdout
    done = finished(*COMMANDS[name](newer["major"]))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{newer['major']}: {MAJOR}" in done.stderr


@pytest.mark.long
def test_penstock_lite(newer: dict[str, Path], lite: Path) -> None:
    words = ("a", "--max-tokens", "3", "--temperature", "0", "--json")
    done = finished(lite, newer["minor"], *words)
    assert (done.returncode, done.stderr.count(MINOR)) == (0, 1), done.stderr
    assert done.stdout.split('"seed"')[0] == finished(lite, BUNDLE, *words).stdout.split('"seed"')[0]
    done = finished(lite, newer["major"], *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{newer['major']}: {MAJOR}" in done.stderr


@pytest.mark.long
def test_c(newer: dict[str, Path], c_program: Path) -> None:
    assert finished(c_program, newer["minor"], "a", "3").stdout == finished(c_program, BUNDLE, "a", "3").stdout
    done = finished(c_program, newer["major"], "a", "3")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{newer['major']}: {MAJOR}" in done.stderr


OPENED: dict[str, Callable[[Path], object]] = {
    "LLM": lambda path: LLM(path).close(),
    "core": lambda path: native.Model.open(path).close(),
    "lite": lambda path: lite.Model().build_from_file(path, lite.ModelType.PENSTOCK),
    "runner": lambda path: lite.ModelParallelRunner().build_from_file(path, lite.ModelType.PENSTOCK),
    "pipeline": lambda path: pipeline(model=path).close(),
    "pipeline lite": lambda path: pipeline(model=path, backend="lite").close(),
}


@pytest.mark.parametrize("name", OPENED)
def test_python(name: str, newer: dict[str, Path]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")  # as a program has it: each once
        OPENED[name](newer["minor"])
    assert [MINOR in str(one.message) for one in told if one.category is UserWarning] == [True]
    with raises(UnsupportedError, match=f"{newer['major']}: {MAJOR}"):
        OPENED[name](newer["major"])
