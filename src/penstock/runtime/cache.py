"""Bundles made from checkpoint folders, kept for the next time.

One folder holds ``KEY.psm`` (the bundle), ``KEY.json`` (where it came from; its time is when it was last used)
and ``KEY.lock`` (held while one process builds).  Bundles appear by rename, so a kill at any point leaves the
cache sound; what it left half made is removed by the next build.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from penstock import env
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.side_files import read_small_file
from penstock.config import parse_object
from penstock.errors import (
    FileAccessError,
    InvalidArgumentError,
    InvalidFileError,
    PenstockError,
    UnsupportedError,
)
from penstock.models.network_script import refuse_nested_export
from penstock.ops.table import OPS
from penstock.quant.scheme import SCHEMES
from penstock.runtime.build import PARTIAL_SUFFIX, Progress, ProgressCallback, build_in_child
from penstock.runtime.verify import forget_verified, open_verified, remember_verified

__all__ = ["Cache", "CacheEntry", "bundle_key"]

CACHE_VERSION: Final = 2
"""Counts changes of what a bundle of the same versions holds: format, passes, packing."""
_MAX_RECORD_BYTES: Final = 1 << 20
_POLL_SECONDS: Final = 0.05
_FRESH_SECONDS: Final = 60.0
"""A bundle found this recently may not be open yet: it is never removed to make room."""
_LOG: Final = logging.getLogger("penstock.cache")
_KEY_PATTERN: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class CacheEntry:
    """A kept bundle; ``last_used`` in seconds since the epoch."""

    key: str
    path: Path
    source: str
    scheme: str
    num_bytes: int
    last_used: float


Entries: TypeAlias = list[CacheEntry]


def _package_version() -> str:
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _script_digest(network: str | None) -> str:
    """What a network script says, so that an edited script makes a new bundle."""
    if network is None:
        return ""
    file, colon, name = network.rpartition(":")
    if not colon or not name or not file:
        raise InvalidArgumentError(f"network: expected file.py:Class, found {network!r}", param="network")
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise FileAccessError(f"network: {file}: {error.strerror}") from None
    return f"{Path(file).resolve()}:{name}:{hashlib.sha256(data).hexdigest()}"


def bundle_key(checkpoint: Checkpoint, scheme: str, network: str | None = None) -> str:
    """The name of the bundle that this folder, scheme and network script make: 64 hexadecimal digits.

    It covers format, package, op and scheme versions, the folder, and name, size, times and inode of each of its files.
    """
    parts: list[Any] = [
        CACHE_VERSION,
        _package_version(),
        [[op.name, op.version] for op in OPS],
        [scheme, SCHEMES[scheme].version],
        _script_digest(network),
        str(checkpoint.folder.resolve()),
        [astuple(stamp) for stamp in checkpoint.files],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _find_damage(path: Path, verify: str) -> str:
    """Return why a bundle cannot be used, "" if it can. What the system refuses is not the bundle's fault."""
    try:
        open_verified(path, verify)[0].close()
    except (InvalidFileError, UnsupportedError) as error:
        return str(error)
    except FileAccessError as error:
        return "" if path.exists() else str(error)
    return ""


