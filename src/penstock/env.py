"""Every environment variable that Penstock reads.  An invalid value raises InvalidArgumentError."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import InvalidArgumentError

__all__ = [
    "cache_dir", "cache_max_bytes", "child_environment", "cpu_level", "enter_export_child", "home_dir",
    "in_export_child", "keep_log_format", "library_path", "memory_share_bytes", "model_folders", "mpi_library",
    "op_libraries", "pass_on_json_log", "pass_on_op_library", "rank_open_s", "state_dir", "use_reference",
    "writes_json_log",
]  # fmt: skip

CPU_LEVELS = ("generic", "avx2", "avx512", "amx", "neon", "neon_dot")


def cpu_level() -> str | None:
    """``PENSTOCK_CPU``: force an instruction level.  The native core checks that the machine supports it."""
    value = os.environ.get("PENSTOCK_CPU") or None
    if value is not None and value not in CPU_LEVELS:
        raise InvalidArgumentError(
            f"PENSTOCK_CPU: expected one of {', '.join(CPU_LEVELS)}, got {value!r}", param="PENSTOCK_CPU"
        )
    return value


def use_reference() -> bool:
    """``PENSTOCK_REFERENCE=1``: eager mode runs the PyTorch references instead of the kernels."""
    value = os.environ.get("PENSTOCK_REFERENCE", "0")
    if value not in ("0", "1", ""):
        raise InvalidArgumentError(f"PENSTOCK_REFERENCE: expected 0 or 1, got {value!r}", param="PENSTOCK_REFERENCE")
    return value == "1"


def library_path() -> Path | None:
    """``PENSTOCK_LIBRARY``: the build of the native core to load, for example one with sanitizers."""
    value = os.environ.get("PENSTOCK_LIBRARY")
    return Path(value) if value else None


def memory_share_bytes() -> int | None:
    """``PENSTOCK_MEMORY_SHARE``: how many bytes of its node a worker on a cluster may plan.  Penstock sets it."""
    value = os.environ.get("PENSTOCK_MEMORY_SHARE")
    if value is not None and not (value.isascii() and value.isdigit()):
        raise InvalidArgumentError(
            f"PENSTOCK_MEMORY_SHARE: expected a number of bytes, got {value!r}", param="PENSTOCK_MEMORY_SHARE"
        )
    return None if value is None else int(value)


def mpi_library() -> str | None:
    """``PENSTOCK_MPI_LIBRARY``: an MPI library with the standard ABI; by default that of the package mpich.

    None leaves the search to the system.
    """
    packaged = Path(sys.prefix, "lib", "libmpi_abi.so.1")
    return os.environ.get("PENSTOCK_MPI_LIBRARY") or (str(packaged) if packaged.exists() else None)


def rank_open_s() -> float:
    """``PENSTOCK_RANK_OPEN_SECONDS``: the limit on the time in which all ranks of a group open, by default an hour.

    It is for a rank that hangs.  One that ends or is stopped is noticed at once, however long the others take.
    """
    value = os.environ.get("PENSTOCK_RANK_OPEN_SECONDS", "3600")
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise InvalidArgumentError(
            f"PENSTOCK_RANK_OPEN_SECONDS: expected seconds above 0, got {value!r}", param="PENSTOCK_RANK_OPEN_SECONDS"
        )
    return limit


def op_libraries() -> list[str]:
    """``PENSTOCK_OPS``: shared libraries of custom ops, separated as in ``PATH``, which every process loads."""
    return [path for path in os.environ.get("PENSTOCK_OPS", "").split(os.pathsep) if path]


def pass_on_op_library(path: str) -> None:
    """Add a library to ``PENSTOCK_OPS``, so that the processes that this one starts load it too."""
    os.environ["PENSTOCK_OPS"] = os.pathsep.join(dict.fromkeys([*op_libraries(), path]))


def pass_on_json_log() -> None:
    """Set ``PENSTOCK_LOG``, so that the processes that this one starts write their notes as lines of its log."""
    os.environ["PENSTOCK_LOG"] = "json"


@contextmanager
def keep_log_format() -> Iterator[None]:
    """Restore ``PENSTOCK_LOG`` at the end, so that a command leaves nothing behind for the next one of its process."""
    before = os.environ.get("PENSTOCK_LOG")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PENSTOCK_LOG", None)
        else:
            os.environ["PENSTOCK_LOG"] = before


def writes_json_log() -> bool:
    """``PENSTOCK_LOG=json``: notes on the standard error are lines of JSON.  Penstock sets it for its workers."""
    return os.environ.get("PENSTOCK_LOG") == "json"


def enter_export_child() -> None:
    """Set ``PENSTOCK_EXPORT_CHILD``, which marks this process, and those that it starts, as part of an export."""
    os.environ["PENSTOCK_EXPORT_CHILD"] = "1"


def in_export_child() -> bool:
    """``PENSTOCK_EXPORT_CHILD``: True if this process, or one that started it, exports a model.  Penstock sets it."""
    return bool(os.environ.get("PENSTOCK_EXPORT_CHILD"))


def home_dir() -> Path:
    """Return the user's home folder; "/" for a user without ``HOME`` and without an entry in the user database."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def cache_dir() -> Path:
    """``PENSTOCK_CACHE_DIR``: the cache folder; by default ``$XDG_CACHE_HOME/penstock`` or ``~/.cache/penstock``."""
    value = os.environ.get("PENSTOCK_CACHE_DIR")
    if value:
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home_dir() / ".cache") / "penstock"


def state_dir() -> Path:
    """``$XDG_STATE_HOME/penstock``, else ``~/.local/state/penstock``: what a user's sessions leave for the next."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else home_dir() / ".local" / "state") / "penstock"


def cache_max_bytes() -> int:
    """``PENSTOCK_CACHE_BYTES``: the limit on the size of the cache, by default 50 GB."""
    value = os.environ.get("PENSTOCK_CACHE_BYTES", "50000000000")
    try:
        limit = int(value)
    except ValueError:
        limit = -1
    if limit < 0:
        raise InvalidArgumentError(
            f"PENSTOCK_CACHE_BYTES: expected a number of bytes, got {value!r}", param="PENSTOCK_CACHE_BYTES"
        )
    return limit


def model_folders() -> list[Path]:
    """``PENSTOCK_MODELS``: the folders, separated as in ``PATH``, that are searched for models by name."""
    return [Path(folder) for folder in os.environ.get("PENSTOCK_MODELS", "").split(os.pathsep) if folder]


def child_environment() -> dict[str, str]:
    """Return this environment, with the folder that this package was imported from in PYTHONPATH."""
    home = str(Path(__file__).parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if home not in paths:
        paths.append(home)
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
