"""Finished parts of a quantization that takes long: kept beside the output, so that a killed run continues."""

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
from penstock.quant.matrix import group_shape
from penstock.quant.scheme import Scheme

__all__ = ["ROTATED", "UnfinishedWeights", "Workspace", "is_unfinished"]

_SUFFIX: Final = ".unfinished"
MEASURED: Final = ".measured"
ROTATED: Final = ".rotated"
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

    def read(self, name: str, shape: tuple[int, ...], scheme: Scheme) -> QuantizedRows | None:
        """Return a finished weight, or None; a damaged file is None, and the weight is computed again.

        ``shape``: [rows, cols] of the weight.  A file with arrays of other shapes or types is damaged, too.
        """
        if self._is_new:
            return None
        try:
            # numpy closes a file that it opened itself late if the archive is damaged
            with self._file(name).open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                rows = QuantizedRows(arrays["q"], arrays["scales"], arrays.get("groups"))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError):
            return None
        return rows if _is_whole(rows, (shape[0], shape[1]), scheme) else None

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


def _is_whole(rows: QuantizedRows, shape: tuple[int, int], scheme: Scheme) -> bool:
    """Return True if arrays have the shapes and types of a weight."""
    found = [(array.shape, array.dtype) for array in rows if array is not None]
    expected: list[tuple[tuple[int, ...], np.dtype[Any]]] = [
        (shape, np.dtype(np.int8)),
        (shape[:1], np.dtype(np.float32)),
    ]
    if scheme.weight_bits == 4:
        expected.append((group_shape(*shape), np.dtype(np.int8)))
    return found == expected


class Workspace:
    """A hidden folder beside ``final`` for the results of finished steps.

    It is begun anew if ``inputs`` or the files of the source differ from those that it was made for.  ``suffix`` ends
    its name: the steps of a measurement and a rotated checkpoint lie apart.
    """

    def __init__(self, final: Path, inputs: Mapping[str, Any], checkpoint: Checkpoint, suffix: str = MEASURED) -> None:
        self.folder = final.parent / f".{final.name}{suffix}"
        text = json.dumps({"inputs": dict(inputs), "source": [asdict(stamp) for stamp in checkpoint.files]})
        marker = self.folder / "inputs.json"
        try:
            if marker.is_file() and marker.read_text() == text:
                return
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            marker.write_text(text)
        except OSError as error:
            raise FileAccessError(f"{self.folder}: {error.strerror}") from None

    def read(self, name: str) -> Any:
        """Return the value of a finished step; None if it is not finished."""
        try:
            return json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return None

    def write(self, name: str, value: Any) -> None:
        """Keep the value of a finished step; its file appears complete or not at all."""
        partial = self.folder / f"{name}.partial"
        try:
            partial.write_text(json.dumps(value))
            os.replace(partial, self.folder / name)
        except OSError as error:
            raise FileAccessError(f"{partial}: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def is_unfinished(final: Path) -> bool:
    """Return True if a run for ``final`` left weights or measurements, which the same command continues."""
    return any((final.parent / f".{final.name}{suffix}").exists() for suffix in (_SUFFIX, MEASURED))
