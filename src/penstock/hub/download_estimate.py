"""The requirements of a download, known before its first byte: files, disk, and the memory to run the model here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock import env
from penstock.checkpoint.quantized.section import with_section
from penstock.config import ConfigReader
from penstock.errors import FileAccessError, OutOfMemoryError, UnsupportedError
from penstock.hub.allowed_files import choose_files, choose_gguf, find_home
from penstock.hub.downloaded import INCOMPLETE, cache_folder, repository_folder
from penstock.hub.memory_need import SMALLEST_SCHEME, ModelShape, memory_need
from penstock.hub.names import ModelName
from penstock.hub.remote import complete_files, fetch_listing, fetch_small
from penstock.hub.remote_model import RemoteFile, RemoteModel
from penstock.models.families import built_in_families
from penstock.quant.scheme import SCHEMES
from penstock.runtime.machine import memory

__all__ = ["DownloadEstimate", "check_disk", "check_family", "check_memory", "estimate_download", "estimate_gguf"]

_MARGIN_BYTES = 64 << 20
"""Disk space that a download leaves free."""


@dataclass(frozen=True)
class DownloadEstimate:
    """The files of a model to download.  ``config`` and ``shape`` are None for a GGUF file."""

    model: RemoteModel
    files: tuple[RemoteFile, ...]
    config: ConfigReader | None = None
    shape: ModelShape | None = None

    @cached_property
    def blobs(self) -> Path:
        """The folder that holds the files by their digests."""
        return repository_folder(self.model.name) / "blobs"

    @property
    def total_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """The bytes to download; the received part of an interrupted file does not count."""
        sizes = self._sizes_on_disk()
        return sum(file.num_bytes - _present_bytes(file, sizes) for file in self.files)

    def _sizes_on_disk(self) -> dict[str, int]:
        try:
            with os.scandir(self.blobs) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except FileNotFoundError:
            return {}

    @property
    def num_by_etag(self) -> int:
        """The number of files without a digest in the hub's listing, which are verified by their ETag."""
        return sum(file.by_etag for file in self.files)


def _present_bytes(file: RemoteFile, sizes: Mapping[str, int]) -> int:
    """Return how many bytes of a file are on this machine; ``sizes`` are those of the blobs, by name."""
    if sizes.get(file.digest) == file.num_bytes:
        return file.num_bytes
    return min(sizes.get(f"{file.digest}{INCOMPLETE}", 0), file.num_bytes)


def estimate_download(name: ModelName) -> DownloadEstimate:
    """Ask the hub for a model's files, and read its config.json.

    Raises what ``fetch_listing`` and ``choose_files`` raise.
    """
    model = fetch_listing(name)
    home = find_home(model)
    files = complete_files(model, choose_files(model, home))
    config = with_section(ConfigReader.parse(fetch_small(model, f"{home}config.json"), "config.json"))
    names = (file.name.removeprefix(home) for file in files)
    weights = sum(
        file.num_bytes
        for file, name in zip(files, names, strict=True)
        if name.endswith(".safetensors") and "/" not in name
    )
    shape = ModelShape.of(config, weights) if config.optional_str("model_type") in built_in_families() else None
    return DownloadEstimate(model, files, config, shape)


def estimate_gguf(name: ModelName, file: str) -> DownloadEstimate:
    """Ask the hub for one GGUF file, or the files that its model is split into; errors as in ``estimate_download``."""
    model = fetch_listing(name)
    return DownloadEstimate(model, complete_files(model, choose_gguf(model, file)))


def check_family(plan: DownloadEstimate) -> None:
    """Raise UnsupportedError for a model that Penstock has no network for, or that another tool quantized."""
    if plan.config is None:
        return
    family = plan.config.optional_str("model_type")
    families = built_in_families()
    if family not in families:
        raise UnsupportedError(
            f"{plan.model.name}: Penstock has no network for model_type {family}. It runs {', '.join(families)}."
        )
    plan.config.quantization()


def check_disk(plan: DownloadEstimate, scheme: str | None = None) -> None:
    """Raise FileAccessError if the download does not fit on the disk.

    ``scheme``: also count the bundle that is made to run the model in it; None counts only the download.
    """
    needs = {cache_folder(): plan.missing_bytes}
    if scheme is not None and plan.shape is not None:
        needs[env.cache_dir()] = plan.shape.weight_bytes(scheme)
    by_device: dict[int, tuple[Path, int, int]] = {}
    for folder, num_bytes in needs.items():
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        device = existing.stat().st_dev
        before = by_device[device][1] if device in by_device else 0
        by_device[device] = (existing, before + num_bytes, shutil.disk_usage(existing).free)
    for folder, num_bytes, free in by_device.values():
        if num_bytes and num_bytes + _MARGIN_BYTES > free:
            what = "download and bundle need" if scheme is not None else "the download needs"
            raise FileAccessError(
                f"{plan.model.name}: {what} {_gb(num_bytes)} on the disk of {folder}, but only {_gb(free)} are free. "
                "Free some space (`penstock list`, `penstock rm`, `penstock cache clear`), or set HF_HOME and "
                "PENSTOCK_CACHE_DIR to folders on another disk."
            )


def check_memory(
    name: ModelName, shape: ModelShape | None, scheme: str | None, *, context_len: int = 0, kv_cache: str = "auto"
) -> None:
    """Raise OutOfMemoryError if the model does not fit into the memory of this machine.

    ``scheme`` None: in the smallest scheme.
    """
    machine = memory()
    if shape is None or not machine.total:
        return
    chosen = scheme or SMALLEST_SCHEME

    def need(scheme: str) -> int:
        return memory_need(shape, scheme, context_len=context_len, kv_cache=kv_cache)

    if need(chosen) <= machine.available:
        return
    fitting = [other for other, row in SCHEMES.items() if not row.in_blocks and need(other) <= machine.available]
    advised = "w8a8" if "w8a8" in fitting else SMALLEST_SCHEME
    hint = f" --scheme {advised} needs about {_gb(need(advised))}." if fitting else ""
    raise OutOfMemoryError(
        f"{name}: the model needs about {_gb(need(chosen))} of memory in {chosen}, but only {_gb(machine.available)} "
        f"are available.{hint or ' Use a smaller model.'}"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"
