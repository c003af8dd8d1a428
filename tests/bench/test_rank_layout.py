"""What ``penstock plan`` says of ranks, against the bundles of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench import rank_layout
from penstock.bench.rank_layout import LinkProbe, RankParts, exchange_bytes, model_graph, predict
from penstock.core.native import Context, Model, ProgramOptions, plan
from penstock.core.rank_layout import RankLayout
from penstock.graph.export import export_bundle
from penstock.graph.ir import Graph
from penstock.graph.passes.pipeline import cut_rank
from penstock.graph.rank_bundle import write_rank_bundle
from tests.support.families import save

FAMILIES = ("llama_tied_one_kv_head", "gpt2", "mixtral")
LAYOUTS = (RankLayout(), RankLayout(3), RankLayout(2, 2), RankLayout(1, 1, 2), RankLayout(1, 2, 2))
OPTIONS = ProgramOptions(max_tokens=8, max_requests=1, max_rows=1, num_pages=8)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return model_graph(save("llama", tmp_path_factory.mktemp("plan") / "model"), "f32")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_is_that_of_a_ranks_bundle(family: str, tmp_path: Path) -> None:
    """Its weights exactly, also where layers lack a scheme's weights; its keys and values; for each layout."""
    whole = tmp_path / "whole.psm"
    folder = save(family, tmp_path / "model")
    export_bundle(folder, whole, scheme="w8a8")
    graph = model_graph(folder, "w8a8")
    for layout in LAYOUTS:
        for memory in RankParts(graph).memory(layout, context_len=256, kv_cache="f32"):
            part = tmp_path / f"{memory.rank}.psm"
            write_rank_bundle(whole, part, memory.rank, layout)
            with Model.open(part) as opened, Context(1) as context:
                exact = plan(opened, context, OPTIONS)
            assert (memory.weight_bytes, memory.kv_bytes) == (exact.weight_bytes, exact.kv_bytes), (layout, memory)
            assert memory.token_bytes <= 1.01 * (memory.weight_bytes + memory.kv_bytes)


def test_exchanges_are_those_of_a_ranks_graph(llama: Graph) -> None:
    sizes = exchange_bytes(cut_rank(llama, 0, RankLayout(2))[0])
    assert len(sizes) == 10
    assert sizes[0] == 4 * 160 // 2, "half a row of the table"
    assert sizes[-1] == 4 * 496, "the logits of a rank, cut between tiles"


def test_predictions_come_for_each_possible_layout(llama: Graph) -> None:
    layouts = [RankLayout(1), RankLayout(2), RankLayout(6), RankLayout(1, 2), RankLayout(2, 2), RankLayout(1, 1, 2)]
    rows = predict(RankParts(llama), [*layouts, RankLayout(1, 30)])
    layouts.remove(RankLayout(6))
    assert [row.layout for row in rows] == layouts, "five heads allow no six ranks, two layers no thirty stages"
    assert rows[0].exchange_ms == 0 < rows[1].exchange_ms < rows[1].token_ms
    assert [row.num_exchanges for row in rows[:3]] == [0, 10, 3]
    assert min(rows[3].num_exchanges, rows[4].num_exchanges) > 10
    assert rows[2].pipelined_ms > 0


def test_each_layout_is_cut_once(llama: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[tuple[int, RankLayout]] = []

    def counted(whole: Graph, rank: int, layout: RankLayout) -> tuple[Graph, object]:
        cuts.append((rank, layout))
        return cut_rank(whole, rank, layout)

    monkeypatch.setattr(rank_layout, "cut_rank", counted)
    parts = RankParts(llama)
    memory = parts.memory(RankLayout(2))
    assert predict(parts, [RankLayout(1), RankLayout(2)], links={2: LinkProbe(2, 1e-6, 1e-9)})[1].num_exchanges == 10
    assert parts.memory(RankLayout(2)) is memory
    assert len(parts.graphs(RankLayout(2))) == 2
    assert cuts == [(0, RankLayout(2)), (1, RankLayout(2)), (0, RankLayout(1))]


def test_a_longer_message_takes_no_less_time() -> None:
    link = LinkProbe(2)
    assert 0 < link.seconds(4096) <= link.seconds(1 << 20) < 1
