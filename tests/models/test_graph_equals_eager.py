"""The bundle of a checkpoint and its eager network give the same bits in every scheme; test_families.py has the
families."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from penstock.graph.export import export_bundle
from penstock.ops.table import LINEAR_SCHEMES
from penstock.runtime.eager import EagerProgram
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import run_whole
from tests.support.families import prompt, save
from tests.support.marks import mostly_long

_QUICK = (*((scheme, "f32") for scheme in LINEAR_SCHEMES), ("w8a8", "bf16"), ("w4a8", "int8"), ("w8a8", "int4"))
RECURRENT = ("qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "falcon_h1", "bamba", "nemotron_h", "lfm2")
SCHEMES_AND_LAYOUTS = mostly_long(product(LINEAR_SCHEMES, ("f32", "bf16", "int8", "int4")), *_QUICK)


def check(family: str, scheme: str, kv_layout: str, folder: Path) -> None:
    limits = ProgramLimits(128, 4, max_rows=128, num_pages=12, context_len=256, kv_layout=kv_layout)
    checkpoint = save(family, folder / family)
    export_bundle(checkpoint, folder / "model.psm", scheme=scheme)
    native, _ = NativeProgram.open(folder / "model.psm", threads=2, limits=limits)
    eager = EagerProgram(checkpoint, scheme=scheme, threads=1, limits=limits)
    try:
        assert native.info.page_windows == eager.info.page_windows
        assert (native.info.scheme, native.info.vocab_size) == (eager.info.scheme, eager.info.vocab_size)
        for num_tokens, chunk in ((1, None), (70, None), (70, 7)):
            token_ids = prompt(num_tokens)
            assert run_whole(native, token_ids, chunk).tobytes() == run_whole(eager, token_ids, chunk).tobytes()
    finally:
        native.close()
        eager.close()


@pytest.mark.parametrize(("scheme", "kv_layout"), SCHEMES_AND_LAYOUTS)
def test_graph_equals_eager_for_every_scheme(scheme: str, kv_layout: str, tmp_path: Path) -> None:
    check("qwen3_tied_head_dim", scheme, kv_layout, tmp_path)


@pytest.mark.parametrize("family", mostly_long(RECURRENT, "granitemoehybrid"))
def test_graph_equals_eager_with_recurrent_layers(family: str, tmp_path: Path) -> None:
    check(family, "w8a8", "f32", tmp_path)


@pytest.mark.parametrize("scheme", mostly_long(LINEAR_SCHEMES, "w4a8"))
def test_graph_equals_eager_untied_with_biases(scheme: str, tmp_path: Path) -> None:
    check("qwen2_windows", scheme, "f32", tmp_path)
