"""Sharded folders: merging gives the source back, byte for byte, and nothing incomplete passes for whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.pooling.head import POOLING_FILE
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.checkpoint.tensor_file import TensorFile
from penstock.core.rank_layout import RankLayout
from penstock.env import child_environment
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError
from penstock.runtime.convert import convert
from penstock.sharding.folder import MANIFEST, STRATEGY, WEIGHTS, ShardedFolder, kept_files
from penstock.sharding.source import INDEX, open_whole
from penstock.sharding.strategy import ParameterCut, Strategy, config_checksum
from penstock.sharding.write import merge_folder, shard_folder
from tests.support.encoders import build, sentence_transformer
from tests.support.errors import raises
from tests.support.families import save
from tests.support.marks import mostly_long
from tests.support.sharded_folders import DEMO, strategy_of

SIDES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


LAYOUTS = [RankLayout(3), RankLayout(2, 2), RankLayout(1, 1, 4), RankLayout(2, 2, 2)]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded") / "out"
    shard_folder(DEMO, out, strategy_of(DEMO, 2))
    return out


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    for name, data in files_of(sharded).items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    return tmp_path / "copy"


@pytest.mark.parametrize("scheme", mostly_long(["", "w8a16", "w8a8", "w4a16", "w4a8"], "", "w4a8"))
@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, LAYOUTS[0], LAYOUTS[-1]), ids=str)
def test_merging_gives_the_source_back(scheme: str, layout: RankLayout, tmp_path: Path) -> None:
    source = DEMO
    if scheme:
        source = tmp_path / "quantized"
        quantize_checkpoint(DEMO, source, scheme)
    first = shard_folder(source, tmp_path / "cut", strategy_of(source, layout))
    second = merge_folder(tmp_path / "cut", tmp_path / "merged")
    assert first.checksum == second.checksum
    merged = files_of(tmp_path / "merged")
    assert merged == {name: (source / name).read_bytes() for name in (*SIDES, WEIGHTS)}
    ranks = sorted(path.name for path in (tmp_path / "cut").iterdir() if path.is_dir())
    assert ranks == [f"rank_{rank}" for rank in range(layout.world)]


def test_each_rank_has_its_rows(sharded: Path) -> None:
    whole, strategy = TensorFile(DEMO / WEIGHTS), Strategy.read(sharded / STRATEGY)
    for rank in range(2):
        part = TensorFile(sharded / f"rank_{rank}" / WEIGHTS)
        for name, own in strategy.parameters.items():
            rows = np.concatenate([np.arange(*pair) for pair in own.part_of(rank, strategy.layout) or ()])
            assert np.array_equal(part.read(name), whole.read(name)[rows])


def test_another_cut_needs_no_whole_folder(sharded: Path, tmp_path: Path) -> None:
    third, own = strategy_of(DEMO, RankLayout(2, 3)), Strategy.read(sharded / STRATEGY)
    shard_folder(sharded, tmp_path / "again", third, previous=own)
    shard_folder(DEMO, tmp_path / "direct", third)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "direct")
    with raises(InvalidArgumentError, param="from"):
        shard_folder(sharded, tmp_path / "x", third, previous=third)
    with raises(InvalidArgumentError, param="from"):
        shard_folder(DEMO, tmp_path / "x", third, previous=third)
    assert not (tmp_path / "x").exists()


def handmade(source: Path) -> Strategy:
    """A strategy of three ranks for tensors that no network has: matrices by rows or columns, the others whole."""
    model, parameters = open_whole(source), {}
    for name, info in model.tensors.items():
        own = ParameterCut(info.dtype, info.shape, "replicated")
        if name == "lm_head.weight":
            own = replace(own, cut="same", name="model.embed_tokens.weight")
        elif name.endswith("inv_freq"):
            own = replace(own, cut="owner", rank=0)
        elif name == "model.embed_tokens.weight":
            own = replace(own, cut="rows", ranges=(((0, 16), (30, 31)), ((16, 30),), ((30, 40),)))
        elif name == "e.weight":
            own = replace(own, cut="columns", ranges=(((2, 3), (900, 4000)), ((0, 1000),), ((4000, 5001),)))
        parameters[name] = own
    return Strategy("llama", config_checksum(model.config), RankLayout(3), parameters)


def test_files_odd_types_and_a_tied_head_come_back(tmp_path: Path) -> None:
    """Several files with an index, a head that equals its embedding, frequencies, integers, a scalar, no rows, and
    columns of more bytes than a piece has."""
    source, rng = tmp_path / "source", np.random.default_rng(0)
    source.mkdir()
    table = rng.standard_normal((40, 16)).astype(np.float16)
    files = {
        "model-00001-of-00002.safetensors": {"model.embed_tokens.weight": table, "a.ids": np.arange(9)},
        "model-00002-of-00002.safetensors": {
            "lm_head.weight": table,
            "model.layers.0.self_attn.rotary_emb.inv_freq": rng.standard_normal(4),
            "b.scalar": np.array(3, np.float32),
            "c.weight": np.zeros((0, 7), np.float32),
            "d.weight": rng.standard_normal((3, 3)),
            "e.weight": rng.standard_normal((501, 5001), np.float32),
        },
    }
    for name, tensors in files.items():
        save_file(tensors, source / name)
    index = {"weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors}}
    (source / INDEX).write_text(json.dumps(index, indent=2))
    config = {"model_type": "llama", "tie_word_embeddings": True, "num_attention_heads": 4}
    (source / "config.json").write_text(json.dumps(config))
    shard_folder(source, tmp_path / "cut", handmade(source))
    part = load_file(tmp_path / "cut" / "rank_1" / WEIGHTS)
    assert "lm_head.weight" not in part, "a tied table is stored once"
    assert sorted(part) == ["a.ids", "b.scalar", "c.weight", "d.weight", "e.weight", "model.embed_tokens.weight"]
    whole = load_file(source / "model-00002-of-00002.safetensors")["e.weight"]
    assert np.array_equal(part["e.weight"], whole[:, :1000])
    merge_folder(tmp_path / "cut", tmp_path / "merged")
    assert files_of(tmp_path / "merged") == files_of(source)


def test_a_sentence_transformer_keeps_its_modules(tmp_path: Path) -> None:
    """1_Pooling and 2_Dense lie beside the ranks, each of which makes the pooling head of the whole folder."""
    source = tmp_path / "source"
    source.mkdir()
    sentence_transformer(source, "pooling_mode_cls_token", has_dense=True)
    check_head(source, tmp_path)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_a_classifier_keeps_its_head(kind: str, tmp_path: Path) -> None:
    """No rank has the tensors of the head; it is made from them when the folder is cut."""
    source, more = tmp_path / "source", {"head_dim": 16} if kind == "qwen3" else {}
    build(transformers.AutoModelForSequenceClassification, kind, num_labels=3, **more).save_pretrained(source)
    check_head(source, tmp_path)


def check_head(source: Path, folder: Path) -> None:
    """Compare the heads that ranks make with that of the whole, after one cut, another one, and a merge."""
    head = Checkpoint.open(source).side_files()[POOLING_FILE]
    shard_folder(source, folder / "direct", strategy_of(source, RankLayout(1, 2)))
    shard_folder(source, folder / "cut", strategy_of(source, 2))
    shard_folder(folder / "cut", folder / "again", strategy_of(source, RankLayout(1, 2)))
    assert files_of(folder / "again") == files_of(folder / "direct")
    for name, world in (("cut", 2), ("again", 3)):
        cut = ShardedFolder.open(folder / name)
        assert [cut.rank(rank).side_files()[POOLING_FILE] for rank in range(world)] == [head] * world
        merge_folder(folder / name, folder / f"{name}-merged")
        assert files_of(folder / f"{name}-merged") == files_of(source)
    convert(source, folder / "converted", Conversion())
    assert Checkpoint.open(folder / "converted").side_files()[POOLING_FILE] == head


@pytest.mark.parametrize("place", ["Pooling", "rank_0", "../1_Pooling", "1_Pooling/2_Dense"])
def test_a_module_with_another_name_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "Transformer"}, {"type": "Pooling", "path": place}]))
    with raises(InvalidFileError, param="path", match="the name of a folder such as 1_Pooling"):
        kept_files(tmp_path)


def test_key_heads_of_several_ranks_are_stored_by_each(tmp_path: Path) -> None:
    source = save("llama_tied_one_kv_head", tmp_path / "source")
    shard_folder(source, tmp_path / "cut", strategy_of(source, 3))
    keys = [load_file(tmp_path / "cut" / f"rank_{rank}" / WEIGHTS) for rank in range(3)]
    name = "model.layers.0.self_attn.k_proj.weight"
    assert np.array_equal(keys[0][name], keys[2][name])
    merge_folder(tmp_path / "cut", tmp_path / "merged")
    assert (tmp_path / "merged" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def test_every_damage_is_named(copy: Path, tmp_path: Path) -> None:
    weights = copy / "rank_1" / WEIGHTS
    first = ShardedFolder.open(copy).file(1).tensors["model.embed_tokens.weight"].offset
    damages = [
        (lambda: flip(weights, first), "the checksum in manifest.json"),
        (lambda: weights.write_bytes(weights.read_bytes()[:-9]), "truncated"),
        (lambda: weights.unlink(), "rank_1/model.safetensors, got no file"),
        (lambda: save_file({"x": np.ones(3)}, weights), "rank_1/model.safetensors (has|lacks) tensor"),
        (lambda: flip(copy / MANIFEST, 500), MANIFEST),
        (lambda: (copy / MANIFEST).write_text("{}"), "sha256 and manifest"),
        (lambda: (copy / MANIFEST).unlink(), "`penstock shard`"),
        (lambda: strategy_of(DEMO, 3).write(copy / STRATEGY), "^(?!rank_).*manifest.json"),
        (lambda: flip(copy / STRATEGY, 40), STRATEGY),
        (lambda: flip(copy / "tokenizer.json", 40), "tokenizer.json: .*checksum"),
        (lambda: (copy / "tokenizer.json").unlink(), "tokenizer.json, got no file"),
    ]
    original = files_of(copy)
    for damage, message in damages:
        for name, data in original.items():
            (copy / name).write_bytes(data)
        damage()
        with pytest.raises(InvalidFileError, match=message) as raised:
            merge_folder(copy, tmp_path / "merged")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "merged").exists()


def test_a_ranks_part_is_checked_when_it_is_opened(copy: Path) -> None:
    assert ShardedFolder.open(copy).rank(0).dtype == "bf16"
    name = next(iter(ShardedFolder.open(copy).file(1).tensors))
    info = ShardedFolder.open(copy).file(1).tensors[name]
    flip(copy / "rank_1" / WEIGHTS, info.offset)
    with raises(InvalidFileError, param=name, match=rf"rank_1/{WEIGHTS}: tensor '{name}': .*checksum"):
        ShardedFolder.open(copy).rank(1)
    with raises(InvalidArgumentError, param="rank"):
        ShardedFolder.open(copy).rank(2)


def test_what_is_no_source_is_refused(sharded: Path, tmp_path: Path) -> None:
    with raises(InvalidArgumentError, param="source"):
        merge_folder(DEMO, tmp_path / "x")
    with raises(InvalidArgumentError, param="out"):
        shard_folder(DEMO, sharded, strategy_of(DEMO, 2))
    other = save("llama", tmp_path / "other")
    with raises(InvalidArgumentError, param="strategy"):
        shard_folder(other, tmp_path / "x", strategy_of(DEMO, 2))
    with pytest.raises(PenstockError):
        shard_folder(tmp_path / "nowhere", tmp_path / "x", strategy_of(DEMO, 2))


SCRIPT = """
import sys, time
from pathlib import Path
from penstock.sharding import write
from penstock.sharding.strategy import Strategy
slow = write.TensorWriter.add
def add(self, name, piece):
    slow(self, name, piece)
    print("wrote", flush=True)
    time.sleep(0.02)
write.TensorWriter.add = add
write.shard_folder(Path(sys.argv[1]), Path(sys.argv[2]), Strategy.read(Path(sys.argv[3])))
"""


def test_a_kill_leaves_nothing_that_passes_for_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    strategy_of(DEMO, 2).write(tmp_path / "s.json")
    command = [sys.executable, "-c", SCRIPT, str(DEMO), str(out), str(tmp_path / "s.json")]
    for count in (1, 20):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment()) as child:
            for _ in range(count):
                assert child.stdout is not None
                assert child.stdout.readline()
            child.send_signal(signal.SIGKILL)
        assert not out.exists()
        left = [path for path in tmp_path.iterdir() if path.name != "s.json"]
        assert [path.name.endswith(".partial") for path in left] == [True]
        with raises(InvalidFileError, param="path", match=MANIFEST):
            merge_folder(left[0], tmp_path / "merged")
        os.utime(left[0], (time.time() - 60,) * 2)
    shard_folder(DEMO, out, strategy_of(DEMO, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "s.json"], "what was left is removed"
