"""The core as a device gets it: installed into a folder of its own, and the demo model in three schemes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.builds import build, locked, shared_folder

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo"
PROMPT = "def add(a, b):\n    return"

Command = Callable[..., str]


@pytest.fixture(scope="session")
def command() -> Command:
    """Runs a command, which must succeed; its standard output."""

    def run(*words: object, **options: object) -> str:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def installed(release_build: Path, command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of ``cmake --install``."""
    build(release_build)
    prefix = tmp_path_factory.mktemp("prefix")
    command("cmake", "--install", release_build, "--prefix", prefix)
    return prefix


@pytest.fixture(scope="session")
def lite(installed: Path) -> Path:
    """The program penstock-lite."""
    return installed / "bin" / "penstock-lite"


@pytest.fixture(scope="session")
def c_program(installed: Path, command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in C, linked to what was installed."""
    path = tmp_path_factory.mktemp("c") / "generate"
    (library,) = installed.glob("lib*/**/libpenstock.a")
    source = ROOT / "examples" / "c" / "generate.c"
    command("cc", source, "-I", installed / "include", library, "-lpthread", "-lm", "-ldl", "-o", path)
    return path


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in f32, w8a8 and w4a8."""
    from penstock.graph.export import export_bundle

    folder = shared_folder(tmp_path_factory, "demo-bundles")
    paths = {scheme: folder / f"{scheme}.psm" for scheme in ("f32", "w4a8")}
    with locked(folder):
        for scheme, path in paths.items():
            if not path.exists():
                export_bundle(DEMO / "model", path, scheme=scheme)
    return {**paths, "w8a8": DEMO / "demo.psm"}
