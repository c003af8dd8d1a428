"""One tiny bundle per scheme, exported once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from penstock.graph.export import export_bundle
from penstock.lite.core import Context, Model

from tests.invariants.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def model_of(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Model]]:
    """scheme -> opened bundle of the tiny checkpoint."""
    folder = tmp_path_factory.mktemp("bundles")
    models: dict[str, Model] = {}

    def get(scheme: str) -> Model:
        if scheme not in models:
            export_bundle(checkpoint, folder / f"{scheme}.psm", scheme=scheme)
            models[scheme] = Model.open(folder / f"{scheme}.psm")
        return models[scheme]

    yield get
    for model in models.values():
        model.close()


@pytest.fixture(scope="session")
def context_of() -> Iterator[Callable[[str, int], Context]]:
    """(level, threads) -> context."""
    contexts: dict[tuple[str, int], Context] = {}

    def get(level: str, num_threads: int) -> Context:
        key = (level, num_threads)
        if key not in contexts:
            contexts[key] = Context(num_threads=num_threads, cpu_level=level)
        return contexts[key]

    yield get
    for context in contexts.values():
        context.close()
