"""Tests import their own modules as ``tests.*``; the installed package comes first."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.marks import may_have_long_tests  # found by the line above
from tests.support.order import in_order

# Processes that tests start take the installed package too, not the source tree that they may be started in.
os.environ["PYTHONSAFEPATH"] = "1"
# Tools that came with the environment (cmake) are found as if it were activated.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
# A run in the background may start with interrupts ignored, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Several test processes share the cores, and the threads of each one's PyTorch would wait for those of the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")


pytest_plugins = (
    "tests.support.builds",
    "tests.support.zygote",
    "tests.support.command",
    "tests.support.fake_model",
    "tests.support.hub_server",
    "tests.support.placements",
    "tests.support.services",
)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """An empty folder with a short path, for unix sockets, whose paths the kernel limits to 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as folder:
        yield Path(folder)


LONG_S = 1800.0
"""Builds under sanitizers and whole tables take minutes; ``timeout`` in pyproject.toml is for all other tests."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules, their rewritten asserts and tests stay: nothing of theirs is looked at for garbage, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of the long tests does not import the files that have none, which takes longer than some of its tests."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    is_run_of_long = config.getoption("markexpr").startswith("long and ")
    return True if is_test and is_run_of_long and not may_have_long_tests(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every other run checks that those have none."""
    if item.get_closest_marker("long") and not may_have_long_tests(item.path):
        raise pytest.UsageError(
            f"{item.nodeid}: expected a file that may_have_long_tests() (tests/support/marks.py) finds"
        )


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup() -> None:
    """A test without a seed of its own draws the same numbers, whichever tests ran before it in this process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(trylast=True)  # after the deselection of others
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = in_order(items, lambda item: item.path)
    if config.getoption("timeout") is not None:  # the command line says how long tests may take: ``make soak``
        return
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))
