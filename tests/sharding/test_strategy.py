"""Strategies: they cut as the pass over the graph does, and their reader names every bad field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.sources import Source
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import ConfigReader
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.rank_bundle import write_rank_bundle
from penstock.graph.strategy import capture_model, make_strategy
from penstock.models.registry import load_network_script
from penstock.sharding.folder import WEIGHTS
from penstock.sharding.parts import select_rows
from penstock.sharding.source import PlainFolder, open_whole
from penstock.sharding.strategy import Strategy
from penstock.sharding.write import merge_folder, shard_folder
from tests.support.errors import raises
from tests.support.families import save
from tests.support.marks import in_turn, mostly_long
from tests.support.my_network import CONFIG, SCRIPT
from tests.support.sharded_folders import DEMO, strategy_of

LAYOUTS = [RankLayout(), RankLayout(2), RankLayout(1, 2), RankLayout(2, 3), RankLayout(1, 1, 3), RankLayout(2, 2, 2)]
CUTS = [RankLayout(3), RankLayout(1, 1, 3), RankLayout(2, 2)]
STORED = (
    *("llama_tied_one_kv_head", "phi3_partial_window", "gpt2", "falcon_new", "bloom", "gemma2", "olmo2", "mixtral"),
    *("granitemoe", "gpt_oss", "lfm2", "falcon_h1", "granitemoehybrid", "nemotron_h", "qwen3_next"),
    *("minicpm3", "deepseek_v2", "deepseek_v3"),
)
"""Own names, fused rows in all forms, transposed matrices, sums, whole norms, experts, also stacked and with biases,
recurrent layers of each kind, and latents, whose keys are the transposed rows of each head."""


@pytest.mark.parametrize(("family", "layout"), in_turn(mostly_long(STORED, "gpt2"), CUTS), ids=str)
def test_the_parts_of_ranks_are_the_rows_that_they_compute_with(
    family: str, layout: RankLayout, tmp_path: Path
) -> None:
    """Each rank's bundle is made from its part alone, and merging gives the folder back."""
    folder, cut = save(family, tmp_path / "source"), tmp_path / "cut"
    whole = tmp_path / "whole.psm"
    export_bundle(folder, whole, scheme="f32")
    shard_folder(folder, cut, strategy_of(folder, layout))
    merge_folder(cut, cut / "merged")
    assert (cut / "merged" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert sorted(path.name for path in cut.glob("rank_*")) == [f"rank_{rank}" for rank in range(layout.world)]
    for rank in range(layout.world):
        export_bundle(cut, tmp_path / "part.psm", rank=rank)
        write_rank_bundle(whole, tmp_path / "cut.psm", rank, layout)
        assert weights_of(tmp_path / "part.psm") == weights_of(tmp_path / "cut.psm"), rank


def test_transposed_rows_are_selected_by_column() -> None:
    """A parameter [2 heads x 5, 3]: for each head the transpose of some rows of a tensor [12, 5]."""
    heads = [Source("fused", ((start, start + 3),), rows_transposed=True) for start in (0, 6)]
    first, second = (replace(head, columns=(columns,)) for head, columns in zip(heads, ((3, 5), (0, 5)), strict=True))
    assert select_rows(heads, ((3, 10),), lambda piece: 5) == (first, second)
    split = select_rows(heads, ((5, 6), (8, 10)), lambda piece: 5)
    assert split == (replace(heads[1], columns=((0, 1), (3, 5))),)
    assert select_rows(split, ((1, 2),), lambda piece: 5) == (replace(heads[1], columns=((3, 4),)),)


def weights_of(path: Path) -> bytes:
    segment = next(segment for segment in read_graph(path)[1] if segment.name == "weights")
    return path.read_bytes()[segment.offset : segment.offset + segment.num_bytes]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_tensor_is_on_the_ranks_that_need_it(layout: RankLayout) -> None:
    strategy = strategy_of(DEMO, layout)
    assert strategy.world == layout.world
    if layout.pp > 1:
        assert strategy.shapes_of(0) == {}, "the coordinator has no layers"
    for name, own in strategy.parameters.items():
        sizes = [shape[0] for rank in range(layout.world) if (shape := own.shape_of(rank, layout))]
        if own.cut == "rows":
            assert sum(sizes) == own.shape[0] * len(own.stages), name
        else:
            assert (own.cut, sizes) == ("replicated", [own.shape[0]] * len(own.stages) * layout.stage_ranks), name
    table = strategy.parameters["model.embed_tokens.weight"]
    assert table.stages == ((0,) if layout.pp == 1 else (0, layout.pp - 1)), "the tied head is on the last stage"


def test_ranks_with_the_same_key_value_head_have_its_rows(tmp_path: Path) -> None:
    own = strategy_of(save("phi3", tmp_path / "phi3"), 2).parameters["model.layers.0.self_attn.qkv_proj.weight"]
    assert own.ranges == (((0, 64), (160, 224)), ((64, 224),))


def test_more_ranks_than_heads_are_refused() -> None:
    with raises(InvalidArgumentError, param="tensor_parallel_size", match="at most 4 ranks"):
        strategy_of(DEMO, 5)
    with raises(InvalidArgumentError, param="pipeline_parallel_size", match="at most"):
        strategy_of(DEMO, RankLayout(1, 40))


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"model.norm.weight": None}, "lacks tensor"),
        ({"extra": (3,)}, "which network llama does not read"),
        ({"model.layers.0.mlp.up_proj.weight": (7, 256)}, r"shape: expected 704 rows, got \[7, 2"),
    ],
)
def test_tensors_that_do_not_fit_the_network_are_named(change: dict[str, Any], fact: str) -> None:
    model = open_whole(DEMO)
    assert isinstance(model, PlainFolder)
    for name, shape in change.items():
        model.tensors.pop(name, None)
        if shape is not None:
            model.tensors[name] = TensorInfo("bf16", shape, "x", 0, 0)
    (param,) = change
    with raises(InvalidFileError, param=param, match=fact):
        make_strategy(capture_model(model), 2)


