"""``penstock doctor``: report what this machine offers, what Penstock uses of it, and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.cli.options import add_parser_of
from penstock.cli.progress import format_bytes
from penstock.errors import PenstockError
from penstock.extras import install_command
from penstock.version import __version__

__all__ = ["add_parser", "run"]

_EXTRAS: Final = (
    ("sentencepiece", "sentencepiece", "checkpoint folders with only a tokenizer.model that is not Llama's"),
    ("onnxruntime", "onnx", ".onnx files, and servables with those that Penstock does not read"),
    ("opentelemetry.sdk", "otel", "traces of penstock serve"),
    ("lm_eval", "eval", "evaluation with lm-eval"),
    ("ray", "cluster", "workers on a cluster"),
    ("mpich", "mpi", "ranks of penstock.lite and C on several hosts"),
    ("s3fs", "s3", "files of requests in S3"),
)
"""A module, its extra, and what needs it."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "doctor",
        "Report the versions, instructions, cores, memory, optional parts and folders of this machine, and what is "
        "missing, with the command that installs it.",
        "penstock doctor",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line per fact.  The exit status is 0 even if something is missing."""
    del args
    for section in (_versions, _core, _machine, _torch, _extras, _cache, _hub):
        for name, value in section():
            print(f"{name:<15}{value}")
    return 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "penstock", f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"


def _core() -> Iterator[tuple[str, str]]:
    try:
        from penstock.core import native

        with native.Context() as context:
            yield "native core", f"{native.version()}, {native.library_file()}"
            levels = [name if runs else f"{name} (not supported by this machine)" for name, runs in native.cpu_levels()]
            forced = " (PENSTOCK_CPU)" if os.environ.get("PENSTOCK_CPU") else ""
            yield "instructions", f"{context.cpu_level} in use{forced}; compiled in: {', '.join(levels)}"
            yield "threads", f"{context.num_threads} in use"
    except (PenstockError, OSError) as error:
        yield "native core", f"MISSING: {error}"
    beside = Path(sys.executable).with_name("penstock-lite")
    lite = shutil.which("penstock-lite") or (str(beside) if beside.exists() else None)
    yield "penstock-lite", lite or "missing, runs bundles without Python: pip install --force-reinstall penstock"


def _machine() -> Iterator[tuple[str, str]]:
    from penstock.runtime.machine import affinity, cgroup_cpus, huge_pages, memory

    allowed, quota = affinity(), cgroup_cpus()
    cores = f"{os.cpu_count()}, of which this process may use {len(allowed)}"
    yield "cores", cores + (f", the cgroup allows {quota:g}" if quota is not None else ", no cgroup limit")
    state = memory()
    limit = "no cgroup limit" if state.cgroup_limit is None else f"cgroup limit {format_bytes(state.cgroup_limit)}"
    free = f"{format_bytes(state.available)} free" if state.is_measured else "free memory unknown (no /proc)"
    yield "memory", f"{free} of {format_bytes(state.total)}, {limit}"
    setting = huge_pages()
    hint = "" if setting != "never" else ": reading large weights is slower"
    yield "huge pages", f"{setting}{hint}"


def _torch() -> Iterator[tuple[str, str]]:
    purpose = "eager mode, networks of your own"
    if importlib.util.find_spec("torch") is None:
        yield "torch", f"missing, needed for {purpose}: {install_command('torch')}"
        return
    version = _version_of("torch")
    packages = [package for package in importlib.metadata.distributions() if _name_of(package).startswith("nvidia-")]
    if "+cpu" in version or not packages:
        yield "torch", f"{version}, for {purpose}"
        return
    size = sum(file.size or 0 for package in packages for file in package.files or ())
    yield "torch", f"{version}, for {purpose}"
    yield "", f"This build brings {len(packages)} CUDA packages, {format_bytes(size)}, which Penstock does not use."
    names = " ".join(sorted({_name_of(package) for package in packages}))
    yield "", f"To remove them: pip uninstall --yes torch {names} && {install_command('torch')}"


def _name_of(distribution: importlib.metadata.Distribution) -> str:
    return str(distribution.metadata["Name"] or "").lower()


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


def _extras() -> Iterator[tuple[str, str]]:
    for module, extra, purpose in _EXTRAS:
        package = {"opentelemetry.sdk": "opentelemetry-sdk", "lm_eval": "lm-eval"}.get(module, module)
        root = module.partition(".")[0]
        if importlib.util.find_spec(root) is None or (root != module and importlib.util.find_spec(module) is None):
            yield extra, f"missing, needed for {purpose}: {install_command(extra)}"
        else:
            yield extra, f"{package} {_version_of(package)}, for {purpose}"


def _cache() -> Iterator[tuple[str, str]]:
    from penstock.runtime.cache import Cache

    try:
        cache = Cache()
        entries = cache.list()
        used = format_bytes(sum(entry.num_bytes for entry in entries))
        yield "cache", f"{cache.folder}: {len(entries)} bundles, {used} of {format_bytes(cache.max_bytes)}"
        parent = next((p for p in (cache.folder, *cache.folder.parents) if p.exists()), cache.folder)
        if not os.access(parent, os.W_OK):
            yield "", f"{parent} is not writable; set PENSTOCK_CACHE_DIR"
    except (PenstockError, OSError) as error:
        yield "cache", f"MISSING: {error}"
    yield "encoding", f"{sys.stdout.encoding} on standard output"


def _hub() -> Iterator[tuple[str, str]]:
    """Report where models come from; the token itself is not printed, and no request is sent."""
    from huggingface_hub import get_token

    from penstock.hub.downloaded import cache_folder
    from penstock.hub.transfer_errors import endpoint, is_offline

    yield "models", f"{cache_folder()}, from {endpoint()}{' (HF_HUB_OFFLINE: no requests)' if is_offline() else ''}"
    has_token = "set" if get_token() else "none; models with a licence to accept need one: hf auth login"
    yield "hub token", has_token
