"""The demo model as bundles of three schemes, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.graph.export import export_bundle
from tests.support.command import penstock_command
from tests.support.lite_demo import BUNDLE, FOLDER

__all__ = ["SCHEMES", "bundles", "penstock_command"]

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
