"""Builds of the core by CMake, and folders, that the workers of a run share: each is made once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.core.native import cpu_levels

ROOT = Path(__file__).parents[2]


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder of this run, the same one in each worker of pytest-xdist."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other workers away from a shared folder."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tool(name: str) -> str:
    """A program of the environment, which need not be activated, or of the system."""
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is not installed; cmake comes with the test extra, objdump and nm with binutils")
    return path


def run(*command: object) -> str:
    """Run a command, which must succeed, and return its output."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def configured(factory: pytest.TempPathFactory, name: str, *options: str) -> Path:
    """A shared folder where CMake is configured."""
    folder = shared_folder(factory, name)
    with locked(folder):
        if not (folder / "CMakeCache.txt").exists():
            run(tool("cmake"), "-S", ROOT, "-B", folder, *options)
    return folder


def build(folder: Path, *targets: str) -> None:
    """Build targets in a shared folder; without any, all of them."""
    with locked(folder):
        run(tool("cmake"), "--build", folder, "-j", "2", *(["--target", *targets] if targets else []))


@pytest.fixture(scope="session", autouse=True)
def shared_objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Builds of this run share objects (``compile_once.py``), unless the environment (``.ci/run``) names a launcher."""
    with pytest.MonkeyPatch.context() as patch:
        if "CMAKE_CXX_COMPILER_LAUNCHER" not in os.environ:
            script = Path(__file__).with_name("compile_once.py")
            patch.setenv("CMAKE_CXX_COMPILER_LAUNCHER", f"{sys.executable};-I;{script}")
            patch.setenv("PENSTOCK_TEST_OBJECTS", str(shared_folder(tmp_path_factory, "objects")))
        yield


@pytest.fixture(scope="session")
def release_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where CMake is configured for a release of the core; ``build`` makes targets there."""
    return configured(tmp_path_factory, "release")


@pytest.fixture(scope="session")
def sanitized_build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same with AddressSanitizer and UndefinedBehaviorSanitizer, and the test programs of ``core/tools``.

    It has the levels that this machine runs: one takes a minute to build.  Undefined behaviour traps in kernels, and
    programs that inherit the environment of the test say in which line.
    """
    levels = ";".join(level for level, is_runnable in cpu_levels() if is_runnable)
    options = ("-DPENSTOCK_SANITIZE=ON", "-DPENSTOCK_TOOLS=ON", f"-DPENSTOCK_LEVELS={levels}")
    folder = configured(tmp_path_factory, "sanitized", *options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "handle_sigill=1"))
        yield folder


@pytest.fixture(scope="session")
def thread_sanitized_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with ThreadSanitizer, and one level, as threads share the same at each.

    It is the best one but for those that take longest to build; with the generic level, the tests take minutes longer.
    """
    fit = [level for level, is_runnable in cpu_levels() if is_runnable and level not in ("avx512", "amx")]
    options = ("-DPENSTOCK_SANITIZE=thread", "-DPENSTOCK_TOOLS=ON", f"-DPENSTOCK_LEVELS={fit[0]}")
    return configured(tmp_path_factory, "thread-sanitized", *options)
