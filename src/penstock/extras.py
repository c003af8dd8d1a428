"""The command that installs an optional part of the package."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from penstock.errors import UnsupportedError

__all__ = ["install_command", "without_torch"]

_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
"""The package index with builds of PyTorch for the CPU; those of PyPI bring gigabytes of CUDA libraries."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra, such as "torch", to the Python that runs.

    It installs from the source tree that the package was installed from, if that still exists.
    """
    pip = shutil.which("pip")
    is_own = pip is not None and Path(pip).parent == Path(sys.executable).parent
    program = "pip" if is_own else f"{shlex.quote(sys.executable)} -m pip"
    index = f" --extra-index-url {_CPU_INDEX}" if extra == "torch" else ""
    return f"{program} install {shlex.quote(f'{_source()}[{extra}]')}{index}"


def without_torch(name: str, error: ModuleNotFoundError) -> ImportError | UnsupportedError:
    """Return the error for ``name``, whose import raised ``error``: one that says what to do if PyTorch is missing."""
    if error.name != "torch":
        return error
    return UnsupportedError(f"{name} requires PyTorch, which is not installed. Run `{install_command('torch')}`.")


def _source() -> str:
    from importlib.metadata import PackageNotFoundError, distribution  # imported here: only an error needs it

    try:
        record = json.loads(distribution("penstock").read_text("direct_url.json") or "{}")  # PEP 610
    except (PackageNotFoundError, ValueError):
        record = {}
    url = urlsplit(record.get("url", ""))
    folder = unquote(url.path)
    return folder if url.scheme == "file" and (Path(folder) / "pyproject.toml").is_file() else "penstock"
