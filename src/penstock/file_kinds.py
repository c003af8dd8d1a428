"""The kinds of files, GGUF or bundle, as their first bytes tell.

The commands import this without numpy.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from penstock.errors import UnsupportedError

__all__ = ["MINDSPORE_SUFFIXES", "PARTIAL_SUFFIX", "has_bundle_magic", "is_bundle", "is_gguf", "refuse_mindspore"]

MINDSPORE_SUFFIXES: Final = (".mindir", ".ms", ".ckpt", ".om")
"""The names of the files of MindSpore, MindSpore Lite and Ascend: graphs, and weights."""
PARTIAL_SUFFIX: Final = ".partial"
"""The end of the name of a file or folder that is not complete yet."""

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


def has_bundle_magic(path: Path) -> bool:
    """Return True for a file that begins as a bundle does, whatever its name."""
    return _head(path) == _BUNDLE


def refuse_mindspore(path: Path, *, where: str = "", param: str = "model") -> None:
    """Raise UnsupportedError, with the way to come over, for a file whose name is that of one of MindSpore.

    ``where``: what the message begins with, by default nothing.  ``param``: the field that names the file.
    """
    suffix = path.suffix.lower()
    if suffix in MINDSPORE_SUFFIXES and not has_bundle_magic(path):
        raise UnsupportedError(
            f"{where}{path}: expected a bundle (.psm), a GGUF file or a folder with config.json and *.safetensors, got "
            f"a {suffix} file, which cannot be read; save the model in the format of Hugging Face (MindFormers: "
            "`convert_weight.py --reversed`), then `penstock export FOLDER OUT.psm` makes a bundle",
            param=param,
        )


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
