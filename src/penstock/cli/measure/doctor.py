"""``penstock doctor``: report what this machine offers, what Penstock uses of it, and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator

from penstock.cli.options import add_parser_of
from penstock.cli.progress import format_bytes
from penstock.errors import PenstockError
from penstock.extras import install_command
from penstock.version import __version__

__all__ = ["add_parser", "run"]

_EXTRAS = (
    ("torch", "torch", "checkpoint folders, eager mode, export"),
    ("sentencepiece", "sentencepiece", "folders with only a tokenizer.model"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "doctor",
        "report what this machine offers and what is missing",
        "Report the versions, instructions, cores, memory, extras and cache of this machine, and what is missing.",
        "penstock doctor",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line per fact.  The exit status is 0 even if something is missing."""
    del args
    for section in (_versions, _core, _machine, _extras, _cache):
        for name, value in section():
            print(f"{name:<14}{value}")
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


def _extras() -> Iterator[tuple[str, str]]:
    for module, extra, purpose in _EXTRAS:
        if importlib.util.find_spec(module) is None:
            yield module, f"missing, needed for {purpose}: {install_command(extra)}"
            continue
        try:
            version = importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            version = "version unknown"
        yield module, f"{version}, for {purpose}"


def _cache() -> Iterator[tuple[str, str]]:
    from penstock.runtime.cache import Cache

    try:
        cache = Cache()
        entries = cache.list()
        held = format_bytes(sum(entry.num_bytes for entry in entries))
        yield "cache", f"{cache.folder}: {len(entries)} bundles, {held} of {format_bytes(cache.max_bytes)}"
        parent = next((p for p in (cache.folder, *cache.folder.parents) if p.exists()), cache.folder)
        if not os.access(parent, os.W_OK):
            yield "", f"{parent} is not writable; set PENSTOCK_CACHE_DIR"
    except (PenstockError, OSError) as error:
        yield "cache", f"MISSING: {error}"
    yield "encoding", f"{sys.stdout.encoding} on standard output"
