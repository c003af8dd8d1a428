from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.core.native import Context, Model
from tests.support.tiny_graph import tiny_graph, write_bundle


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(scheme, windows) -> path of a tiny bundle, written once."""
    folder = tmp_path_factory.mktemp("tiny")
    made: dict[tuple[str, tuple[int, ...]], Path] = {}

    def get(scheme: str = "f32", windows: tuple[int, ...] = (0,)) -> Path:
        key = (scheme, windows)
        if key not in made:
            made[key] = write_bundle(folder / f"{len(made)}.psm", tiny_graph(scheme, windows=windows))
        return made[key]

    return get


@pytest.fixture(scope="session")
def context() -> Iterator[Context]:
    with Context(2) as made:
        yield made


@pytest.fixture
def model(bundle_of: Callable[..., Path]) -> Iterator[Model]:
    with Model.open(bundle_of()) as made:
        yield made
