"""One tiny bundle per scheme, exported once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.core.native import Context, Model
from penstock.graph.export import export_bundle
from tests.support.invariant_checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 19 tiles of 16: whole tiles are what the fused linear of gate and up takes, and more than a kernel reads at once.
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama", intermediate_size=304)


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny bundles lie; a run within a run shares its parent's."""
    shared = os.environ.get("PENSTOCK_TEST_BUNDLES")
    return Path(shared) if shared else tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="session")
def model_of(checkpoint: Path, bundles: Path) -> Iterator[Callable[[str], Model]]:
    """scheme -> opened bundle of the tiny checkpoint."""
    models: dict[str, Model] = {}

    def get(scheme: str) -> Model:
        if scheme not in models:
            path = bundles / f"{scheme}.psm"
            if not path.exists():
                export_bundle(checkpoint, path, scheme=scheme)
            models[scheme] = Model.open(path)
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
