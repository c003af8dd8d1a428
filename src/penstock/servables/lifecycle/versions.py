"""A folder of servables: what is in it, which versions are wanted, and the steps from what is loaded to those.

    FOLDER/NAME/servable.py     the operator's code, for all versions
    FOLDER/NAME/1/ 2/ ...       versions: folders named by a whole number from 1, without zeros in front

Names that begin with a dot or an underscore or end in ``.tmp`` are ignored, so a version is copied to ``.3`` or
``3.tmp`` and renamed when it is whole.  Other names that are no numbers belong to the operator.  A name that looks
like a number and is none of ours (0, 007, -1, 1.5), a file where a version should be, and a symbolic link that leads
out of FOLDER are refused with a reason, and what is beside them is served.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.api_errors import VersionNotFoundError
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, NotFoundError, UnavailableError

__all__ = [
    "NAME",
    "Plan",
    "Policy",
    "ServableFolder",
    "Switch",
    "Wanted",
    "check_there",
    "find_version",
    "make_plan",
    "scan",
    "within",
]

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,127}")
"""Names of servables, and of labels."""

SCRIPT: Final = "servable.py"
MAX_FILES: Final = 100_000
_VERSION: Final = re.compile(r"[1-9][0-9]{0,17}")
_LIKE_A_NUMBER: Final = re.compile(r"[+-]?[0-9][0-9_]*(\.[0-9]*)?")


@dataclass(frozen=True)
class ServableFolder:
    """What a servable's folder holds.

    ``versions``: of each version a text that changes when one of its files, one beside servable.py, or a Python file of
    a folder there does (by size and time of change).  ``refused``: reasons by the names of entries that would be
    versions.
    """

    name: str
    path: Path
    versions: Mapping[int, str]
    refused: Mapping[str, str]

    @property
    def script(self) -> Path:
        """Its servable.py."""
        return self.path / SCRIPT

    def version_path(self, number: int) -> Path:
        """The folder of a version."""
        return self.path / str(number)


def scan(root: Path) -> tuple[dict[str, ServableFolder], dict[str, str]]:
    """Every servable of a folder by its name, and reasons by the names of those that are refused.

    A folder without a servable.py is none, and is ignored.  FileAccessError when ``root`` cannot be read.
    """
    found, refused = {}, {}
    for entry in _entries(root):
        if _is_ignored(entry.name) or not os.path.lexists(Path(entry.path) / SCRIPT):
            continue
        try:
            found[entry.name] = scan_servable(root, entry.name)
        except (InvalidFileError, FileAccessError) as error:
            refused[entry.name] = str(error)
    return found, refused


def scan_servable(root: Path, name: str) -> ServableFolder:
    """One servable of a folder; NotFoundError when it is not there, InvalidFileError says what is wrong with it."""
    path = root / name
    if NAME.fullmatch(name) is None:
        told = "a servable's name begins with a letter and goes on with up to 127 letters, digits, _ and -"
        raise InvalidFileError(f"{name!r:.200}: {told}")
    if not path.is_dir() or not os.path.lexists(path / SCRIPT):
        raise NotFoundError(f"there is no {path / SCRIPT}")
    if not within(root, path / SCRIPT).is_file():
        raise InvalidFileError(f"{path / SCRIPT} is no file")
    beside, numbers, refused = hashlib.sha256(), [], {}
    for entry in _entries(path):
        if _is_ignored(entry.name):
            continue
        if _LIKE_A_NUMBER.fullmatch(entry.name) is None:
            _mix(beside, entry.name, Path(entry.path))
            _mix_package(beside, root, Path(entry.path))
        elif (reason := _reason(root, entry)) is not None:
            refused[entry.name] = reason
        else:
            numbers.append(int(entry.name))
    versions = {number: _print(path / str(number), beside) for number in sorted(numbers)}
    return ServableFolder(name, path, versions, refused)


def within(root: Path, path: Path) -> Path:
    """The file or folder that a path leads to; InvalidFileError when links lead out of ``root``, or nowhere."""
    try:
        found = path.resolve(strict=True)
        is_inside = found.is_relative_to(root.resolve(strict=True))
    except (OSError, RuntimeError) as error:
        raise InvalidFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not is_inside:
        raise InvalidFileError(f"{path}: a link leads out of {root}, to {found}")
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise FileAccessError(error.errno, error.strerror, str(folder)) from None


def _is_ignored(name: str) -> bool:
    return name.startswith((".", "_")) or name.endswith(".tmp")


def _reason(root: Path, entry: os.DirEntry[str]) -> str | None:
    """Why an entry that looks like a number is no version."""
    if _VERSION.fullmatch(entry.name) is None:
        return "a version is a whole number from 1 without a sign, a point or zeros in front"
    try:
        if not within(root, Path(entry.path)).is_dir():
            return "a version is a folder"
    except InvalidFileError as error:
        return str(error)
    return None


def _print(folder: Path, beside: hashlib._Hash) -> str:
    """The text that changes with a version's files and those beside servable.py."""
    digest = beside.copy()
    num_files = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            num_files += 1
            if num_files > MAX_FILES:
                raise InvalidFileError(f"{folder} has more than {MAX_FILES} files")
            path = Path(place) / name
            _mix(digest, str(path.relative_to(folder)), path)
    return digest.hexdigest()


