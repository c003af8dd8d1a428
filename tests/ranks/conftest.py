"""Bundles of tiny networks, and their parts for each rank; each is made once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from penstock.core.rank_layout import RankLayout
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
def long_context_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family, scheme, context length = 1,024) -> whole bundle."""
    base = tmp_path_factory.mktemp("long")

    @cache
    def get(family: str, scheme: str, context_len: int = 1024) -> Path:
        name = f"{family}-{scheme}-{context_len}"
        config = save(family, base / name) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": context_len}))
        export_bundle(base / name, base / f"{name}.psm", scheme=scheme)
        return base / f"{name}.psm"

    return get


@pytest.fixture(scope="session")
def parts_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, RankLayout | int], list[Path]]:
    """(whole bundle, layout or number of ranks of tensor parallelism) -> the bundle of each rank."""
    base = tmp_path_factory.mktemp("parts")

    @cache
    def get(path: Path, layout: RankLayout | int) -> list[Path]:
        layout = RankLayout(layout) if isinstance(layout, int) else layout
        parts = [
            base / f"{path.stem}-{rank}-of-{layout.tp}-{layout.pp}-{layout.cp}.psm" for rank in range(layout.world)
        ]
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
