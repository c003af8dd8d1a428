"""The table of families in the documents has every family, and the figures of the networks that the tests run."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock.models.families import built_in_families, family_modules
from tests.support.families import FAMILIES
from tests.support.own_references import OWN_REFERENCES

pytestmark = pytest.mark.usefixtures("generator")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "generate", raising=False)


def test_each_file_with_a_network_is_registered() -> None:
    source = DOCS.parent / "src" / "penstock" / "models"
    names = {f"penstock.models.{path.parent.name}.{path.stem}" for path in source.glob("*/*.py")}
    networks = {name for name in names if hasattr(importlib.import_module(name), "Network")}
    assert networks == set(family_modules().values())


def test_measured_are_the_networks_of_the_tests() -> None:
    from generate.families import results

    measured = results()
    assert {name: row["networks"] for name, row in measured.items()} == Counter(row[0] for row in FAMILIES.values())
    assert len(measured) >= 30
    for name, row in measured.items():
        assert 0 < row["error"] < 1e-4
        assert (row["reference"] == "PyTorch") == (name in OWN_REFERENCES)


def test_the_page_names_every_family() -> None:
    from generate.families import pages

    (text,) = pages().values()
    assert all(f"`{name}`" in text for name in built_in_families())
    assert "| `qwen3_next` |  | `qwen3next` |" in text  # the architecture of its GGUF files
