"""Finished weights of a killed run: what is kept is read back, and a damaged file is computed again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.calibration.unfinished import UnfinishedWeights
from penstock.core.native import QuantizedRows
from penstock.quant.scheme import Scheme, find_scheme

W8, W4 = find_scheme("w8a8"), find_scheme("w4a8")


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other"])
def test_a_damaged_file_is_computed_again(damage: str, tmp_path: Path) -> None:
    checkpoint: Any = SimpleNamespace(files=())
    unfinished = UnfinishedWeights(tmp_path / "out", {}, checkpoint)
    rows = QuantizedRows(np.ones((4, 8), np.int8), np.ones(4, np.float32), None)
    unfinished.write("w", rows)
    kept = unfinished.read("w", (4, 8), W8)
    assert kept is not None
    assert np.array_equal(kept.q, rows.q)
    (file,) = tmp_path.glob(".out.unfinished/*.npz")
    data = file.read_bytes()
    flipped = data.replace(bytes(rows.q), bytes([2]) + bytes(rows.q)[1:])
    file.write_bytes({"empty": b"", "cut": data[:60], "flipped": flipped, "other": b"x" * 50}[damage])
    assert unfinished.read("w", (4, 8), W8) is None


@pytest.mark.parametrize(
    ("shape", "scheme"), [((4, 9), W8), ((5, 8), W8), ((4, 8), W4)], ids=["columns", "rows", "groups"]
)
def test_arrays_of_another_weight_are_computed_again(shape: tuple[int, int], scheme: Scheme, tmp_path: Path) -> None:
    checkpoint: Any = SimpleNamespace(files=())
    unfinished = UnfinishedWeights(tmp_path / "out", {}, checkpoint)
    unfinished.write("w", QuantizedRows(np.ones((4, 8), np.int8), np.ones(4, np.float32), None))
    assert unfinished.read("w", (4, 8), W8) is not None
    assert unfinished.read("w", shape, scheme) is None


def test_arrays_of_other_types_are_computed_again(tmp_path: Path) -> None:
    checkpoint: Any = SimpleNamespace(files=())
    unfinished = UnfinishedWeights(tmp_path / "out", {}, checkpoint)
    wrong: Any = np.ones((4, 8), np.float32)
    unfinished.write("w", QuantizedRows(wrong, np.ones(4, np.float32), None))
    assert unfinished.read("w", (4, 8), W8) is None
