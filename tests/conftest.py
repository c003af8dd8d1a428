"""Tests import their own modules as ``tests.*``; the installed package comes first."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
# Processes that tests start take the installed package too, not the source tree that they may be started in.
os.environ["PYTHONSAFEPATH"] = "1"
# Tools that came with the environment (cmake) are found as if it were activated.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
# A run in the background may start with interrupts ignored, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


pytest_plugins = (
    "tests.support.command",
    "tests.support.fake_model",
    "tests.support.hub_server",
    "tests.support.services",
)


def configured(folder: Path, *options: str) -> Path:
    command = ["cmake", "-S", str(Path(__file__).parents[1]), "-B", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """An empty folder with a short path, for unix sockets, whose paths the kernel limits to 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def release_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where CMake is configured for a release of the core; whoever wants a target builds it there."""
    return configured(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="session")
def sanitized_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with AddressSanitizer and UndefinedBehaviorSanitizer, and the test programs of ``core/tools``."""
    return configured(tmp_path_factory.mktemp("sanitized"), "-DPENSTOCK_SANITIZE=ON", "-DPENSTOCK_TOOLS=ON")
