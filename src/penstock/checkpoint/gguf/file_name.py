"""Which paths are GGUF files or bundles, and the names of the files of a split model.

The commands import this without numpy.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

__all__ = ["MAX_SPLITS", "is_bundle", "is_gguf", "split_names"]

MAX_SPLITS: Final = 4096
_SPLIT_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>(?i:\.gguf)?)", re.DOTALL)


_GGUF: Final = b"GGUF"
_BUNDLE: Final = b"PENSTOCK"


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file, as its first bytes tell.

    A file of another kind, or one that does not exist or cannot be read, is known by its name.
    """
    return _is_kind(path, _GGUF, ".gguf", other=_BUNDLE)


def is_bundle(path: Path) -> bool:
    """Return True for a bundle; a path is known as in ``is_gguf``."""
    return _is_kind(path, _BUNDLE, ".psm", other=_GGUF)


def _is_kind(path: Path, magic: bytes, suffix: str, other: bytes) -> bool:
    head = _head(path)
    if head is None:
        return False
    return head.startswith(magic) or (path.suffix.lower() == suffix and not head.startswith(other))


def _head(path: Path) -> bytes | None:
    """Return the first bytes of a file; none if it cannot be read, and None for a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe does not block this call
    except (OSError, ValueError):
        return b""
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            return None
        return os.read(descriptor, len(_BUNDLE)) if stat.S_ISREG(kind) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def split_names(name: str) -> list[str]:
    """Return the names of all files of the model that ``name`` is a file of, from the first on.

    A name without -00001-of-00002 at its end, or with a count above MAX_SPLITS, is that of a whole model.
    """
    match = _SPLIT_NAME.fullmatch(name)
    count = int(match["count"]) if match is not None else 0
    if match is None or not 1 <= int(match["number"]) <= count <= MAX_SPLITS:
        return [name]
    return [f"{match['stem']}-{number:05d}-of-{count:05d}{match['end']}" for number in range(1, count + 1)]
