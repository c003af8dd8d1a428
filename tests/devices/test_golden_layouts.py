"""Files with the newest layouts of weights, once written, open for ever after and answer as they did, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core import native
from penstock.graph.bundle import read_graph
from tests.golden.layout_set import FOLDER, SCHEMES, crc_of_bundle, crc_of_folder

LEVELS = [name for name, runs in native.cpu_levels() if runs]
SETS = sorted(path.parent for path in FOLDER.glob("*/expected.json"))
golden = pytest.mark.parametrize("folder", SETS, ids=[folder.name for folder in SETS])


def expected_of(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "expected.json").read_text())
    return found


def test_none_is_lost() -> None:
    assert "1.0" in [folder.name for folder in SETS]
    graph, _ = read_graph(FOLDER / "1.0/layouts.psm")
    assert {node.attrs["scheme"] for node in graph.nodes if node.op == "linear"} == {*SCHEMES, "f32"}


@golden
def test_a_bundle_of_every_layout_on_every_level(folder: Path) -> None:
    for level in LEVELS:
        assert crc_of_bundle(folder / "layouts.psm", level) == expected_of(folder)["layouts"], level


@golden
@pytest.mark.parametrize("scheme", ["w8a8_h32", "w4a8_h32"])
def test_rotated_folders_on_every_level(folder: Path, scheme: str, tmp_path: Path) -> None:
    for level in LEVELS:
        assert crc_of_folder(folder / scheme, tmp_path / "out.psm", level) == expected_of(folder)[scheme], level
