"""The cache of bundles that were built from checkpoint folders.

One folder holds ``KEY.psm`` (the bundle), ``KEY.json`` (its source; the modification time is the time of the last use)
and ``KEY.lock`` (locked while a process builds).  A bundle appears by rename, so a kill at any point leaves the cache
valid; the next build removes incomplete files.  A new bundle is opened at once, from the memory in which it was packed,
while the system writes it to the disk.  Until that is done it has no record of its checksums: a start after a power cut
verifies them, even with ``verify="never"``, and builds a damaged bundle again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock import env
from penstock.checkpoint.side_files import read_small_file
from penstock.config import parse_object
from penstock.errors import (
    FileAccessError,
    InvalidFileError,
    PenstockError,
    UnsupportedError,
)
from penstock.file_kinds import PARTIAL_SUFFIX, is_gguf
from penstock.models.network_script import refuse_nested_export
from penstock.ops.table import GENERAL_OPS, OPS
from penstock.quant.scheme import SCHEMES
from penstock.runtime.build import (
    Progress,
    ProgressCallback,
    build_in_child,
    finish_child,
    prepare_child,
    tell_rounding,
    tell_warnings,
)
from penstock.runtime.file_records import FileRecords, identify
from penstock.runtime.verify import forget_verified, open_verified, remember_when_written
from penstock.validation import refusal
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.checkpoint.folder import Checkpoint
    from penstock.runtime.export_process import ExportProcess

__all__ = ["Cache", "CacheEntry", "CacheNotWritableError", "bundle_key"]

CACHE_VERSION: Final = 3
"""Raise this when the content of a bundle changes (format, passes, packing) without a change of another version."""
_MAX_RECORD_BYTES: Final = 1 << 20
_WARNINGS: Final = ("warnings", "opening_warnings")
_MAX_WARNINGS: Final = 16
_MAX_WARNING_CHARS: Final = 1000
_RECORDS: Final = "files"
_MAX_FILES: Final = 256
"""A folder with more has no record of its key."""
_POLL_SECONDS: Final = 0.05
_FRESH_SECONDS: Final = 60.0
"""A bundle that was found this recently may not be open yet, so it is never removed to make room."""
_LOG: Final = logging.getLogger("penstock.cache")
_KEY_PATTERN: Final = re.compile(r"[0-9a-f]{64}")


class CacheNotWritableError(FileAccessError):
    """Raised when a bundle cannot be kept: the cache folder is read-only or full, or cannot be made."""


@dataclass(frozen=True)
class CacheEntry:
    """A cached bundle; ``last_used`` in seconds since the epoch, ``rounding_note`` as in ``ExportReport``.

    ``is_on_disk``: a power cut no longer damages it.  ``warnings`` are those of its export; ``opening_warnings`` those
    that are logged whenever the source is opened.
    """

    key: str
    path: Path
    source: str
    scheme: str
    num_bytes: int
    last_used: float
    rounding_note: str = ""
    is_on_disk: bool = True
    warnings: tuple[str, ...] = ()
    opening_warnings: tuple[str, ...] = ()


Entries: TypeAlias = list[CacheEntry]


def _script_digest(network: str | None) -> str:
    """Return the identity and the content hash of a network script, so that an edited script makes a new bundle."""
    if network is None:
        return ""
    file, colon, name = network.rpartition(":")
    if not colon or not name or not file:
        raise refusal("network", "file.py:Class", network)
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise FileAccessError(f"network: {file}: {error.strerror}", param="network") from None
    return f"{Path(file).resolve()}:{name}:{hashlib.sha256(data).hexdigest()}"


def _versions() -> list[Any]:
    return [CACHE_VERSION, __version__, [[op.name, op.version] for op in (*OPS, *GENERAL_OPS)]]


def bundle_key(
    checkpoint: Checkpoint,
    scheme: str,
    network: str | None = None,
    digest: Callable[[Path], str] | None = None,
) -> str:
    """Return the cache key of this checkpoint, scheme and network script: 64 hexadecimal digits.

    It covers the versions of format, package, ops and scheme, and of a folder its path, and the name, size, times and
    inode of each file.  Of GGUF files it covers the content, of which ``digest`` returns the SHA-256.
    """
    if is_gguf(checkpoint.folder):
        digest = digest or FileRecords(env.cache_dir() / _RECORDS).digest
        source: list[Any] = ["gguf", [digest(file.path) for file in checkpoint.weight_files]]
    else:
        source = [str(checkpoint.folder.resolve()), [astuple(stamp) for stamp in checkpoint.files]]
    parts = [*_versions(), [scheme, SCHEMES[scheme].version], _script_digest(network), *source]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _find_damage(path: Path, verify: str) -> str:
    """Return why a bundle cannot be used, or "" if it can.  An error of the system does not count as damage."""
    try:
        open_verified(path, verify)[0].close()
    except (InvalidFileError, UnsupportedError) as error:
        return str(error)
    except FileAccessError as error:
        return "" if path.exists() else str(error)
    return ""


def _request(path: Path, scheme: str | None, network: str | None) -> list[Any] | None:
    """Return what the key of a GGUF file or a folder depends on beside the content of its files; None if unknown.

    A model whose key is known need not be opened: to read its tokens takes a while, and so do the imports.
    """
    names = [] if is_gguf(path) else _file_names(path)
    if names is None or not (scheme is None or isinstance(scheme, str)):
        return None
    schemes = [[own.name, own.version] for own in SCHEMES.values()]
    return [*_versions(), schemes, str(path.absolute()), scheme, _script_digest(network), names]


def _file_names(folder: Path) -> list[str] | None:
    """Return the files of a folder and of those inside it, of which a checkpoint is made; None if there may be more."""
    names: list[str] = []
    for place, inner, files in os.walk(folder, followlinks=True):
        where = os.path.relpath(place, folder)
        inner[:] = [name for name in inner if not name.startswith(".")]
        names += [os.path.join(where, name) for name in files]
        if len(names) > _MAX_FILES or (inner and where != "."):
            return None
    return sorted(names) or None


def _open(folder: Path | str, rank: int | None) -> Checkpoint:
    """Open a checkpoint, or a rank's part of a sharded folder, which the build verifies."""
    if rank is None:
        if not Path(folder).is_dir():  # a file: ranks, and their imports, are for folders
            from penstock.checkpoint.folder import Checkpoint  # imported here: a known GGUF file is not opened

            return Checkpoint.open(folder)
        from penstock.sharding.whole import open_checkpoint

        return open_checkpoint(Path(folder))
    from penstock.sharding.folder import ShardedFolder

    return ShardedFolder.open(Path(folder)).rank(rank, verify=False)


