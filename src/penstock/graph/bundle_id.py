"""The identity of a bundle, on whatever machine and under whatever name its file is."""

from __future__ import annotations

import struct
from hashlib import sha256
from pathlib import Path
from typing import Final

from penstock.file_kinds import is_gguf

__all__ = ["bundle_id"]

_HEAD: Final = struct.Struct("<16sQQ")
"""The beginning of a bundle: its kind, and offset and size of its metadata."""


def bundle_id(path: str | Path) -> str:
    """Return a hash of a bundle's metadata, which holds the checksums of all its parts; "" for a checkpoint."""
    if not Path(path).is_file() or is_gguf(Path(path)):
        return ""
    with Path(path).open("rb") as file:
        head = file.read(_HEAD.size)
        _, offset, size = _HEAD.unpack(head)
        file.seek(offset)
        return sha256(head + file.read(size)).hexdigest()
