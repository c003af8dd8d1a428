"""How graphs and weights are cut: heads, rows, and networks that use values in unusual ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from penstock.config import ConfigReader
from penstock.core.layouts import BLOCKS
from penstock.core.native import Context, layout_bytes
from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.ir import Layout, Weight
from penstock.graph.passes.cut import cut_evenly, cut_heads
from penstock.graph.rank_bundle import take_rows
from penstock.models.registry import load_network_script
from tests.support.errors import raises
from tests.support.gguf_blocks import random_blocks
from tests.support.my_network import CONFIG, SCRIPT
from tests.support.rank_threads import RankThreads, logits_of, steps, whole_logits

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, int], list[Path]]
TILES = [layout for layout in Layout if layout.name.startswith("T16")]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world", "q", "kv"),
    [
        (8, 8, 3, [(0, 2), (2, 5), (5, 8)], [(0, 2), (2, 5), (5, 8)]),
        (8, 4, 2, [(0, 4), (4, 8)], [(0, 2), (2, 4)]),
        (8, 2, 3, [(0, 4), (4, 6), (6, 8)], [(0, 1), (1, 2), (1, 2)]),
        (8, 1, 3, [(0, 2), (2, 5), (5, 8)], [(0, 1)] * 3),
        (6, 2, 6, [(i, i + 1) for i in range(6)], [(0, 1)] * 3 + [(1, 2)] * 3),
    ],
)
def test_ranks_get_whole_groups_of_heads_or_share_one(heads: int, kv_heads: int, world: int, q: list, kv: list) -> None:
    found_q, found_kv = cut_heads(heads, kv_heads, world)
    assert (list(found_q.ranges), list(found_kv.ranges)) == (q, kv)


@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(4, 4, 5), (4, 2, 5), (6, 2, 7), (1, 1, 2)])
def test_more_ranks_than_heads_are_refused(heads: int, kv_heads: int, world: int) -> None:
    with raises(InvalidArgumentError, param="tensor_parallel_size"):
        cut_heads(heads, kv_heads, world)


def test_cuts_lie_between_tiles_where_there_are_enough() -> None:
    assert [cut_evenly(size, world, unit) and cut_evenly(size, world, unit).starts for size, world, unit in (
        (704, 4, 1), (100, 3, 1), (20, 3, 1), (2, 3, 1), (120, 3, 24), (96, 2, 8),
    )] == ["0|176|352|528|704", "0|32|64|100", "0|6|13|20", None, "0|24|72|120", "0|48|96"]  # fmt: skip


@pytest.mark.parametrize("layout", TILES, ids=lambda layout: layout.name)
@pytest.mark.parametrize("ranges", [((0, 32),), ((32, 53),), ((0, 16), (32, 53)), ((3, 20), (41, 53)), ((1, 2),)])
def test_rows_of_tiles_keep_their_values(layout: Layout, ranges: tuple[tuple[int, int], ...]) -> None:
    """And their bytes: a part equals what packing its rows gives."""
    rows, in_blocks = 53, layout in BLOCKS
    cols = 512 if in_blocks else 70
    values = np.random.default_rng(3).standard_normal((rows, cols), np.float32)
    if in_blocks:
        values = random_blocks(layout.name.removeprefix("T16_").lower(), rows, cols)

    def packed(context: Context, matrix: np.ndarray) -> np.ndarray:
        data = np.zeros(layout_bytes(layout, len(matrix), cols), np.uint8)
        source = np.ascontiguousarray(matrix)
        if in_blocks:
            context.pack_blocks(layout, len(matrix), cols, 0, len(matrix), source, data)
        else:
            context.pack(layout, len(matrix), cols, 0, len(matrix), 1, source, data)
        return data

    with Context(1) as context:
        whole = packed(context, values)
        part = take_rows(Weight("w", rows, cols, layout, ()), whole, ranges)
        assert part.tobytes() == packed(context, np.concatenate([values[a:b] for a, b in ranges])).tobytes()


def test_the_parts_of_a_bundle_make_up_the_whole(bundle_of: BundleOf, parts_of: PartsOf) -> None:
    """Every row of every linear is on one rank, and every rank has its states and its norms."""
    whole, _ = read_graph(bundle_of("qwen3", "w4a8"))
    parts = [read_graph(path)[0] for path in parts_of(bundle_of("qwen3", "w4a8"), 3)]
    for name, weight in whole.weights.items():
        if weight.rows > 1:
            assert sum(part.weights[name].rows for part in parts) == weight.rows
        else:
            assert {part.weights[name].cols for part in parts} == {weight.cols}
    for name, state in whole.states.items():
        assert sum(part.states[name].num_kv_heads for part in parts) == state.num_kv_heads
    assert [part.properties["rank"] for part in parts] == ["0", "1", "2"]
    exchanges = [[node.name for node in part.nodes if node.op == "all_gather"] for part in parts]
    assert len(exchanges[0]) == 4 * 2 + 1
    assert exchanges[0] == exchanges[1] == exchanges[2]


ODD_BLOCK = """
    def forward(self, x: Tensor, batch: nn.Batch) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q = self.norm2(q)  # over all heads
        y = self.attention(q, k, v, batch)
        x = x + self.out(y + v) * y  # parts with parts, and parts with whole rows
        h = self.up(x)
        x = x + h[:, 5 : 5 + x.shape[1]]  # columns of several ranks
        return x + self.down(nn.gelu(h, "tanh")) + self.norm1(self.out(x))
