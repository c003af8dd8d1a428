"""What a scheme costs in quality, on the beginning of text that the demo model never saw: no more than it did."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.perplexity import ROOT, measure
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
