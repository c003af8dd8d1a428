"""The names in a folder that is cut for ranks, without the imports that reading such a folder needs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["MANIFEST", "is_sharded", "rank_bundle", "rank_name"]

MANIFEST: Final = "manifest.json"


def rank_name(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank_{rank}"


def rank_bundle(rank: int | str) -> str:
    """Return the name of a rank's bundle in a folder that ``penstock export --tp`` made."""
    return f"rank_{rank}.psm"


def is_sharded(folder: Path) -> bool:
    """Return True for a folder that ``penstock shard`` made, or that has folders of ranks without a manifest."""
    return (folder / MANIFEST).exists() or (folder / rank_name(0)).is_dir()