def test_a_users_network_is_cut_from_its_script(penstock_inline: Any, tmp_path: Path) -> None:
    """Its strategy, too, is compared with the script if ``shard`` gets both."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    definition = load_network_script(f"{SCRIPT}:Net")
    network = definition.Network(definition.Config.read(ConfigReader(CONFIG)))
    save_file(dict(network.named_parameters()), tmp_path / WEIGHTS)
    model = open_whole(tmp_path)
    strategy = make_strategy(capture_model(model, network=f"{SCRIPT}:Net"), 2)
    assert {own.cut for own in strategy.parameters.values()} == {"rows", "replicated"}
    with raises(UnsupportedError, param="model_type", match="--network"):
        capture_model(model)
    name, own = next((name, own) for name, own in strategy.parameters.items() if own.cut == "rows")
    wrong = replace(strategy, parameters={**strategy.parameters, name: replace(own, cut="replicated", ranges=())})
    wrong.write(tmp_path / "strategy.json")
    command = ("shard", tmp_path, tmp_path / "out", "--strategy", tmp_path / "strategy.json")
    done = penstock_inline(*command, "--network", f"{SCRIPT}:Net")
    assert done.returncode == 2
    assert f"{name}': cut: expected 'rows'" in done.stderr
    done = penstock_inline(*command)
    assert done.returncode == 0
    assert "not compared with the network" in done.stderr


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
        (("layout_version",), 2, "layout_version: expected 1, got 2"),
        (("model",), None, "model: expected an object"),
        (("model", "config_sha256"), "xyz", "model: config_sha256: expected 64 hexadecimal digits"),
        (("world", "tp"), 0, "world: tp: expected an integer from 1 to 64"),
        (("world", "tp"), 3, "ranges: expected a list for each of 3 ranks"),
        (("world", "pp"), 2, "stages: expected stages from 0 to 1 that ascend"),
        (("world", "cp"), 40, "world: tensor_parallel_size: expected at most 64 ranks in all, got 80"),
        (("parameters", Q, "stages"), [0], "'stages' is not a field"),
        (("world", "dp"), 2, "'dp' is not a field"),
        (("parameters",), {}, "parameters: expected 1 to"),
        (("parameters", Q, "cut"), "tiles", f"parameters: '{Q}': cut: expected one of rows"),
        (("parameters", Q, "shape"), [-1], f"parameters: '{Q}': shape: expected a list"),
        (("parameters", Q, "ranges"), [[[0, 128]]], f"'{Q}': ranges: expected a list for each of 2 ranks"),
        (("parameters", Q, "ranges"), [[[0, 128]], []], "for rank 1, got"),
        (("parameters", Q, "ranges"), [[[0, 128]], [[129, 256]]], "no rank has row 128"),
        (("parameters", Q, "ranges"), [[[0, 128]], [[128, 255]]], "no rank has row 255"),
        (("parameters", Q, "ranges"), [[[0, 128]], [[128, 257]]], "of rows 0 to 256"),
        (("parameters", Q, "ranges"), [[[0, 64], [32, 128]], [[128, 256]]], "that ascend, for rank 0"),
        (("parameters", Q, "ranges"), [[[0, True]], [[0, 256]]], "that ascend, for rank 0"),
        (("parameters", Q), {"dtype": "f32", "shape": [1], "cut": "owner", "rank": 2}, "rank: expected an integer"),
        (("parameters", Q), {"dtype": "f32", "shape": [1], "cut": "same", "name": "x"}, "name: expected a stored"),
        (("parameters", Q), {"dtype": "f32", "shape": [1], "cut": "replicated", "rank": 0}, "'rank' is not a field"),
        (("parameters", Q), {"dtype": "f32", "shape": [], "cut": "rows", "ranges": []}, "a dimension 0"),
        (("parameters", Q), {"dtype": "f32", "shape": [3], "cut": "columns", "ranges": []}, "a dimension 1"),
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
    with raises(InvalidArgumentError, param="strategy", match=f"'{Q}' is named"):
        strategy.check_model(checkpoint.config, fewer, "m")
