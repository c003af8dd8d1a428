"""Strategies: they cut as the pass over the graph does, and their reader names every bad field."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import ConfigReader
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.export import build_graph
from penstock.graph.ir import Graph
from penstock.graph.passes.shard import RowRanges, shard
from penstock.graph.rank_bundle import rows_by_tensor
from penstock.graph.strategy import make_strategy
from penstock.models.meta import construct_on_meta
from penstock.sharding.strategy import Strategy
from tests.support.errors import raises
from tests.support.families import RANK_FAMILIES, save
from tests.support.sharded_folders import DEMO, strategy_of


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("families")

    @cache
    def get(family: str) -> tuple[Path, Graph]:
        folder = save(family, base / family)
        checkpoint = Checkpoint.open(folder)
        return folder, build_graph(construct_on_meta(checkpoint.config), "f32", checkpoint.dtype)[0]

    return get


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("family", RANK_FAMILIES)
def test_a_strategy_cuts_as_the_graph_is_cut(family: str, world: int, graph_of: Any) -> None:
    folder, graph = graph_of(family)
    if world > Checkpoint.open(folder).config.int("num_attention_heads"):
        for make in (lambda: strategy_of(folder, world), lambda: shard(graph, 0, world)):
            with raises(InvalidArgumentError, param="tensor_parallel_size"):
                make()
        return
    strategy = strategy_of(folder, world)
    for rank in range(world):
        _, sources = shard(graph, rank, world)
        wanted: dict[str, RowRanges] = {}
        for name, ranges in sources.values():
            wanted |= rows_by_tensor(graph.weights[name], ranges)
        planned = {name: own.rows_of(rank) for name, own in strategy.parameters.items()}
        assert {name: rows for name, rows in wanted.items() if name in planned} == planned


def test_a_family_without_strategies_is_refused(tmp_path: Path) -> None:
    folder = save("gpt2", tmp_path / "gpt2")
    with raises(UnsupportedError, param="model_type"):
        strategy_of(folder, 2)


class Shapes:
    """A model of tensors without bytes: 4 attention heads, 2 key-value heads."""

    config = ConfigReader({"model_type": "x", "num_attention_heads": 4, "num_key_value_heads": 2})

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        names = {name.replace("__", "."): shape for name, shape in shapes.items()}
        self.tensors = {name: TensorInfo("f32", shape, "x", 0, 0) for name, shape in names.items()}

    def redundant_names(self) -> set[str]:
        return set()


def test_stacked_rows_are_cut_by_blocks() -> None:
    model = Shapes(a__qkv_proj__weight=(64, 8), a__qkv_proj__bias=(64,), a__gate_up_proj__weight=(96, 8))
    parameters = make_strategy(model, 2).parameters
    assert parameters["a.qkv_proj.weight"].ranges == (((0, 16), (32, 40), (48, 56)), ((16, 32), (40, 48), (56, 64)))
    assert parameters["a.qkv_proj.bias"].ranges == parameters["a.qkv_proj.weight"].ranges
    assert parameters["a.gate_up_proj.weight"].ranges == (((0, 16), (48, 64)), ((16, 48), (64, 96)))
    shared = make_strategy(model, 4).parameters["a.qkv_proj.weight"]
    assert shared.ranges[1] == ((8, 16), (32, 40), (48, 56)), "two ranks have the same key-value head"


def test_interleaved_rows_are_cut_by_head_groups() -> None:
    model = Shapes(a__query_key_value__weight=(64, 8))
    assert make_strategy(model, 2).parameters["a.query_key_value.weight"].ranges == (((0, 32),), ((32, 64),))
    shared = make_strategy(model, 4).parameters["a.query_key_value.weight"].ranges
    assert shared == (((0, 8), (16, 32)), ((8, 32),), ((32, 40), (48, 64)), ((40, 64),))


def test_heads_that_do_not_fit_name_the_tensor() -> None:
    with pytest.raises(InvalidFileError, match=r"'a.q_proj.weight': .* 4 attention heads"):
        make_strategy(Shapes(a__q_proj__weight=(63, 8)), 2)


def test_a_strategy_survives_its_file(tmp_path: Path) -> None:
    strategy = strategy_of(DEMO, 3)
    strategy.write(tmp_path / "s.json")
    assert Strategy.read(tmp_path / "s.json") == strategy
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), {"more": 1}, "'more' is not a field"),
        (("format",), "x", "format: expected 'penstock strategy'"),
        (("layout_version",), 2, "layout_version: expected 1, found 2"),
        (("model",), None, "model: expected an object"),
        (("model", "config_sha256"), "xyz", "model: config_sha256: expected 64 hexadecimal digits"),
        (("world", "tp"), 0, "world: tp: expected an integer from 1 to 64"),
        (("world", "tp"), 3, "ranges: expected a list for each of 3 ranks"),
        (("world", "pp"), 2, "world: pp: expected 1, found 2"),
        (("world", "dp"), 2, "'dp' is not a field"),
        (("parameters",), {}, "parameters: expected 1 to"),
        (("parameters", Q, "cut"), "columns", f"parameters: '{Q}': cut: expected one of rows"),
        (("parameters", Q, "shape"), [-1], f"parameters: '{Q}': shape: expected a list"),
        (("parameters", Q, "ranges"), [[[0, 128]]], f"'{Q}': ranges: expected a list for each of 2 ranks"),
        (("parameters", Q, "ranges"), [[[0, 128]], []], "for rank 1, found"),
        (("parameters", Q, "ranges"), [[[0, 128]], [[129, 256]]], "no rank has row 128"),
        (("parameters", Q, "ranges"), [[[0, 128]], [[128, 255]]], "no rank has row 255"),
        (("parameters", Q, "ranges"), [[[0, 128]], [[128, 257]]], "of rows 0 to 256"),
        (("parameters", Q, "ranges"), [[[0, 64], [32, 128]], [[128, 256]]], "that ascend, for rank 0"),
        (("parameters", Q, "ranges"), [[[0, True]], [[0, 256]]], "that ascend, for rank 0"),
        (("parameters", Q), {"dtype": "f32", "shape": [1], "cut": "owner", "rank": 2}, "rank: expected an integer"),
        (("parameters", Q), {"dtype": "f32", "shape": [1], "cut": "same", "name": "x"}, "name: expected a stored"),
        (("parameters", Q), {"dtype": "f32", "shape": [1], "cut": "replicated", "rank": 0}, "'rank' is not a field"),
        (("parameters", Q), {"dtype": "f32", "shape": [], "cut": "rows", "ranges": []}, "at least one dimension"),
    ],
)
def test_bad_fields_are_named(path: tuple[str, ...], value: Any, message: str) -> None:
    values = json.loads(strategy_of(DEMO, 2).to_json())
    target = values
    for key in path[:-1]:
        target = target[key]
    if path:
        target[path[-1]] = value
    else:
        values |= value
    with pytest.raises(PenstockError) as raised:
        Strategy.parse(json.dumps(values).encode(), "s.json")
    assert message in str(raised.value)
    assert str(raised.value).startswith("s.json")
    assert "\n" not in str(raised.value)


def test_a_strategy_of_another_model_is_refused() -> None:
    strategy, checkpoint = strategy_of(DEMO, 2), Checkpoint.open(DEMO)
    other = ConfigReader(checkpoint.config.values | {"vocab_size": 1})
    with raises(InvalidArgumentError, param="strategy", match=r"model\.config_sha256"):
        strategy.check_model(other, checkpoint.tensors, "m")
    fewer = {name: info for name, info in checkpoint.tensors.items() if name != Q}
    with pytest.raises(InvalidArgumentError, match=f"'{Q}' is named"):
        strategy.check_model(checkpoint.config, fewer, "m")
