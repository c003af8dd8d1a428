"""Which paths are GGUF files; the commands import this without numpy."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_gguf"]


def is_gguf(path: Path) -> bool:
    """Return True if the path names a GGUF file; it need not exist."""
    return path.suffix == ".gguf" and not path.is_dir()
