"""What ``penstock plan`` says of ranks, against the bundles of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench.rank_plan import LinkProbe, exchange_widths, predict, rank_memory
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.core.native import Context, Model, ProgramOptions, plan
from penstock.core.rank_layout import RankLayout
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.rank_bundle import write_rank_bundle
from penstock.graph.strategy import make_strategy
from penstock.sharding.source import open_whole
from tests.support.families import save

FAMILIES = ("llama", "llama_tied_one_kv_head", "llama_biases", "llama_head_dim", "qwen2", "qwen3_tied_head_dim")
OPTIONS = ProgramOptions(max_tokens=8, max_requests=1, max_rows=1, num_pages=8)


@pytest.mark.parametrize("scheme", ["f32", "bf16", "w8a8", "w4a16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_exchanges_are_those_of_a_ranks_bundle(family: str, scheme: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole.psm"
    folder = save(family, tmp_path / "model")
    export_bundle(folder, whole, scheme=scheme)
    if scheme.startswith("w"):
        quantize_checkpoint(folder, tmp_path / "quantized", scheme)
        folder = tmp_path / "quantized"
    model = open_whole(folder)
    for world in (1, 2, 3):
        strategy = make_strategy(model, world)
        for memory in rank_memory(model, strategy, scheme, context_len=256, kv_cache="f32"):
            part = tmp_path / f"{world}-{memory.rank}.psm"
            write_rank_bundle(whole, part, memory.rank, world)
            with Model.open(part) as opened, Context(1) as context:
                exact = plan(opened, context, OPTIONS)
            assert memory.weight_bytes == exact.weight_bytes
            assert memory.kv_bytes == exact.kv_bytes
        nodes = [node.op for node in read_graph(part)[0].nodes]
        count = nodes.count("all_gather") + nodes.count("sharded_embedding")
        assert world == 1 or len(exchange_widths(strategy)) == count


@pytest.mark.parametrize("layout", [RankLayout(1, 2), RankLayout(1, 3), RankLayout(2, 2)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_a_stages_bundle(family: str, layout: RankLayout, tmp_path: Path) -> None:
    whole = tmp_path / "whole.psm"
    folder = save(family, tmp_path / "model")
    export_bundle(folder, whole, scheme="w8a8")
    quantize_checkpoint(folder, tmp_path / "quantized", "w8a8")
    model = open_whole(tmp_path / "quantized")
    strategy = make_strategy(model, layout.tp)
    for memory in rank_memory(model, strategy, "w8a8", pp=layout.pp, context_len=256, kv_cache="f32"):
        part = tmp_path / f"{memory.rank}.psm"
        write_rank_bundle(whole, part, memory.rank, layout)
        with Model.open(part) as opened, Context(1) as context:
            exact = plan(opened, context, OPTIONS)
        assert (memory.weight_bytes, memory.kv_bytes) == (exact.weight_bytes, exact.kv_bytes), memory.rank


def test_predictions_come_for_each_possible_world(tmp_path: Path) -> None:
    model = open_whole(save("llama", tmp_path / "model"))
    rows = predict(model, "f32", (1, 2, 6))
    assert [row.world for row in rows] == [1, 2], "five heads allow no six ranks"
    assert rows[0].exchange_ms == 0 < rows[1].exchange_ms < rows[1].token_ms
    assert rows[1].num_exchanges == 10


def test_a_longer_message_takes_no_less_time() -> None:
    link = LinkProbe(2)
    assert 0 < link.seconds(4096) <= link.seconds(1 << 20) < 1
