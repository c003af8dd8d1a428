"""What a scheme costs in quality, on the beginning of text that the demo model never saw: no more than it did."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.perplexity import ROOT, measure
from penstock.checkpoint.convert import Conversion
from penstock.runtime.convert import convert
from tests.support.marks import mostly_exhaustive

WAS = {"f32": 9.667, "f16": 9.667, "bf16": 9.667, "w8a16": 9.668, "w8a8": 9.676, "w4a16": 9.739, "w4a8": 9.748}
"""The whole text is in docs/guides/quantization.md (``make perplexity``)."""
SLACK = 1.001  # bf16 keys and values round a little differently where the processor has dot products of bf16


LONG = ("bf16", "w8a8", "w4a16", "w4a8")
"""The schemes of the long tests: those that round something of their own."""


@pytest.mark.long
@pytest.mark.parametrize("scheme", mostly_exhaustive(WAS, LONG, ()))
def test_perplexity_is_what_it_was_or_better(scheme: str) -> None:
    """Groups of 4 bit have the line of least error; with plain rounding this was 9.779."""
    folder = ROOT / "demo/model"
    args = Namespace(
        model=folder, text=folder / "valid.txt", window=512, windows=24, mode="graph", threads=2, kv_cache="auto"
    )
    perplexity, count, _ = measure(args, scheme)
    assert count == 24 * 512
    assert WAS[scheme] / 1.02 < perplexity < WAS[scheme] * SLACK


@pytest.mark.long
@pytest.mark.parametrize("blocks", ["q8_0", "q4_k", "q6_k"])
def test_a_gguf_file_has_the_perplexity_of_its_values(tmp_path: Path, blocks: str) -> None:
    """The file's own precision differs from its values in f32 by what rounding activations to int8 costs."""
    folder, file = ROOT / "demo/model", tmp_path / "demo.gguf"
    convert(folder, file, Conversion(dtype=blocks))
    args = Namespace(
        model=file, text=folder / "valid.txt", window=512, windows=8, mode="graph", threads=2, kv_cache="f32"
    )
    own, exact = measure(args, None)[0], measure(args, "f32")[0]
    assert own == pytest.approx(exact, rel=0.002)
    assert own != exact
