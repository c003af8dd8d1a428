"""The logits of one process and of several ranks are equal bit for bit: families, schemes, KV types, threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.native import Model
from penstock.graph.ir import KvLayout
from penstock.ops.table import LINEAR_SCHEMES
from tests.support.families import RANK_FAMILIES
from tests.support.marks import in_turn, mostly_long
from tests.support.rank_threads import OPTIONS, RankThreads, logits_of, steps, whole_logits, with_kv

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, int], list[Path]]
QUICK_SCHEMES = ("bf16", "w8a8", "w4a8")
WORLDS = (3, 4, 2)


def num_groups(path: Path) -> int:
    with Model.open(path) as model:
        return model.info.num_page_groups


@pytest.mark.parametrize(("family", "world"), [("llama_head_dim", 1), *in_turn(RANK_FAMILIES, WORLDS)])
def test_families_match(family: str, world: int, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    path = bundle_of(family, "w8a8")
    batches = steps(num_groups(path))
    with RankThreads(parts_of(path, world)) as ranks:
        found = logits_of(ranks.program, batches)
    assert found == whole_logits(path, batches)
    assert not ranks.errors


@pytest.mark.parametrize(("scheme", "world"), in_turn(mostly_long(LINEAR_SCHEMES, *QUICK_SCHEMES), WORLDS, times=2))
def test_schemes_match(scheme: str, world: int, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    """Heads of 24 dimensions, so that ranks begin inside a tile of 16 rows; one KV head for two ranks of four."""
    path = bundle_of("llama_head_dim", scheme)
    batches = steps(1)
    for kv in KvLayout:
        with RankThreads(parts_of(path, world), with_kv(kv)) as ranks:
            assert logits_of(ranks.program, batches) == whole_logits(path, batches, with_kv(kv)), kv.name


@pytest.mark.long
@pytest.mark.parametrize(("scheme", "family"), in_turn(LINEAR_SCHEMES, ["mixtral", "gpt_oss", "qwen2_moe"]))
def test_experts_match(family: str, scheme: str, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    """Experts whose parts begin inside a tile of 16 rows, with biases, and beside a shared expert with a gate."""
    path = bundle_of(family, scheme)
    batches = steps(num_groups(path))
    for world in WORLDS:
        with RankThreads(parts_of(path, world)) as ranks:
            assert logits_of(ranks.program, batches) == whole_logits(path, batches), world


@pytest.mark.parametrize("scheme", mostly_long(LINEAR_SCHEMES, *QUICK_SCHEMES))
@pytest.mark.parametrize("family", mostly_long(["qwen3_tied_head_dim", "llama_biases"], "llama_biases"))
def test_threads_match(family: str, scheme: str, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    """Two threads a rank, against one thread of one process."""
    path = bundle_of(family, scheme)
    batches = steps(1)
    with RankThreads(parts_of(path, 2), OPTIONS, num_threads=2) as ranks:
        assert logits_of(ranks.program, batches) == whole_logits(path, batches)
