"""The demo model as bundles of three schemes, made once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.graph.export import export_bundle
from tests.support.command import penstock_command
from tests.support.lite_demo import BUNDLE, FOLDER

__all__ = ["SCHEMES", "bundles", "here", "penstock_command"]

SCHEMES = ("f32", "w8a8", "w4a8")


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By scheme."""
    folder = tmp_path_factory.mktemp("bundles")
    found = {"w8a8": BUNDLE}
    for scheme in ("f32", "w4a8"):
        found[scheme] = folder / f"{scheme}.psm"
        export_bundle(FOLDER, found[scheme], scheme=scheme)
    return found


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Exports run in this process, which has loaded PyTorch already; what each was asked for."""
    asked: list[dict[str, Any]] = []

    def build(source: Path, out: Path, *, progress: object = None, **options: Any) -> dict[str, Any]:
        asked.append({"source": Path(source), "out": Path(out), **options})
        return dataclasses.asdict(export_bundle(source, out, **options))

    monkeypatch.setattr("penstock.offline.export.build_in_child", build)
    return asked
