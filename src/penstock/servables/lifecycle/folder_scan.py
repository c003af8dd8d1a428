"""Scanning a folder of servables: which servables and versions it holds.

    FOLDER/NAME/servable.py     the operator's code, for all versions
    FOLDER/NAME/1/ 2/ ...       versions: folders named by an integer from 1, without leading zeros

Names that start with a dot or an underscore or end in ``.tmp`` are ignored: copy a version to ``.3`` or ``3.tmp`` and
rename it when it is complete.  Other names that are not numbers are ignored, too.  Some entries are refused with a
reason, while everything beside them is served: names that look like numbers but are not valid versions (0, 007, -1,
1.5), files in place of a version, and symbolic links that lead out of FOLDER.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import FileAccessError, InvalidFileError, NotFoundError
from penstock.servables.api.version_policy import NAME, VERSION

__all__ = ["SCRIPT", "ServableFolder", "holds_servables", "resolve_inside", "scan_folder", "scan_servable"]

SCRIPT: Final = "servable.py"
MAX_FILES: Final = 100_000
_LIKE_A_NUMBER: Final = re.compile(r"[+-]?[0-9][0-9_]*(\.[0-9]*)?")


@dataclass(frozen=True)
class ServableFolder:
    """The contents of a servable's folder.

    ``versions``: by number, a fingerprint of the files that the version runs from.  It changes with the size or the
    modification time of a file of the version, of a file beside servable.py, or of a Python file in a folder there.
    ``refused``: by name, why an entry that looks like a version is not one.
    """

    name: str
    path: Path
    versions: Mapping[int, str]
    refused: Mapping[str, str]

    @property
    def script(self) -> Path:
        """The path of servable.py."""
        return self.path / SCRIPT

    def version_path(self, number: int) -> Path:
        """Return the folder of a version."""
        return self.path / str(number)


def holds_servables(folder: Path) -> bool:
    """Return True for a folder of servables or a servable itself; False for a checkpoint."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return False
    return any((entry / SCRIPT).is_file() for entry in (folder, *folder.iterdir()))


def scan_folder(root: Path) -> tuple[dict[str, ServableFolder], dict[str, str]]:
    """Return the servables of a folder by name, and by name the reasons for those that are refused.

    A folder without a servable.py is ignored.  Raises FileAccessError if ``root`` cannot be read.
    """
    servables, refused = {}, {}
    for entry in _entries(root):
        if _is_ignored(entry.name) or not os.path.lexists(Path(entry.path) / SCRIPT):
            continue
        try:
            servables[entry.name] = scan_servable(root, entry.name)
        except (InvalidFileError, FileAccessError) as error:
            refused[entry.name] = str(error)
    return servables, refused


def scan_servable(root: Path, name: str) -> ServableFolder:
    """Scan one servable of a folder.  Raises NotFoundError if it does not exist, InvalidFileError if it is invalid."""
    path = root / name
    if NAME.fullmatch(name) is None:
        raise InvalidFileError(
            f"{name!r:.200}: the name of a servable must start with a letter, followed by up to 127 letters, digits, "
            "_ and -"
        )
    if not path.is_dir() or not os.path.lexists(path / SCRIPT):
        raise NotFoundError(f"{path / SCRIPT} does not exist")
    if not resolve_inside(root, path / SCRIPT).is_file():
        raise InvalidFileError(f"{path / SCRIPT} is not a file")
    beside, numbers, refused = hashlib.sha256(), [], {}
    for entry in _entries(path):
        if _is_ignored(entry.name):
            continue
        if _LIKE_A_NUMBER.fullmatch(entry.name) is None:
            _hash_file(beside, entry.name, Path(entry.path))
            _hash_python_files(beside, root, Path(entry.path))
        elif (reason := _refusal_reason(root, entry)) is not None:
            refused[entry.name] = reason
        else:
            numbers.append(int(entry.name))
    versions = {number: _fingerprint(path / str(number), beside) for number in sorted(numbers)}
    return ServableFolder(name, path, versions, refused)


def resolve_inside(root: Path, path: Path) -> Path:
    """Return the path with all links resolved; raise InvalidFileError if it is broken or leads out of ``root``."""
    try:
        resolved = path.resolve(strict=True)
        is_inside = resolved.is_relative_to(root.resolve(strict=True))
    except (OSError, RuntimeError) as error:
        raise InvalidFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not is_inside:
        raise InvalidFileError(f"{path}: a link leads out of {root}, to {resolved}", param="path")
    return resolved


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise FileAccessError(error.errno, error.strerror, str(folder)) from None


def _is_ignored(name: str) -> bool:
    return name.startswith((".", "_")) or name.endswith(".tmp")


def _refusal_reason(root: Path, entry: os.DirEntry[str]) -> str | None:
    """Return why an entry that looks like a number is not a version; None if it is one."""
    if VERSION.fullmatch(entry.name) is None:
        return "the name of a version must be an integer from 1 without a sign, a point or leading zeros"
    try:
        if not resolve_inside(root, Path(entry.path)).is_dir():
            return "a version must be a folder"
    except InvalidFileError as error:
        return str(error)
    return None


def _fingerprint(folder: Path, beside: hashlib._Hash) -> str:
    """Hash the files of a version together with those beside servable.py."""
    digest = beside.copy()
    num_files = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            num_files += 1
            if num_files > MAX_FILES:
                raise InvalidFileError(f"{folder} has more than {MAX_FILES} files")
            path = Path(place) / name
            _hash_file(digest, str(path.relative_to(folder)), path)
    return digest.hexdigest()


def _hash_python_files(digest: hashlib._Hash, root: Path, folder: Path) -> None:
    """Hash the Python files in a folder beside servable.py and in its subfolders; other files may be data of any kind.

    ``folder`` may be a link that stays in ``root``.  Links below it are not followed, which rules out cycles.
    """
    try:
        if not resolve_inside(root, folder).is_dir():
            return
    except InvalidFileError:
        return
    num_seen = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        names = sorted(name for name in names if name.endswith(".py") and not name.startswith("."))
        num_seen += len(folders) + len(names)
        if num_seen > MAX_FILES:
            raise InvalidFileError(f"{folder} has more than {MAX_FILES} folders and Python files", param="path")
        for name in names:
            path = Path(place) / name
            _hash_file(digest, str(path.relative_to(folder.parent)), path)


def _hash_file(digest: hashlib._Hash, name: str, path: Path) -> None:
    try:
        status = path.stat()
    except OSError:  # a broken link, or a file that was removed meanwhile
        digest.update(f"{name!r} none\n".encode())
        return
    if not stat.S_ISDIR(status.st_mode):
        digest.update(f"{name!r} {status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode())
