"""The committed demo bundle is what export makes of the committed demo model."""

from __future__ import annotations

from pathlib import Path

from penstock.graph.export import export_bundle

DEMO = Path(__file__).parents[2] / "demo"


def test_export_makes_the_demo_bundle_again_byte_for_byte(tmp_path: Path) -> None:
    """After a change of format, passes or packing: ``penstock export demo/model demo/demo.psm --scheme w8a8``."""
    export_bundle(DEMO / "model", tmp_path / "demo.psm", scheme="w8a8")
    assert (tmp_path / "demo.psm").read_bytes() == (DEMO / "demo.psm").read_bytes()


def test_the_demo_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 40_000_000
