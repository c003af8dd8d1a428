"""Every environment variable that Penstock reads, in one place.  A value that does not parse raises."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import InvalidArgumentError

__all__ = [
    "cache_dir", "cache_max_bytes", "cpu_level", "enter_export_child", "in_export_child", "library_path",
    "model_folders", "op_libraries", "pass_on_op_library", "use_reference",
]  # fmt: skip

CPU_LEVELS = ("generic", "avx2", "avx512", "amx", "neon", "neon_dot")


def cpu_level() -> str | None:
    """``PENSTOCK_CPU``: force an instruction level; the native core checks that the machine has it."""
    value = os.environ.get("PENSTOCK_CPU") or None
    if value is not None and value not in CPU_LEVELS:
        raise InvalidArgumentError(f"PENSTOCK_CPU must be one of {', '.join(CPU_LEVELS)}, not {value!r}")
    return value


def use_reference() -> bool:
    """``PENSTOCK_REFERENCE=1``: eager mode runs the plain PyTorch references instead of the kernels."""
    value = os.environ.get("PENSTOCK_REFERENCE", "0")
    if value not in ("0", "1", ""):
        raise InvalidArgumentError(f"PENSTOCK_REFERENCE must be 0 or 1, not {value!r}")
    return value == "1"


def library_path() -> Path | None:
    """``PENSTOCK_LIBRARY``: load this build of the native core (a sanitized one, say)."""
    value = os.environ.get("PENSTOCK_LIBRARY")
    return Path(value) if value else None


def op_libraries() -> list[str]:
    """``PENSTOCK_OPS``: shared libraries with ops of users' own, separated as in ``PATH``, for every process."""
    return [path for path in os.environ.get("PENSTOCK_OPS", "").split(os.pathsep) if path]


def pass_on_op_library(path: str) -> None:
    """Have the processes that this one starts load a library, too."""
    os.environ["PENSTOCK_OPS"] = os.pathsep.join(dict.fromkeys([*op_libraries(), path]))


def enter_export_child() -> None:
    """Set ``PENSTOCK_EXPORT_CHILD``: this process exports a model, and so does every process that it starts."""
    os.environ["PENSTOCK_EXPORT_CHILD"] = "1"


def in_export_child() -> bool:
    """``PENSTOCK_EXPORT_CHILD``: this process, or one that started it, exports a model. Penstock sets it."""
    return bool(os.environ.get("PENSTOCK_EXPORT_CHILD"))


def cache_dir() -> Path:
    """``PENSTOCK_CACHE_DIR``, else ``$XDG_CACHE_HOME/penstock``, else ``~/.cache/penstock``."""
    value = os.environ.get("PENSTOCK_CACHE_DIR")
    if value:
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "penstock"


def cache_max_bytes() -> int:
    """``PENSTOCK_CACHE_BYTES``: how much the cache may hold; 50 GB unless told."""
    value = os.environ.get("PENSTOCK_CACHE_BYTES", "50000000000")
    try:
        limit = int(value)
    except ValueError:
        limit = -1
    if limit < 0:
        raise InvalidArgumentError(f"PENSTOCK_CACHE_BYTES must be a number of bytes, not {value!r}")
    return limit


def model_folders() -> list[Path]:
    """``PENSTOCK_MODELS``: folders, separated as in ``PATH``, in which models are looked for by name."""
    return [Path(folder) for folder in os.environ.get("PENSTOCK_MODELS", "").split(os.pathsep) if folder]
