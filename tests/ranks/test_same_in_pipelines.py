"""The logits of one process and of a pipeline are equal bit for bit: families, schemes, KV types, steps in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.native import Model
from penstock.core.rank_layout import RankLayout
from penstock.graph.ir import KvLayout
from penstock.ops.table import LINEAR_SCHEMES
from tests.support.families import RANK_FAMILIES
from tests.support.marks import in_turn, mostly_long
from tests.support.rank_threads import OPTIONS, RankThreads, logits_of, steps, whole_logits, with_kv

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, RankLayout], list[Path]]
LAYOUTS = [RankLayout(pp=3), RankLayout(2, 2), RankLayout(pp=2), RankLayout(3, 2), RankLayout(4, 2), RankLayout(2, 3)]


def num_groups(path: Path) -> int:
    with Model.open(path) as model:
        return model.info.num_page_groups


@pytest.mark.parametrize("family", RANK_FAMILIES)
def test_families_match(family: str, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    path = bundle_of(family, "w8a8")
    batches = steps(num_groups(path))
    with RankThreads(parts_of(path, RankLayout(pp=2)), stage_ranks=1) as ranks:
        found = logits_of(ranks.program, batches)
    assert found == whole_logits(path, batches)
    assert not ranks.errors


@pytest.mark.parametrize(
    ("scheme", "layout"), in_turn(mostly_long(LINEAR_SCHEMES, "w8a8", "w4a8"), LAYOUTS, times=2), ids=str
)
def test_schemes_match(scheme: str, layout: RankLayout, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    """The network has two layers, so three stages divide one."""
    path = bundle_of("llama_head_dim", scheme)
    batches = steps(1)
    for kv in KvLayout:
        with RankThreads(parts_of(path, layout), with_kv(kv), stage_ranks=layout.tp) as ranks:
            assert logits_of(ranks.program, batches) == whole_logits(path, batches, with_kv(kv)), kv.name


@pytest.mark.parametrize("scheme", ["bf16", "w4a8"])
def test_threads_match(scheme: str, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    path = bundle_of("llama_biases", scheme)
    batches = steps(1)
    with RankThreads(parts_of(path, RankLayout(2, 2)), OPTIONS, num_threads=2, stage_ranks=2) as ranks:
        assert logits_of(ranks.program, batches) == whole_logits(path, batches)
