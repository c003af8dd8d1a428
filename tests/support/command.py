"""The command as a user runs it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.support.builds import shared_folder
from tests.support.zygote import has_first_imports, run_command

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "demo.psm"
FOLDER = ROOT / "demo" / "model"

_COMMANDS: set[str] = set()
"""Subcommands that ran once."""

Run = Callable[..., subprocess.CompletedProcess[str]]


def environment(**extra: str) -> dict[str, str]:
    """This process's, with the package that the tests import on the path."""
    import penstock

    home = str(Path(penstock.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": home, "PYTHONUTF8": "1", **extra}


def start(*args: object, **options: object) -> subprocess.Popen[bytes]:
    """Start the command; the caller waits for it."""
    command = [sys.executable, "-m", "penstock", *map(str, args)]
    defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()}
    return subprocess.Popen(command, cwd=ROOT, **(defaults | options))


@pytest.fixture(scope="session", autouse=True)
def bundle_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of bundles of this run, which its workers and their processes share: each folder is exported once."""
    folder = shared_folder(tmp_path_factory, "bundles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of bundles, for a test that looks at it."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def penstock_inline(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``penstock ARGS`` in this process, where PyTorch is imported already."""

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        arguments = list(map(str, args))
        capsys.readouterr()
        try:
            status: object = main(arguments)
        except SystemExit as stop:  # of the parser
            status = stop.code
        assert isinstance(status, int)
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


@pytest.fixture
def penstock_command() -> Run:
    """Runs ``penstock ARGS`` in a process; no run may end in a traceback.

    The first run of each subcommand is a new interpreter with its own imports, as a user's are; so are those that
    are ``cold``, and those whose environment imports may read.  The others are forked from a process that has them.
    """

    def run(*args: object, stdin: str = "", cold: bool = False, **extra: str) -> subprocess.CompletedProcess[str]:
        words = list(map(str, args))
        command = next((word for word in words if not word.startswith("-")), "")
        env = environment(**extra)
        is_new = command not in _COMMANDS or not has_first_imports(env)
        if cold or is_new or any(name.startswith("PYTHON") for name in extra):
            _COMMANDS.add(command)
            start = [sys.executable, "-m", "penstock", *words]
            done = subprocess.run(
                start, input=stdin, capture_output=True, text=True, encoding="utf-8", env=env, cwd=ROOT, timeout=600
            )
        else:
            done = run_command(words, stdin, env, ROOT)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run
