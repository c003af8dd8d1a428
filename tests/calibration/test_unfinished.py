"""Finished weights of a killed run: what is kept is read back, and a damaged file is computed again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.calibration.unfinished import UnfinishedWeights
from penstock.core.native import QuantizedRows


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other"])
def test_a_damaged_file_is_computed_again(damage: str, tmp_path: Path) -> None:
    checkpoint: Any = SimpleNamespace(files=())
    unfinished = UnfinishedWeights(tmp_path / "out", {}, checkpoint)
    rows = QuantizedRows(np.ones((4, 8), np.int8), np.ones(4, np.float32), None)
    unfinished.write("w", rows)
    kept = unfinished.read("w")
    assert kept is not None
    assert np.array_equal(kept.q, rows.q)
    (file,) = tmp_path.glob(".out.unfinished/*.npz")
    data = file.read_bytes()
    flipped = data.replace(bytes(rows.q), bytes([2]) + bytes(rows.q)[1:])
    file.write_bytes({"empty": b"", "cut": data[:60], "flipped": flipped, "other": b"x" * 50}[damage])
    assert unfinished.read("w") is None
