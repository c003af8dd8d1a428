"""The digest of a version's files, by which a service and another machine find out that they have the same ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import FileAccessError

if TYPE_CHECKING:
    from penstock.servables.lifecycle.open_version import VersionSource

__all__ = ["version_digest"]

_READ_BYTES: Final = 1 << 20


def version_digest(source: VersionSource) -> bytes:
    """Return the SHA-256 of the names and contents of the files that a version runs from.

    They are its servable.py, the files of its folder, the files beside servable.py, and the Python files in other
    folders there.  Folders ``__pycache__`` do not count.  Raises FileAccessError.
    """
    digest = hashlib.sha256(b"penstock.servable.1")
    digest.update(hashlib.sha256(source.text).digest())
    for name, path in _files_of(source):
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + _file_digest(path))
    return digest.digest()


def _files_of(source: VersionSource) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each file in a fixed order."""
    beside = source.file.parent
    for path in _walk(source.folder):
        yield f"version/{path.relative_to(source.folder)}", path
    for entry in sorted(beside.iterdir()):
        name = entry.name
        if entry == source.file or name[0] in "._" or name.endswith(".tmp") or name.lstrip("+-")[:1].isdigit():
            continue
        if entry.is_dir():
            for path in _walk(entry):
                if path.suffix == ".py":
                    yield f"beside/{path.relative_to(beside)}", path
        elif entry.is_file():
            yield f"beside/{name}", entry


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            yield Path(place) / name


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as opened:
            while data := opened.read(_READ_BYTES):
                digest.update(data)
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror or error}") from error
    return digest.digest()
