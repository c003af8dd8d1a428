"""Finished parts of a quantization that takes long: kept beside the output, so that a killed run continues."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.calibration.outputs import check_parent
from penstock.checkpoint.folder import Checkpoint
from penstock.core.native import QuantizedRows
from penstock.errors import FileAccessError, PenstockError
from penstock.quant.matrix import group_shape
from penstock.quant.scheme import Scheme

__all__ = ["ROTATED", "UnfinishedWeights", "Workspace", "resumable_output"]

_SUFFIX: Final = ".unfinished"
MEASURED: Final = ".measured"
ROTATED: Final = ".rotated"
_RECIPE: Final = "recipe.json"
_INPUTS: Final = "inputs.json"
_ROTATED_CHECKPOINT: Final = "rotated"
_LOCK: Final = ".lock"


class UnfinishedWeights:
    """A hidden folder beside ``final`` with a file for each finished weight.

    Files of another recipe, or of other source files, are removed.  The folder is made with the first weight.
    """

    def __init__(self, final: Path, recipe: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        self._folder = final.parent / f".{final.name}{_SUFFIX}"
        self._text = json.dumps({"recipe": dict(recipe), "source": _stamps(checkpoint)})
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
        text = json.dumps({"inputs": dict(inputs), "source": _stamps(checkpoint)})
        marker = self.folder / _INPUTS
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

    @property
    def rotated(self) -> Path:
        """The rotated checkpoint in a folder that ends in ``ROTATED``."""
        return self.folder / _ROTATED_CHECKPOINT


def _stamps(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    return [asdict(stamp) for stamp in checkpoint.files]


@contextlib.contextmanager
def resumable_output(final: Path, on_kept: Callable[[Path], None]) -> Iterator[None]:
    """Make the block the only run that writes ``final``, and remove its hidden folders afterwards.

    After an exception the folders with finished parts stay, and the rotated checkpoint that the parts were made of;
    ``on_kept`` gets each of them.  Raises FileAccessError (code ``locked``) while another run writes ``final``.
    """
    check_parent("out", final)
    with _locked(final):
        try:
            yield
        except BaseException:
            for folder in _hidden_folders(final):
                if _has_finished_parts(final, folder):
                    on_kept(folder)
                else:
                    shutil.rmtree(folder, ignore_errors=True)
            raise
        for folder in _hidden_folders(final):
            shutil.rmtree(folder, ignore_errors=True)


def _hidden_folders(final: Path) -> list[Path]:
    """Return the hidden folders that exist, the rotated checkpoint last."""
    folders = [final.parent / f".{final.name}{suffix}" for suffix in (_SUFFIX, MEASURED, ROTATED)]
    return [folder for folder in folders if folder.is_dir()]


def _has_finished_parts(final: Path, folder: Path) -> bool:
    """Return True if a hidden folder has finished weights or measurements, or the checkpoint that they belong to."""
    if folder.suffix != ROTATED:
        return any(path.suffix in (".npz", ".json") for path in folder.iterdir() if path.name not in (_RECIPE, _INPUTS))
    try:
        stamps = _stamps(Checkpoint.open(folder / _ROTATED_CHECKPOINT))
    except PenstockError:
        return False
    others = [own for own in _hidden_folders(final) if own != folder and _has_finished_parts(final, own)]
    return any(_source_of(own) == stamps for own in others)


def _source_of(folder: Path) -> Sequence[Mapping[str, Any]] | None:
    """Return the stamps of the checkpoint that the parts in a hidden folder were made of; None if unknown."""
    for name in (_RECIPE, _INPUTS):
        with contextlib.suppress(OSError, ValueError, KeyError):
            source: Sequence[Mapping[str, Any]] = json.loads((folder / name).read_text())["source"]
            return source
    return None


@contextlib.contextmanager
def _locked(final: Path) -> Iterator[None]:
    """Hold the lock of an output; its file is removed afterwards.  Some file systems do not support such locks."""
    path = final.parent / f".{final.name}{_LOCK}"
    descriptor = None
    while descriptor is None:
        descriptor = _try_lock(path, final)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _try_lock(path: Path, final: Path) -> int | None:
    """Return the descriptor of a locked file; None if the run that held the lock has just removed the file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise FileAccessError(f"out: {path}: {error.strerror}", param="out") from None
    try:
        with contextlib.suppress(FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
    except BlockingIOError:
        os.close(descriptor)
        raise FileAccessError(
            f"out: expected a folder that no other run is writing, got {final}; wait for it, or pass another name",
            param="out",
            code="locked",
        ) from None
    except OSError:  # the file system has no locks
        return descriptor
    os.close(descriptor)
    return None
