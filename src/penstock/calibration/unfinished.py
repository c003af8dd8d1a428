"""Finished weights of a quantization that takes long: kept beside the output, so that a killed run continues."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.checkpoint.folder import Checkpoint
from penstock.core.native import QuantizedRows
from penstock.errors import FileAccessError

__all__ = ["UnfinishedWeights"]

_SUFFIX: Final = ".unfinished"
_RECIPE: Final = "recipe.json"


class UnfinishedWeights:
    """A hidden folder beside ``final`` with a file for each finished weight.

    Files of another recipe, or of other source files, are removed.  The folder is made with the first weight.
    """

    def __init__(self, final: Path, recipe: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        self._folder = final.parent / f".{final.name}{_SUFFIX}"
        source = [asdict(stamp) for stamp in checkpoint.files]
        self._text = json.dumps({"recipe": dict(recipe), "source": source})
        self._is_new = not self._is_continued()

    def _is_continued(self) -> bool:
        try:
            return (self._folder / _RECIPE).read_text() == self._text
        except OSError:
            return False

    def _begin(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (self._folder / _RECIPE).write_text(self._text)
        self._is_new = False

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.npz"

    def read(self, name: str) -> QuantizedRows | None:
        """Return a finished weight, or None; a damaged file is None, and the weight is computed again."""
        if self._is_new:
            return None
        try:
            # numpy closes a file that it opened itself late if the archive is damaged
            with self._file(name).open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                return QuantizedRows(arrays["q"], arrays["scales"], arrays.get("groups"))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError):
            return None

    def write(self, name: str, rows: QuantizedRows) -> None:
        """Keep a finished weight; its file appears complete or not at all."""
        arrays = {key: value for key, value in rows._asdict().items() if value is not None}
        partial = self._file(name).with_suffix(".partial")
        try:
            if self._is_new:
                self._begin()
            with partial.open("wb") as stream:
                np.savez(stream, **arrays)
            os.replace(partial, self._file(name))
        except OSError as error:
            raise FileAccessError(f"{self._folder}: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