class Cache:
    """The cache folder: ``PENSTOCK_CACHE_DIR``, bounded by ``PENSTOCK_CACHE_BYTES``, unless told otherwise."""

    def __init__(self, folder: Path | str | None = None, max_bytes: int | None = None) -> None:
        self.folder = Path(folder) if folder is not None else env.cache_dir()
        self.max_bytes = max_bytes if max_bytes is not None else env.cache_max_bytes()

    def find_or_build(
        self,
        folder: Path | str,
        scheme: str | None = None,
        network: str | None = None,
        progress: ProgressCallback | None = None,
        verify: str = "once",
    ) -> Path:
        """The bundle of a checkpoint folder: found, or made in a child process and kept.  One that was damaged since is
        made again, which a warning says; ``verify``, as ``open_verified`` has it, says how far damage is looked for.

        Two processes that ask for the same bundle at once make it once.  Raises what ``Checkpoint.open`` and
        ``build_in_child`` raise.
        """
        refuse_nested_export()  # here too: a nested export would wait for the lock that its parent holds
        checkpoint = Checkpoint.open(folder)
        wanted = checkpoint.choose_scheme(scheme)
        key = bundle_key(checkpoint, wanted, network)
        found = self._find(key, verify)
        if found is not None:
            return found
        self._make_folder()
        with self._locked(key, progress):
            found = self._find(key, verify, is_last=True)  # another process may have made it while we waited
            if found is not None:
                return found
            self._remove_stale(key)
            path = self.folder / f"{key}.psm"
            try:
                build_in_child(checkpoint.folder, path, scheme=wanted, network=network, progress=progress)
            except FileAccessError as error:
                if not str(error).startswith(f"{self.folder}{os.sep}"):
                    raise
                raise self._cannot_write(str(error).rpartition(": ")[2]) from None
            record = {
                "source": str(checkpoint.folder.resolve()),
                "scheme": wanted,
                "network": network,
                "num_bytes": path.stat().st_size,
            }
            remember_verified(path)
            self._write_record(key, record)
        self._make_room(keep=key)
        return path

    def list(self) -> Entries:
        """What is kept, the most recently used first."""
        entries = []
        for record_path in sorted(self.folder.glob("*.json")):
            entry = self._entry(record_path.stem)
            if entry is not None:
                entries.append(entry)
        return sorted(entries, key=lambda entry: -entry.last_used)

    def clear(self) -> tuple[int, int]:
        """Remove everything but what is being built right now; returns (number of bundles, bytes)."""
        count = total = 0
        forget_verified()
        self._remove_stale()
        for path in sorted(self.folder.glob("*.psm")):
            size = path.stat().st_size if path.exists() else 0
            if _KEY_PATTERN.fullmatch(path.stem) and self._remove(path.stem):
                count, total = count + 1, total + size
        return count, total

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot_write(error.strerror) from None

    def _cannot_write(self, reason: str | None) -> FileAccessError:
        return FileAccessError(f"{self.folder}: {reason}; set PENSTOCK_CACHE_DIR to a folder that can be written")

    def _entry(self, key: str) -> CacheEntry | None:
        """The record of a key whose bundle is whole, else None."""
        path, record_path = self.folder / f"{key}.psm", self.folder / f"{key}.json"
        try:
            record = parse_object(read_small_file(record_path, _MAX_RECORD_BYTES), record_path.name)
            used, num_bytes = record_path.stat().st_mtime, path.stat().st_size
            if not _KEY_PATTERN.fullmatch(key) or num_bytes != record["num_bytes"]:
                return None
            return CacheEntry(key, path, str(record["source"]), str(record["scheme"]), num_bytes, used)
        except (PenstockError, OSError, ValueError, KeyError, TypeError):  # a damaged record is a missing one
            return None

    def _find(self, key: str, verify: str, is_last: bool = False) -> Path | None:
        """Return the bundle of a key if it is sound; the last look before a build says what is wrong with it."""
        entry = self._entry(key)
        if entry is None:
            return None
        with contextlib.suppress(OSError):  # a cache that is read-only still serves
            os.utime(self.folder / f"{key}.json")
        damage = _find_damage(entry.path, verify)
        if damage and is_last:
            _LOG.warning("penstock: the cached bundle of %s is damaged and made again: %s", entry.source, damage)
        return None if damage else entry.path

    def _write_record(self, key: str, record: dict[str, Any]) -> None:
        temporary = self.folder / f".{key}.json.{os.getpid()}{PARTIAL_SUFFIX}"
        try:
            temporary.write_text(json.dumps(record))
            temporary.replace(self.folder / f"{key}.json")
        except OSError as error:
            raise FileAccessError(f"{self.folder}: {error.strerror}") from None

    @contextlib.contextmanager
    def _locked(self, key: str, progress: ProgressCallback | None = None) -> Iterator[None]:
        """Hold the key's lock; waits for another builder, interruptibly."""
        told = False
        while True:
            descriptor = self._try_lock(key)
            if descriptor is not None:
                break
            if progress is not None and not told:
                progress(Progress("wait"))
                told = True
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            self._unlock(key, descriptor)

    def _try_lock(self, key: str) -> int | None:
        path = self.folder / f"{key}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._cannot_write(error.strerror) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been removed between open and lock: then it is no lock any more.
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
        return None

    def _unlock(self, key: str, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            (self.folder / f"{key}.lock").unlink()
        os.close(descriptor)

    def _remove(self, key: str) -> bool:
        """Remove a bundle unless it is being built; the record goes first, so that no half entry is ever found."""
        descriptor = self._try_lock(key)
        if descriptor is None:
            return False
        try:
            for suffix in (".json", ".psm"):
                (self.folder / f"{key}{suffix}").unlink(missing_ok=True)
        except OSError as error:
            raise FileAccessError(f"{self.folder}: {error.strerror}") from None
        finally:
            self._unlock(key, descriptor)
        return True

    def _remove_stale(self, held: str | None = None) -> None:
        """Remove what builders that are gone left half made; ``held`` is the key whose lock we hold."""
        for path in self.folder.glob(f".*{PARTIAL_SUFFIX}"):
            key = path.name[1:65]
            descriptor = None
            if key != held and _KEY_PATTERN.fullmatch(key):
                descriptor = self._try_lock(key)
                if descriptor is None:
                    continue  # someone is building it
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            if descriptor is not None:
                self._unlock(key, descriptor)

    def _make_room(self, keep: str) -> None:
        """Remove the bundles that were not used for longest, until the rest fits."""
        entries = self.list()
        total = sum(entry.num_bytes for entry in entries)
        recent = time.time() - _FRESH_SECONDS
        for entry in reversed(entries):
            if total <= self.max_bytes:
                return
            if entry.key != keep and entry.last_used < recent and self._remove(entry.key):
                total -= entry.num_bytes
