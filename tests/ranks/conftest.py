"""Bundles of tiny networks, and their parts for each rank; each is made once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from penstock.graph.export import export_bundle
from penstock.graph.rank_bundle import write_rank_bundle
from tests.support.builds import run
from tests.support.command import DEMO
from tests.support.families import save


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(family, scheme) -> whole bundle."""
    base = tmp_path_factory.mktemp("whole")

    @cache
    def folder_of(family: str) -> Path:
        return save(family, base / family)

    @cache
    def get(family: str, scheme: str) -> Path:
        path = base / f"{family}-{scheme}.psm"
        export_bundle(folder_of(family), path, scheme=scheme)
        return path

    return get


@pytest.fixture(scope="session")
def parts_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, int], list[Path]]:
    """(whole bundle, world) -> the bundle of each rank."""
    base = tmp_path_factory.mktemp("parts")

    @cache
    def get(path: Path, world: int) -> list[Path]:
        parts = [base / f"{path.stem}-{rank}-of-{world}.psm" for rank in range(world)]
        for rank, part in enumerate(parts):
            write_rank_bundle(path, part, rank, world)
        return parts

    return get


@pytest.fixture(scope="session")
def demo_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo bundle for two ranks, as ``penstock export`` writes it."""
    folder = tmp_path_factory.mktemp("demo") / "ranks"
    run(sys.executable, "-m", "penstock", "export", DEMO, folder, "--tp", "2")
    return folder
