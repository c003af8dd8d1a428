"""The places of results: what cannot be written is refused before the calibration, which takes long."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import FileAccessError

__all__ = ["check_outputs", "check_parent"]


def check_outputs(folder: Path, imatrix_out: Path | None) -> None:
    """Raise FileAccessError, which names the option, for a result whose folder is missing or cannot be written."""
    check_parent("out", folder)
    if imatrix_out is None:
        return
    check_parent("imatrix_out", imatrix_out)
    if imatrix_out.is_dir():
        raise FileAccessError(f"imatrix_out: {imatrix_out}: expected a file, got a folder", param="imatrix_out")
    if imatrix_out.exists() and not os.access(imatrix_out, os.W_OK):
        raise FileAccessError(f"imatrix_out: {imatrix_out}: expected a file that can be written", param="imatrix_out")


def check_parent(param: str, path: Path) -> None:
    """Raise FileAccessError, which names ``param``, if the folder of a result is missing or cannot be written."""
    parent = path.parent
    if not parent.is_dir():
        raise FileAccessError(f"{param}: {parent}: expected a folder to write {path.name} to, got none", param=param)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise FileAccessError(f"{param}: {parent}: expected a folder that can be written", param=param)
