"""Weights in blocks have the logits of one process on several ranks, bit for bit: schemes of GGUF files and of AWQ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import Model
from penstock.core.rank_layout import RankLayout
from penstock.graph.export import export_bundle
from penstock.ops.table import BLOCK_SCHEMES
from tests.support.gguf_blocks import UNWRITABLE, write_demo
from tests.support.marks import in_turn, mostly_long
from tests.support.quantized_folders import NVFP4, awq_layer, float4_layer, write_folders
from tests.support.rank_threads import RankThreads, logits_of, steps, whole_logits

LAYOUTS = [RankLayout(2), RankLayout(pp=2), RankLayout(3), RankLayout(2, 2)]
VOCAB_SIZE = 160
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def write_bundle(folder: Path, scheme: str) -> Path:
    """Write a whole bundle with a scheme that float weights cannot have."""
    rng = np.random.default_rng(5)
    if scheme == "uint4":
        source, _ = write_folders(folder / "awq", AWQ, lambda rows, cols: awq_layer(rng, rows, cols))
    elif scheme == "nvfp4":
        source, _ = write_folders(folder / "modelopt", NVFP4, lambda rows, cols: float4_layer(rng, rows, cols))
    else:
        source = folder / f"{scheme}.gguf"
        write_demo(source, lambda name: "q8_0" if "ffn_down" in name else scheme)  # its 704 columns are no whole blocks
    export_bundle(source, folder / f"{scheme}.psm")
    return folder / f"{scheme}.psm"


WRITABLE = [scheme for scheme in BLOCK_SCHEMES if scheme not in UNWRITABLE]


@pytest.mark.parametrize(
    ("scheme", "layout"), in_turn(mostly_long(WRITABLE, "q4_k", "uint4", "tq1_0"), LAYOUTS, times=2), ids=str
)
def test_block_schemes_match(
    scheme: str, layout: RankLayout, tmp_path: Path, parts_of: Callable[[Path, RankLayout], list[Path]]
) -> None:
    path = write_bundle(tmp_path, scheme)
    batches = [replace(batch, token_ids=batch.token_ids % VOCAB_SIZE) for batch in steps(1)]
    with RankThreads(parts_of(path, layout), stage_ranks=layout.tp if layout.pp > 1 else 0) as ranks:
        found = logits_of(ranks.program, batches)
    assert found == whole_logits(path, batches)
    assert not ranks.errors
    with Model.open(path) as model:
        assert model.info.scheme == scheme
