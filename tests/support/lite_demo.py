"""The demo model: its bundles in three schemes, what the engine makes of them, and calls of a Model in few words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock import lite

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "demo" / "demo.psm"
FOLDER = ROOT / "demo" / "model"
IDS = [7, 300, 41, 9, 2048, 5, 77, 4000, 12, 600, 33]
VOCAB = 4096


def build(path: Path = BUNDLE, context: lite.Context | None = None, **config: object) -> lite.Model:
    """A model that is built."""
    model = lite.Model()
    model.build_from_file(path, lite.ModelType.PENSTOCK, context, config)
    return model


def tensors(rows: Sequence[Sequence[int]], reset: Sequence[int] | int = 1, width: int = 0) -> list[lite.Tensor]:
    """Inputs of rows of different lengths, padded with ids that no vocabulary has."""
    width = width or max(map(len, rows))
    token_ids = np.full((len(rows), width), -1, np.int32)
    for row, ids in enumerate(rows):
        token_ids[row, : len(ids)] = ids
    counts = np.array([len(ids) for ids in rows], np.int32)
    resets = np.full(len(rows), reset, np.int32) if isinstance(reset, int) else np.array(reset, np.int32)
    return [lite.Tensor(token_ids), lite.Tensor(counts), lite.Tensor(resets)]


def ask(model: lite.Model, rows: Sequence[Sequence[int]], reset: Sequence[int] | int = 1) -> npt.NDArray[np.float32]:
    """The first output of a model for these rows, whatever its shapes were."""
    given = tensors(rows, reset)
    model.resize(given, [one.shape for one in given])
    return model.predict(given)[0].get_data_to_numpy()