def _mix_package(digest: hashlib._Hash, root: Path, folder: Path) -> None:
    """Python files of a folder beside servable.py, and of those in it; the rest of what is there may be any data.

    ``folder`` itself may be a link that stays in ``root``; further ones are not followed, so none leads in a circle.
    """
    try:
        if not within(root, folder).is_dir():
            return
    except InvalidFileError:
        return
    num_seen = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        names = sorted(name for name in names if name.endswith(".py") and not name.startswith("."))
        num_seen += len(folders) + len(names)
        if num_seen > MAX_FILES:
            raise InvalidFileError(f"{folder} has more than {MAX_FILES} folders and Python files")
        for name in names:
            path = Path(place) / name
            _mix(digest, str(path.relative_to(folder.parent)), path)


def _mix(digest: hashlib._Hash, name: str, path: Path) -> None:
    try:
        found = path.stat()
    except OSError:  # a link to nowhere, or removed meanwhile
        digest.update(f"{name!r} none\n".encode())
        return
    if not stat.S_ISDIR(found.st_mode):
        digest.update(f"{name!r} {found.st_size} {found.st_mtime_ns} {found.st_ino}\n".encode())


@dataclass(frozen=True)
class Policy:
    """Which versions are served: the ``latest`` so many, the ``numbers`` that are named, or all."""

    latest: int = 0
    numbers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Of ``latest``, ``latest:2``, ``all`` or ``1,3``; InvalidArgumentError for anything else."""
        if text == "all":
            return cls()
        if text == "latest":
            return cls(latest=1)
        kind, _, number = text.partition(":")
        if kind == "latest" and _VERSION.fullmatch(number):
            return cls(latest=int(number))
        numbers = [part.strip() for part in text.split(",")]
        if all(_VERSION.fullmatch(part) for part in numbers):
            return cls(numbers=tuple(sorted({int(part) for part in numbers})))
        raise InvalidArgumentError(
            f'versions must be "latest", "latest:2", "all" or numbers like "1,3", not {text!r:.100}', param="versions"
        )

    def choose(self, available: Collection[int]) -> set[int]:
        """The versions that it asks for, those it names also when they are not there."""
        if self.numbers:
            return set(self.numbers)
        return set(sorted(available)[-self.latest :] if self.latest else available)

    def told(self) -> dict[str, dict[str, object]]:
        """As Triton's model configuration has it."""
        if self.numbers:
            return {"specific": {"versions": [*self.numbers]}}
        return {"latest": {"num_versions": self.latest}} if self.latest else {"all": {}}

    def __str__(self) -> str:
        return ",".join(map(str, self.numbers)) or (f"latest:{self.latest}" if self.latest else "all")


@dataclass(frozen=True)
class Wanted:
    """What an operator asks for: versions by a policy, and labels for some.  A label asks for its version, too."""

    policy: Policy = Policy(latest=1)
    labels: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """InvalidArgumentError names the label."""
        for label, number in self.labels.items():
            if not isinstance(label, str) or NAME.fullmatch(label) is None:
                raise InvalidArgumentError(
                    f"labels: a label begins with a letter, then letters, digits, _ and -, not {label!r:.100}",
                    param="labels",
                )
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                told = f"labels: {label}: expected the number of a version, found {number!r:.100}"
                raise InvalidArgumentError(told)