"""


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "encoder", "odd"])
def test_networks_of_users_match(kind: str, world: int, tmp_path: Path, parts_of: PartsOf) -> None:
    source = SCRIPT.read_text()
    if kind == "encoder":
        source = source.replace("config.width // config.num_heads)", "config.width // config.num_heads, causal=False)")
    if kind == "odd":
        begin, end = source.index("    def forward(self, x: Tensor, batch"), source.index("\n\nclass Net")
        source = source[:begin] + ODD_BLOCK.lstrip("\n") + source[end:]
    script = tmp_path / f"{kind}_{world}.py"
    script.write_text(source)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    definition = load_network_script(f"{script}:Net")
    network = definition.Network(definition.Config.read(ConfigReader(CONFIG)))
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: (0.2 * torch.randn(p.shape, generator=generator)).numpy() for name, p in network.named_parameters()},
        tmp_path / "model.safetensors",
    )
    path = tmp_path / f"{kind}-{world}.psm"
    export_bundle(tmp_path, path, scheme="f32", network=f"{script}:Net")
    batches = steps(1, 103)
    if kind == "encoder":  # its prompts run whole
        batches = [batches[0]]
    with RankThreads(parts_of(path, world)) as ranks:
        assert logits_of(ranks.program, batches) == whole_logits(path, batches)


@pytest.mark.parametrize(
    ("family", "layers"),
    [("mixtral", {"w1": 72, "w2": 160, "w3": 72}), ("gpt_oss", {"gate_up_proj": 192, "down_proj": 160})],
)
def test_each_rank_has_rows_of_every_expert(
    family: str, layers: dict[str, int], bundle_of: BundleOf, parts_of: PartsOf
) -> None:
    """Every linear of the experts is cut, with its bias; the sums over slots have the bits of one process."""
    path = bundle_of(family, "w4a8")
    graphs = [read_graph(part)[0] for part in parts_of(path, 3)]
    whole = read_graph(path)[0]
    for node in whole.nodes:
        if node.op != "expert_linear":
            continue
        own = [next(other for other in graph.nodes if other.name == node.name) for graph in graphs]
        sizes = [int(other.attrs["out_features"]) for other in own]
        assert sum(sizes) == layers[node.name.rpartition(".")[2]]
        assert min(sizes) > 0
        if node.inputs[3].kind == "weight":
            biases = [graph.weights[other.inputs[3].name] for graph, other in zip(graphs, own, strict=True)]
            assert [(bias.rows, bias.cols) for bias in biases] == [(6, size) for size in sizes]
    num_gathers = sum(node.op == "all_gather" for node in graphs[0].nodes)
    num_layers = sum(node.op == "combine" for node in whole.nodes)
    assert num_gathers == 4 * num_layers + 1, "attention, o_proj, what down reads, sums; logits"
    batches = steps(len(whole.page_groups))
    with RankThreads(parts_of(path, 3), num_threads=2) as ranks:
        assert logits_of(ranks.program, batches) == whole_logits(path, batches)
