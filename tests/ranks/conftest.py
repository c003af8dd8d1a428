"""Bundles of tiny networks, and their parts for each rank; each is made once."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from penstock.core.rank_layout import RankLayout
from penstock.graph.export import export_bundle
from penstock.graph.rank_bundle import write_rank_bundle
from tests.support.builds import run
from tests.support.command import DEMO
from tests.support.families import save
from tests.support.rank_programs import mpiexec


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder of this run of pytest, which all its processes share."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """``path``, which the first process that asks makes, while the others wait."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(family, scheme) -> whole bundle."""
    base = shared_folder(tmp_path_factory, "whole")

    @cache
    def get(family: str, scheme: str) -> Path:
        def make(path: Path) -> None:
            with TemporaryDirectory() as folder:
                export_bundle(save(family, Path(folder)), path, scheme=scheme)

        return made_once(base / f"{family}-{scheme}.psm", make)

    return get


@pytest.fixture(scope="session")
def long_context_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family, scheme, context length = 1,024) -> whole bundle."""
    base = shared_folder(tmp_path_factory, "long")

    @cache
    def get(family: str, scheme: str, context_len: int = 1024) -> Path:
        def make(path: Path) -> None:
            with TemporaryDirectory() as folder:
                config = save(family, Path(folder)) / "config.json"
                config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": context_len}))
                export_bundle(folder, path, scheme=scheme)

        return made_once(base / f"{family}-{scheme}-{context_len}.psm", make)

    return get


@pytest.fixture(scope="session")
def parts_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, RankLayout | int], list[Path]]:
    """(whole bundle, layout or number of ranks of tensor parallelism) -> the bundle of each rank."""
    base = tmp_path_factory.mktemp("parts")

    @cache
    def get(path: Path, layout: RankLayout | int) -> list[Path]:
        layout = RankLayout(layout) if isinstance(layout, int) else layout
        folder = base / f"{path.parent.name}-{path.stem}-{layout.tp}-{layout.pp}-{layout.cp}"
        folder.mkdir(exist_ok=True)
        parts = [folder / f"{rank}.psm" for rank in range(layout.world)]
        for rank, part in enumerate(parts):
            write_rank_bundle(path, part, rank, layout)
        return parts

    return get


@pytest.fixture(scope="session")
def demo_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo bundle for two ranks, as ``penstock export`` writes it."""
    folder = tmp_path_factory.mktemp("demo") / "ranks"
    run(sys.executable, "-m", "penstock", "export", DEMO, folder, "--tp", "2")
    return folder


@pytest.fixture(scope="session")
def mpich() -> str:
    """MPICH's launcher; without it the test is skipped."""
    return mpiexec()
