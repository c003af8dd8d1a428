"""Models of a group hold equal weights once, whatever the files are called."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path

import numpy as np
import pytest

from penstock import lite
from penstock.core.metadata import read_metadata, stamp_of, stored_segments
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.replace_tail import replace_tail
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, IDS, ask, build


def held_bytes(path: Path) -> int:
    """Bytes of a file that this process has in memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_bundles_with_equal_weights_hold_them_once(tmp_path: Path) -> None:
    """A copy, and one that ends in ids: three files, in memory once.  Without a group each is there."""
    copy, tail = tmp_path / "copy.psm", tmp_path / "tail.psm"
    shutil.copy(BUNDLE, copy)
    replace_tail(BUNDLE, tail, "argmax")
    apart = [build(path) for path in (copy, tail)]
    expected = [ask(model, [IDS]) for model in apart]
    weights = apart[0].get_model_info("weight_bytes")
    assert all(held_bytes(path) > 0.9 * weights for path in (copy, tail))
    for model in apart:
        model.close()
    group = lite.ModelGroup()
    models = [build(BUNDLE), lite.Model(), lite.Model()]
    group.add_model(models)
    for model, path in zip(models[1:], (copy, tail), strict=True):
        model.build_from_file(path, lite.ModelType.PENSTOCK)
    assert group.shared_bytes > 2 * 0.99 * weights
    found = [ask(model, [IDS]) for model in models[1:]]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert held_bytes(copy) + held_bytes(tail) < 0.05 * weights
    assert held_bytes(BUNDLE) > 0.9 * weights
    models[0].close()  # the others keep what they share
    assert np.array_equal(ask(models[1], [IDS]), expected[0])
    for model in models:
        model.close()


def test_different_weights_are_not_shared(tmp_path: Path) -> None:
    """Half of the weights are others: the rest is shared, and each computes its own."""
    changed = tmp_path / "changed.psm"
    data = bytearray(BUNDLE.read_bytes())
    offset, size = stored_segments(read_metadata(BUNDLE, stamp_of(BUNDLE.stat())))["weights"]
    middle = offset + size // 2
    for at in range(middle, offset + size - 4096, 4096):
        data[at + 999] ^= 1
    changed.write_bytes(data)
    with build(changed) as alone:
        expected = ask(alone, [IDS])
    group = lite.ModelGroup()
    with build() as first, build(changed) as second:
        group.add_model(first)
        group.add_model(second)
        assert 0.45 * size < group.shared_bytes < 0.55 * size
        assert np.array_equal(ask(second, [IDS]), expected)
        assert not np.array_equal(ask(first, [IDS]), expected)


def test_wrong_arguments_are_refused() -> None:
    group = lite.ModelGroup()
    with raises(InvalidArgumentError, param="add_model"):
        group.add_model(["demo.psm"])  # type: ignore[list-item]
    with build() as model, build(weights="huge") as huge:
        group.add_model(model)
        with raises(InvalidArgumentError, param="add_model"):
            lite.ModelGroup().add_model(model)
        with raises(UnsupportedError, param="add_model", match="private copy"):
            group.add_model(huge)


def test_a_model_that_cannot_share_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy.psm"
    shutil.copy(BUNDLE, copy)
    group = lite.ModelGroup()
    with build() as first, build(copy) as second:
        group.add_model([first, second])
        shared, expected = group.shared_bytes, ask(second, [IDS])
        assert shared > 0
        with raises(UnsupportedError, param="add_model", match="private copy"):
            second.build_from_file(BUNDLE, lite.ModelType.PENSTOCK, None, {"weights": "huge"})
        assert second.get_model_info("model_path") == str(copy)
        assert np.array_equal(ask(second, [IDS]), expected)
        assert group.shared_bytes == shared


def test_shared_bytes_count_once_for_each_model(tmp_path: Path) -> None:
    copy = tmp_path / "copy.psm"
    shutil.copy(BUNDLE, copy)
    group = lite.ModelGroup()
    with build() as first, build(copy) as second:
        group.add_model([first, second])
        shared = group.shared_bytes
        assert shared > 0
        second.build_from_file(copy, lite.ModelType.PENSTOCK)
        assert group.shared_bytes == shared
        second.update_weights([lite.Tensor(np.ones(256, np.float32), name="model.norm.weight")])
        assert group.shared_bytes == 0  # it has a copy of its own now


@pytest.mark.parametrize("page_bytes", [16384, 65536])
def test_segments_within_a_page_are_not_shared(
    page_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.psm"
    shutil.copy(BUNDLE, copy)
    assert stored_segments(read_metadata(BUNDLE, stamp_of(BUNDLE.stat())))["weights"][0] % page_bytes
    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    group = lite.ModelGroup()
    with build() as first, build(copy) as second:
        group.add_model([first, second])
        assert group.shared_bytes == 0
        assert np.array_equal(ask(first, [IDS]), ask(second, [IDS]))
