"""Samples of a network's inputs, one in each file of a folder."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.predict import NUMPY_DTYPES, NetworkValue
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError

__all__ = ["Sample", "held_out", "read_samples", "sample_files"]

Sample = dict[str, NDArray[Any]]
_HELD_OUT_EVERY: Final = 4


def read_samples(folder: str | os.PathLike[str], inputs: Sequence[NetworkValue]) -> list[Sample]:
    """Return the samples of a folder, by the names of its files: NAME.npz has an array for each input, by name.

    Of a network with one input a sample may be NAME.npy.  Raises InvalidArgumentError without files and for one whose
    arrays do not fit the inputs, and InvalidFileError for a damaged one.
    """
    return [_read(path, inputs) for path in sample_files(folder)]


def sample_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the paths of the samples of a folder, by their names; InvalidArgumentError if there are none."""
    root = Path(folder)
    if not root.is_dir():
        raise InvalidArgumentError(f"calibration: expected a folder, got {root}", param="calibration")
    paths = sorted(path for path in root.iterdir() if path.suffix in (".npz", ".npy"))
    if not paths:
        raise InvalidArgumentError(
            f"calibration: expected .npz or .npy files in {root}, got none", param="calibration", code="no_samples"
        )
    return paths


def held_out(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Divide samples into those that give ranges and every fourth, which judges; of fewer than 4 all do both."""
    judging = list(samples[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY])
    if not judging:
        return list(samples), list(samples)
    return [sample for at, sample in enumerate(samples) if at % _HELD_OUT_EVERY != _HELD_OUT_EVERY - 1], judging


def _read(path: Path, inputs: Sequence[NetworkValue]) -> Sample:
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                arrays = {inputs[0].name: loaded} if len(inputs) == 1 else {path.name: loaded}
            else:
                arrays = {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror or error}", param="calibration") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidFileError(f"{path}: expected arrays of numbers, got another file", param="calibration") from error
    names = [value.name for value in inputs]
    if set(arrays) != set(names):
        raise InvalidArgumentError(
            f"calibration: {path.name}: expected the arrays {', '.join(names)}, got {', '.join(arrays)}",
            param="calibration",
        )
    for value in inputs:
        own = arrays[value.name]
        if own.dtype != NUMPY_DTYPES[value.dtype] or own.ndim != len(value.sizes):
            raise InvalidArgumentError(
                f"calibration: {path.name}: {value.name}: expected {NUMPY_DTYPES[value.dtype]} of {len(value.sizes)} "
                f"dimensions, got {own.dtype} of {own.ndim}",
                param="calibration",
            )
    return arrays
