"""Bundles of general networks that earlier releases wrote open for ever after, and answer as they did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core import native
from tests.golden.network_set import FOLDER, NetworkAnswer, answers_of

BUNDLES = sorted(FOLDER.glob("*/*.psm"))
golden = pytest.mark.parametrize("path", BUNDLES, ids=[f"{path.parent.name}-{path.stem}" for path in BUNDLES])


def expected_of(path: Path) -> list[list[NetworkAnswer]]:
    found: list[list[NetworkAnswer]] = json.loads((path.parent / "expected.json").read_text())[path.stem]
    return found


def test_none_is_lost() -> None:
    first = {"1.1-int8/int8.psm", "1.1-winograd/winograd.psm", "1.1/images.psm", "1.1/sequences.psm"}
    assert {f"{path.parent.name}/{path.name}" for path in BUNDLES} >= first


@golden
def test_outputs_bit_for_bit_on_every_level(path: Path) -> None:
    for level in (name for name, runs in native.cpu_levels() if runs):
        assert answers_of(path, level) == expected_of(path), level
