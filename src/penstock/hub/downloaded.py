"""The models of hubs on this machine: find, list and remove them, without a network.

They lie in the cache of ``huggingface_hub`` (``HF_HUB_CACHE``), which other programs share::

    models--ORG--NAME/refs/main            the commit that a branch or a tag had
    models--ORG--NAME/snapshots/COMMIT/    links to the files of a commit
    models--ORG--NAME/blobs/DIGEST         the files; those of a download that stopped end in .incomplete
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock import env
from penstock.checkpoint.side_files import model_folder, read_small_file
from penstock.checkpoint.stored.shards import INDEX, SINGLE, shards_without_index
from penstock.config import ConfigReader
from penstock.errors import NotFoundError, PenstockError
from penstock.hub.allowed_files import shards_of
from penstock.hub.listing import COMMIT
from penstock.hub.memory_need import ModelShape
from penstock.hub.names import ModelName

__all__ = [
    "Downloaded",
    "Removal",
    "cache_folder",
    "downloaded_revisions",
    "find_downloaded",
    "list_downloaded",
    "plan_removal",
    "repository_folder",
]

INCOMPLETE: Final = ".incomplete"
MIN_COMMIT_LEN: Final = 7
_MAX_REF_BYTES: Final = 256


@dataclass(frozen=True)
class Downloaded:
    """A revision of a repository on this machine; ``num_bytes`` counts its files, ``last_used`` is seconds since 1970.

    ``state``: "" if Penstock can open the folder, else why not ("incomplete", "GGUF", "no safetensors").
    """

    name: ModelName
    commit: str
    path: Path
    num_bytes: int
    last_used: float
    state: str = ""

    def files(self) -> dict[str, int]:
        """Return the size in bytes of each file."""
        paths = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in paths}

    def config(self) -> ConfigReader | None:
        """Return config.json, or None if it is missing or damaged."""
        with contextlib.suppress(PenstockError, OSError):
            return ConfigReader.parse(read_small_file(model_folder(self.path) / "config.json"), "config.json")
        return None

    def shape(self) -> ModelShape | None:
        """Return the sizes that decide the memory, or None if config.json does not give them."""
        with contextlib.suppress(PenstockError):
            if (config := self.config()) is not None:
                weights = sum(path.stat().st_size for path in model_folder(self.path).glob("*.safetensors"))
                return ModelShape.of(config, weights)
        return None


def cache_folder() -> Path:
    """Return the cache of ``huggingface_hub``: ``HF_HUB_CACHE``, else ``HF_HOME/hub``."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    return env.home_dir() / folder.relative_to("~") if folder.parts[:1] == ("~",) else folder


def repository_folder(name: ModelName) -> Path:
    """Return the folder of a repository in the cache."""
    return cache_folder() / f"models--{name.repository.replace('/', '--')}"


def find_downloaded(name: ModelName) -> Path | None:
    """Return the checkpoint folder of a model that is complete on this machine, else None.  Sends no request."""
    path = repository_folder(name) / "snapshots" / _commit_of(name)
    return path if path.is_dir() and not _state(path) else None


def _commit_of(name: ModelName) -> str:
    """Return the commit that the revision meant at its last download; the revision itself if it is no known ref."""
    try:
        with (repository_folder(name) / "refs" / name.revision).open("rb") as stream:
            commit = stream.read(_MAX_REF_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return name.revision
    return commit if COMMIT.fullmatch(commit) else name.revision  # another program may write what a hub told it


def list_downloaded() -> list[Downloaded]:
    """Return every model in the cache, by name.  Sends no request."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = [repo for repo in scan_cache_dir(cache_folder()).repos if repo.repo_type == "model"]
    except (CacheNotFound, ValueError):
        return []
    entries = [
        Downloaded(
            ModelName(repo.repo_id, _revision_of(revision)),
            revision.commit_hash,
            Path(revision.snapshot_path),
            revision.size_on_disk,
            max((file.blob_last_accessed for file in revision.files), default=revision.last_modified),
            _state(Path(revision.snapshot_path)),
        )
        for repo in repositories
        for revision in repo.revisions
    ]
    return sorted(
        entries, key=lambda entry: (entry.name.repository.lower(), entry.name.revision != "main", entry.commit)
    )


def downloaded_revisions(name: ModelName, *, whole: bool) -> list[Downloaded]:
    """Return the revision that ``name`` means, or with ``whole`` every revision of its repository."""
    entries = [entry for entry in list_downloaded() if entry.name.repository == name.repository]
    if whole:
        return entries
    commit = _commit_of(name)
    return [entry for entry in entries if len(commit) >= MIN_COMMIT_LEN and entry.commit.startswith(commit)]


def _revision_of(revision: Any) -> str:
    refs = sorted(revision.refs)
    return "main" if "main" in refs else refs[0] if refs else revision.commit_hash


def _state(folder: Path) -> str:
    """Return "" for a checkpoint folder that can be opened, else why it cannot."""
    try:
        home = model_folder(folder)
        if (home / SINGLE).exists():
            weights = [SINGLE]
        elif (home / INDEX).exists():
            weights = shards_of(read_small_file(home / INDEX))
        else:
            weights = shards_without_index(path.name for path in home.iterdir())
    except (PenstockError, OSError):
        return "incomplete"
    if not weights:
        return "GGUF" if any(path.suffix.lower() == ".gguf" for path in folder.rglob("*")) else "no safetensors"
    is_complete = all((home / name).exists() for name in ("config.json", *weights))
    return "" if is_complete else "incomplete"


@dataclass(frozen=True)
class Removal:
    """The files that ``rm`` would remove: those that no other revision uses, and parts of an interrupted download.

    ``num_bytes``: the bytes that become free.
    """

    name: ModelName
    revisions: tuple[Downloaded, ...]
    num_bytes: int
    strategy: Any
    leftovers: tuple[Path, ...]

    def execute(self) -> None:
        """Remove the files."""
        if self.strategy is not None:
            self.strategy.execute()
        for path in self.leftovers:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def plan_removal(name: ModelName, *, whole: bool) -> Removal:
    """Return what removing a model frees; ``whole`` removes every revision.  NotFoundError if there is none."""
    from huggingface_hub import scan_cache_dir

    entries = downloaded_revisions(name, whole=whole)
    folder = repository_folder(name)
    leftovers = _leftovers(folder, is_empty=not entries) if whole else ()
    if not entries and not leftovers:
        raise NotFoundError(f"{name}: not on this machine. `penstock list` shows the downloaded models.")
    strategy = (
        scan_cache_dir(cache_folder()).delete_revisions(*(entry.commit for entry in entries)) if entries else None
    )
    num_bytes = strategy.expected_freed_size if strategy is not None else 0
    num_bytes += sum(path.stat().st_size for path in leftovers if path.is_file())
    num_bytes += sum(f.stat().st_size for path in leftovers if path.is_dir() for f in path.rglob("*") if f.is_file())
    return Removal(name, tuple(entries), num_bytes, strategy, leftovers)


def _leftovers(folder: Path, *, is_empty: bool) -> tuple[Path, ...]:
    """Return the files of interrupted downloads; the whole folder if no download was completed."""
    if not folder.is_dir():
        return ()
    has_snapshot = any((folder / "snapshots").glob("*"))
    if is_empty and not has_snapshot:
        return (folder,)
    return tuple((folder / "blobs").glob(f"*{INCOMPLETE}"))