def _shortened(texts: Sequence[str]) -> list[str]:
    """Return the warnings that the record of a bundle has."""
    return [text[:_MAX_WARNING_CHARS] for text in texts[:_MAX_WARNINGS]]


def _digest_of(files: FileRecords, progress: ProgressCallback | None) -> Callable[[Path], str]:
    """Return the function that returns the digest of a file's content, and reports its progress."""

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(Progress("checksum", done, total))

    return lambda path: files.digest(path, report)


def _announced(progress: ProgressCallback | None) -> ProgressCallback | None:
    """Return a callback that reports "first" before the first progress of the child.

    It does so once the child runs, as a bar on a terminal starts a thread (see ``allow_copies``).
    """
    if progress is None:
        return None
    is_first = True

    def tell(given: Progress) -> None:
        nonlocal is_first
        if is_first:
            progress(Progress("first"))
        is_first = False
        progress(given)

    return tell


class Cache:
    """The bundle cache in ``folder`` (default ``PENSTOCK_CACHE_DIR``), of at most ``max_bytes`` (default
    ``PENSTOCK_CACHE_BYTES``)."""

    def __init__(self, folder: Path | str | None = None, max_bytes: int | None = None) -> None:
        self.folder = Path(folder) if folder is not None else env.cache_dir()
        self.max_bytes = max_bytes if max_bytes is not None else env.cache_max_bytes()
        self._files = FileRecords(self.folder / _RECORDS)

    def find_or_build(
        self,
        folder: Path | str,
        scheme: str | None = None,
        network: str | None = None,
        progress: ProgressCallback | None = None,
        verify: str = "once",
        rank: int | None = None,
    ) -> Path:
        """Return the bundle of a checkpoint folder from the cache, or build it in a child process and keep it.

        ``rank``: of a sharded folder.  A damaged bundle is built again, with a warning; ``verify``, as in
        ``open_verified``, controls how damage is looked for.  Two processes that request the same bundle at the same
        time build it once.  Raises what ``Checkpoint.open`` and ``build_in_child`` raise.
        """
        refuse_nested_export()  # checked here too: a nested export would wait for the lock that its parent holds
        source = Path(folder)
        request = _request(source, scheme, network) if rank is None else None
        known = None if request is None else self._files.find_key(request)
        if known is not None:
            cached = self._find(known, verify, was_opened=False)
            if cached is not None:
                return cached
        with contextlib.ExitStack() as stack:
            child = None
            if is_gguf(source) and request is not None and known is None:  # it reads while the digest is computed
                child = stack.enter_context(prepare_child(folder, scheme=scheme, network=network))
            files = identify(source / name for name in request[-1]) if request is not None else []
            checkpoint = _open(folder, rank)  # a file that changes meanwhile makes the record void
            chosen = checkpoint.choose_scheme(scheme)
            key = bundle_key(checkpoint, chosen, network, _digest_of(self._files, progress))
            if is_gguf(source):  # only now its other parts are known
                files = identify(file.path for file in checkpoint.weight_files)
            path = self._find(key, verify)
            if path is None:
                how = {"scheme": chosen, "network": network}
                path = self._build_once(checkpoint, key, how, rank, verify, progress, child)
            if request is not None:
                self._files.remember_key(request, files, key)
            return path

    def _build_once(
        self,
        checkpoint: Checkpoint,
        key: str,
        request: dict[str, str | None],
        rank: int | None,
        verify: str,
        progress: ProgressCallback | None,
        child: ExportProcess | None,
    ) -> Path:
        """Build a bundle, as ``_build``, unless another process has built it during the wait for its lock."""
        self._make_folder()
        with self._locked(key, progress):
            path = self._find(key, verify, is_last=True)
            if path is not None:
                return path
            self._remove_stale(key)
            path = self._build(checkpoint, key, request, rank, progress, child)
        self._make_room(keep=key)
        return path

    def _build(
        self,
        checkpoint: Checkpoint,
        key: str,
        request: dict[str, str | None],
        rank: int | None,
        progress: ProgressCallback | None,
        child: ExportProcess | None,
    ) -> Path:
        """Build a bundle, whose lock this process holds, and record it; ``request``: its scheme and its network.

        ``child``: one that is prepared.
        """
        path = self.folder / f"{key}.psm"
        try:
            how: Any = {"rank": rank, "kind": "cached", "progress": _announced(progress)}
            if child is None:
                how |= request
                built = build_in_child(checkpoint.folder, path, **how)
            else:
                built = finish_child(child, checkpoint.folder, path, **how)
        except FileAccessError as error:
            if not str(error).startswith((f"{self.folder}{os.sep}", f"{self.folder}: ")):
                raise
            raise self._cannot_write(str(error).rpartition(": ")[2]) from None
        record = {
            "source": str(checkpoint.folder.resolve()),
            **request,
            "num_bytes": path.stat().st_size,
            "rounding_note": built.get("rounding_note", ""),
            **{kind: _shortened(built.get(kind, [])) for kind in _WARNINGS},
        }
        self._write_record(key, record)
        remember_when_written(path, lambda status: self._note_written(key, status))
        return path

    def _note_written(self, key: str, written: os.stat_result) -> None:
        """Note in the record of a bundle that the disk has it, unless another one took its place meanwhile."""
        path = self.folder / f"{key}.psm"
        with contextlib.suppress(PenstockError, OSError):
            record = self._read_record(key)
            if os.path.samestat(path.stat(), written):
                self._write_record(key, {**record, "is_on_disk": True})

    def find_any(self, folder: Path | str, network: str | None = None) -> Path | None:
        """Return the cached bundle of a checkpoint folder in any scheme, unverified; None if there is none."""
        checkpoint = _open(folder, None)
        for scheme in SCHEMES:
            entry = self._entry(bundle_key(checkpoint, scheme, network, self._files.digest))
            if entry is not None:
                return entry.path
        return None

    def list(self) -> Entries:
        """Return the cached bundles, the most recently used first."""
        entries = []
        for record_path in sorted(self.folder.glob("*.json")):
            entry = self._entry(record_path.stem)
            if entry is not None:
                entries.append(entry)
        return sorted(entries, key=lambda entry: -entry.last_used)

    def clear(self) -> tuple[int, int]:
        """Remove every bundle that is not being built; return the number of removed bundles and their bytes."""
        count = total = 0
        forget_verified()
        self._files.clear()
        self._remove_stale()
        for path in sorted(self.folder.glob("*.psm")):
            size = path.stat().st_size if path.exists() else 0
            if _KEY_PATTERN.fullmatch(path.stem) and self.remove(path.stem):
                count, total = count + 1, total + size
        return count, total

    def remove(self, key: str) -> bool:
        """Remove a bundle unless it is being built.  Return whether it was removed.

        The record goes first, so that no incomplete entry is found.
        """
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

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot_write(error.strerror) from None

    def _cannot_write(self, reason: str | None) -> CacheNotWritableError:
        return CacheNotWritableError(
            f"{self.folder}: {reason}. Set PENSTOCK_CACHE_DIR to a writable folder.", param="PENSTOCK_CACHE_DIR"
        )

    def _entry(self, key: str) -> CacheEntry | None:
        """Return the record of a key whose bundle is complete, else None."""
        path, record_path = self.folder / f"{key}.psm", self.folder / f"{key}.json"
        try:
            record = self._read_record(key)
            used, num_bytes = record_path.stat().st_mtime, path.stat().st_size
            if not _KEY_PATTERN.fullmatch(key) or num_bytes != record["num_bytes"]:
                return None
            note, is_on_disk = str(record.get("rounding_note", "")), record.get("is_on_disk") is True
            warnings = [tuple(map(str, record.get(kind, ()))) for kind in _WARNINGS]
            return CacheEntry(
                key, path, str(record["source"]), str(record["scheme"]), num_bytes, used, note, is_on_disk, *warnings
            )
        except (PenstockError, OSError, ValueError, KeyError, TypeError):  # a damaged record counts as missing
            return None

    def _read_record(self, key: str) -> dict[str, Any]:
        """Return the record of a key.  Raises the errors of a missing or damaged one."""
        name = f"{key}.json"
        return parse_object(read_small_file(self.folder / name, _MAX_RECORD_BYTES), name)

    def _find(self, key: str, verify: str, *, is_last: bool = False, was_opened: bool = True) -> Path | None:
        """Return the bundle of a key if it is undamaged, and log its warnings as when it was built.

        ``is_last``, before a build, logs the damage.  ``was_opened``: the warnings of opening the source are logged.
        """
        entry = self._entry(key)
        if entry is None:
            return None
        with contextlib.suppress(OSError):  # a read-only cache can still be read
            os.utime(self.folder / f"{key}.json")
        is_unsure = verify == "never" and not entry.is_on_disk
        damage = _find_damage(entry.path, "once" if is_unsure else verify)
        if is_unsure and not damage:
            remember_when_written(entry.path, lambda status: self._note_written(key, status))
        if damage and is_last:
            _LOG.warning("penstock: the cached bundle of %s is damaged and is built again: %s", entry.source, damage)
        if not damage:
            tell_warnings(entry.warnings if was_opened else (*entry.opening_warnings, *entry.warnings))
            tell_rounding(entry.source, entry.rounding_note)
        return None if damage else entry.path

    def _write_record(self, key: str, record: dict[str, Any]) -> None:
        temporary = self.folder / f".{key}.json.{os.getpid()}{PARTIAL_SUFFIX}"
        try:
            temporary.write_text(json.dumps(record))
            temporary.replace(self.folder / f"{key}.json")
        except OSError as error:
            raise self._cannot_write(error.strerror) from None

    @contextlib.contextmanager
    def _locked(self, key: str, progress: ProgressCallback | None = None) -> Iterator[None]:
        """Hold the lock of a key during the block.  The wait for another builder can be interrupted."""
        has_reported = False
        while True:
            descriptor = self._try_lock(key)
            if descriptor is not None:
                break
            if progress is not None and not has_reported:
                progress(Progress("wait"))
                has_reported = True
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
            # If the file was removed between open and lock, the lock is void.
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:  # a file system without locks: to wait would not help
            os.close(descriptor)
            raise self._cannot_write(error.strerror) from None
        os.close(descriptor)
        return None

    def _unlock(self, key: str, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            (self.folder / f"{key}.lock").unlink()
        os.close(descriptor)

    def _remove_stale(self, locked_key: str | None = None) -> None:
        """Remove the incomplete files of builders that died.  This process holds the lock of ``locked_key``."""
        for path in self.folder.glob(f".*{PARTIAL_SUFFIX}"):
            key = path.name[1:65]
            descriptor = None
            if key != locked_key and _KEY_PATTERN.fullmatch(key):
                with contextlib.suppress(CacheNotWritableError):  # a lock of another user
                    descriptor = self._try_lock(key)
                if descriptor is None:
                    continue  # another process is building it
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # a file of another user
                    path.unlink()
            if descriptor is not None:
                self._unlock(key, descriptor)

    def _make_room(self, keep: str) -> None:
        """Remove the least recently used bundles until the rest fits."""
        entries = self.list()
        total = sum(entry.num_bytes for entry in entries)
        recent = time.time() - _FRESH_SECONDS
        for entry in reversed(entries):
            if total <= self.max_bytes:
                return
            if entry.key == keep or entry.last_used >= recent:
                continue
            with contextlib.suppress(FileAccessError):  # an entry of another user does not keep this one from running
                total -= entry.num_bytes if self.remove(entry.key) else 0
