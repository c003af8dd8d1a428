"""What a killed run leaves: finished weights are read back or computed again, and other runs do not remove them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.calibration.unfinished import ROTATED, UnfinishedWeights, Workspace, resumable_output
from penstock.checkpoint.folder import Checkpoint
from penstock.core.native import QuantizedRows
from penstock.errors import FileAccessError
from penstock.quant.scheme import Scheme, find_scheme
from tests.support.checkpoint_folders import write_folder
from tests.support.errors import raises

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


def keep_weight(final: Path, checkpoint: Checkpoint) -> None:
    rows = QuantizedRows(np.ones((4, 8), np.int8), np.ones(4, np.float32), None)
    UnfinishedWeights(final, {}, checkpoint).write("w", rows)


def test_a_second_run_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    final, kept = tmp_path / "out", list[Path]()
    with resumable_output(final, kept.append):
        keep_weight(final, Checkpoint.open(write_folder(tmp_path / "model")))
        with raises(FileAccessError, param="out", code="locked"), resumable_output(final, kept.append):
            pytest.fail("the second run began")
        assert (tmp_path / ".out.unfinished").is_dir()
        with resumable_output(tmp_path / "other", kept.append):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with resumable_output(final, kept.append):
        pass
    assert kept == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
@pytest.mark.parametrize(
    ("source", "expected"),
    [(None, []), ("rotated", [".out.rotated", ".out.unfinished"]), ("model", [".out.unfinished"])],
    ids=["nothing_finished", "weights_of_it", "weights_of_another_source"],
)
def test_a_rotated_copy_stays_only_for_finished_weights(
    source: str | None, expected: list[str], error: type[BaseException], tmp_path: Path
) -> None:
    final, kept = tmp_path / "out", list[Path]()
    model = Checkpoint.open(write_folder(tmp_path / "model"))

    def run() -> None:
        work = Workspace(final, {"rotate": "r1"}, model, ROTATED)
        rotated = Checkpoint.open(write_folder(work.rotated))
        Workspace(final, {}, rotated)  # measurements that have only begun
        if source is not None:
            keep_weight(final, rotated if source == "rotated" else model)
        raise error

    with pytest.raises(error), resumable_output(final, kept.append):
        run()
    assert sorted(path.name for path in tmp_path.iterdir()) == [*expected, "model"]
    assert sorted(path.name for path in kept) == expected
