"""A hub and a cache folder for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.hub import transfer
from tests.support.hub_server import HubServer


@pytest.fixture
def hub_cache(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this process, which downloads from ``hub`` and tries again without a pause."""
    folder = tmp_path / "a" / "b" / "c" / "cache"
    for key, value in {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{key}", value)
    monkeypatch.setattr(transfer, "_PAUSE_S", 0.0)
    return folder