@dataclass(frozen=True)
class Switch:
    """What is served after a plan's loads: all of it comes into force in one step, then ``drain`` are drained.

    ``labels_kept``: labels that stay where they were, because the version that they should move to is not there.
    """

    ready: tuple[int, ...]
    labels: Mapping[str, int]
    drain: tuple[int, ...]
    labels_kept: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """First ``load``, each in fresh processes beside what runs; then, if all went well, ``switch()``; then drain.

    ``load``: versions that are new, or whose files changed since they were loaded.  A version that is asked for and has
    no folder goes on where it is loaded and a policy names it.
    """

    load: tuple[int, ...]
    loaded: frozenset[int]
    chosen: frozenset[int]
    wanted_labels: Mapping[str, int]
    labels: Mapping[str, int]

    def switch(self) -> Switch:
        """What comes of it once all is loaded.

        For each version that is asked for and not there, one that ran before and is not asked for goes on, the newest
        first.
        """
        ready = (self.loaded & self.chosen) | set(self.load)
        old = sorted(self.loaded - ready, reverse=True)
        num_kept = len(self.chosen - ready)
        labels, stay = dict(self.wanted_labels), []
        for label, number in self.wanted_labels.items():
            if number in ready:
                continue
            stay.append(label)
            del labels[label]
            before = self.labels.get(label)
            if before is not None and before in self.loaded:
                labels[label] = before
        kept = set(old[:num_kept]) | {number for number in labels.values() if number not in ready}
        ready |= kept
        return Switch(tuple(sorted(ready)), labels, tuple(sorted(self.loaded - ready)), tuple(stay))


def make_plan(
    wanted: Wanted, found: ServableFolder, loaded: Mapping[int, str], labels: Mapping[str, int] | None = None
) -> Plan:
    """The steps from ``loaded`` (versions and the texts of ServableFolder.versions that they were loaded with) and the
    ``labels`` of now to what is wanted.  InvalidFileError when no version that is wanted is there: all stays as it is.
    """
    chosen = wanted.policy.choose(found.versions) | set(wanted.labels.values())
    there = chosen & set(found.versions)
    if not there:
        told = f"versions {wanted.policy}" if found.versions else "a version"
        refused = "".join(f"; {name}: {reason}" for name, reason in found.refused.items())
        has = ", ".join(map(str, found.versions)) or "no folder of a version"
        raise InvalidFileError(f"{found.path}: expected {told}, found {has}{refused}")
    load = tuple(sorted(number for number in there if loaded.get(number) != found.versions[number]))
    return Plan(load, frozenset(loaded), frozenset(chosen), dict(wanted.labels), dict(labels or {}))


def check_there(wanted: Wanted, found: ServableFolder) -> None:
    """InvalidArgumentError for a version that a load asks for by a label or a number, and that has no folder.  A
    servable's own settings may name versions to come.
    """
    missing = ({*wanted.policy.numbers} | {*wanted.labels.values()}) - set(found.versions)
    if not missing:
        return
    number = min(missing)
    label = next((f"labels: {label}" for label, one in wanted.labels.items() if one == number), "")
    there = ", ".join(map(str, found.versions)) or "none"
    reason = f"; {number}: {found.refused[str(number)]}" if str(number) in found.refused else ""
    told = f"{found.name} has no version {number}; there are {there}{reason}"
    raise InvalidArgumentError(f"{label or f'versions {wanted.policy}'}: {told}")


def find_version(
    name: str, text: str, ready: Collection[int], labels: Mapping[str, int], known: Collection[int] = ()
) -> int:
    """The version of the servable ``name`` that a request asks for: "" is the newest that is ready, otherwise a number
    or a label.

    UnavailableError for one of ``known`` that is not ready; VersionNotFoundError for all else.
    """
    if not text:
        if not ready:
            raise UnavailableError(f"{name}: no version is ready")
        return max(ready)
    number = labels.get(text)
    if number is None and _VERSION.fullmatch(text):
        number = int(text)
    if number is not None and number in ready:
        return number
    if number is not None and (number in known or text in labels):
        raise UnavailableError(f"{name}: version {text} is not ready")
    names = ", ".join([*map(str, sorted(ready)), *sorted(labels)])
    raise VersionNotFoundError(f"{name} has no version {text!r:.100}; there are {names or 'none'}")
