"""A folder for bundles that are used once: on the disk, or in memory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from penstock.errors import FileAccessError, PenstockError

__all__ = ["temporary_folder"]

_MEMORY = "/dev/shm"  # noqa: S108 - files in memory


def temporary_folder(source: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """Return a folder on the disk; in memory if no disk can be written, or if only memory has room for ``source``.

    ``source``: a folder or file of weights, about as large as what is written.  Raises FileAccessError.
    """
    places = [None, _MEMORY]
    free = _free_bytes(None)
    if source is not None and free < _num_bytes(source) and free < _free_bytes(_MEMORY):
        places.reverse()
    reason: str | None = ""
    for place in places:
        try:
            return tempfile.TemporaryDirectory(prefix="penstock-", dir=place)
        except OSError as error:
            reason = reason or error.strerror
    raise FileAccessError(f"The bundle needs a temporary folder: {reason}. Set TMPDIR to a writable folder.")


def _free_bytes(folder: str | None) -> int:
    """Return the room in a folder, by default that of temporary files; -1 if it cannot be used."""
    try:
        return shutil.disk_usage(folder or tempfile.gettempdir()).free
    except OSError:
        return -1


def _num_bytes(source: Path) -> int:
    """Return the size of a folder's weights, or of a file with the other splits of a GGUF model; 0 if unknown."""
    from penstock.checkpoint.gguf.file_name import split_names  # not needed by ranks, which start with this module
    from penstock.checkpoint.side_files import model_folder
    from penstock.checkpoint.stored.shards import weight_names

    try:
        if source.is_dir():
            homes = sorted(source.glob("rank_*/")) or [model_folder(source)]
            return sum((home / name).stat().st_size for home in homes for name in weight_names(home))
        paths = map(source.with_name, split_names(source.name))
        return sum(path.stat().st_size for path in paths if path.is_file())
    except (OSError, PenstockError):  # opening the model says what is wrong
        return 0
