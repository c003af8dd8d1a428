"""Sharded folders and the bundles of ranks open as the whole model does, and give its tokens."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.llm.llm import LLM
from penstock.runtime.export_ranks import export_ranks
from penstock.runtime.open import open_program
from penstock.runtime.program import ProgramLimits
from penstock.sharding.folder import MANIFEST, STRATEGY, WEIGHTS
from penstock.sharding.strategy import Strategy
from penstock.sharding.whole import MergedWeights
from penstock.sharding.write import shard_folder
from tests.support.bundle_weights import weights_of
from tests.support.encoders import LIMITS as ENCODER_LIMITS
from tests.support.encoders import sentence_transformer
from tests.support.errors import raises
from tests.support.families import save
from tests.support.marks import mostly_long
from tests.support.rank_threads import RankThreads, logits_of, steps, whole_logits
from tests.support.sharded_folders import DEMO, strategy_of

LIMITS = ProgramLimits(max_tokens=64, max_requests=2, context_len=256)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PROMPT = "def add(a, b):"


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded") / "demo"
    shard_folder(DEMO, out, strategy_of(DEMO, 2))
    return out


def answer(model: Path, world: int, **options: object) -> list[int]:
    with LLM(model, threads=1, limits=LIMITS, tensor_parallel_size=world, **options) as llm:
        return llm.generate([PROMPT], GREEDY)[0].token_ids


@pytest.mark.long
def test_a_sharded_folder_opens_as_the_model(sharded: Path, tmp_path: Path) -> None:
    expected = answer(DEMO, 1)
    assert answer(sharded, 2) == expected
    assert export_ranks(DEMO, tmp_path / "bundles", 2) > 0
    assert answer(tmp_path / "bundles", 2) == expected


@pytest.mark.long
def test_a_sentence_transformer_embeds_from_its_parts(tmp_path: Path) -> None:
    """Its pooling, its dense layer and its prompts come from the files beside the ranks."""
    source = tmp_path / "source"
    source.mkdir()
    sentence_transformer(source, "pooling_mode_cls_token", has_dense=True)
    shard_folder(source, tmp_path / "cut", strategy_of(source, 2))
    vectors = []
    for folder, world in ((source, 1), (tmp_path / "cut", 2)):
        with LLM(folder, threads=1, limits=ENCODER_LIMITS, tensor_parallel_size=world) as llm:
            vectors.append(list(llm.embed("the cats").vector))
    assert len(vectors[0]) == 30
    assert vectors[0] == vectors[1]


@pytest.mark.long
def test_a_sharded_folder_opens_without_the_cache(sharded: Path) -> None:
    assert answer(sharded, 2, use_cache=False) == answer(DEMO, 1)


@pytest.mark.long
@pytest.mark.parametrize("scheme", mostly_long(["f32", "w4a8"], "w4a8"))
@pytest.mark.parametrize("family", ["llama_tied_one_kv_head", "qwen3_biases_windows"])
def test_ranks_made_apart_have_the_bits_of_the_whole(family: str, scheme: str, tmp_path: Path) -> None:
    """Each rank's bundle from its own part: the weights of the whole bundle's cut, and the logits of one process."""
    source, whole = save(family, tmp_path / "source"), tmp_path / "whole.psm"
    export_bundle(source, whole, scheme=scheme)
    if scheme == "w4a8":
        quantize_checkpoint(source, tmp_path / "quantized", scheme)
        source = tmp_path / "quantized"
    shard_folder(source, tmp_path / "cut", strategy_of(source, 3))
    parts = [tmp_path / f"{rank}.psm" for rank in range(3)]
    for rank, part in enumerate(parts):
        export_bundle(tmp_path / "cut", part, rank=rank)
    export_ranks(whole, tmp_path / "bundles", 3)
    for rank, part in enumerate(parts):
        assert weights_of(part) == weights_of(tmp_path / "bundles" / f"rank_{rank}.psm")
    batches = steps(len(read_graph(whole)[0].page_groups))
    with RankThreads(parts) as ranks:
        assert logits_of(ranks.program, batches) == whole_logits(whole, batches)


def test_one_process_opens_a_sharded_folder_whole(sharded: Path, tmp_path: Path) -> None:
    """Its export is the bundle of the folder that was cut, byte for byte."""
    export_bundle(sharded, tmp_path / "whole.psm", scheme="w8a8")
    assert (tmp_path / "whole.psm").read_bytes() == (DEMO.parent / "demo.psm").read_bytes()
    data = bytearray((sharded / "rank_1" / WEIGHTS).read_bytes())
    data[len(data) // 2] ^= 1
    damaged = tmp_path / "damaged"
    shutil.copytree(sharded, damaged)
    (damaged / "rank_1" / WEIGHTS).write_bytes(data)
    with pytest.raises(InvalidFileError, match=MANIFEST):
        export_bundle(damaged, tmp_path / "damaged.psm")
    (damaged / "rank_1" / WEIGHTS).unlink()
    with raises(InvalidFileError, match="rank_1"):
        export_bundle(damaged, tmp_path / "damaged.psm")


def test_a_stacked_tensor_is_put_together_once_for_all_experts() -> None:
    shapes = {"blocks": (8, 4, 2), "scales": (8, 4, 1), "head": (4, 2), "next": (8, 4, 2)}
    tensors = {
        name: TensorInfo("f32", shape, "model.safetensors", 0, 4 * math.prod(shape)) for name, shape in shapes.items()
    }
    read: list[str] = []

    def stream(name: str) -> Iterator[NDArray[np.uint8]]:
        read.append(name)
        yield np.full(tensors[name].num_bytes, len(name), np.uint8)

    weights = MergedWeights(SimpleNamespace(folder=Path(), tensors=tensors, stream=stream))  # type: ignore[arg-type]
    for _ in range(3):
        for name in ("blocks", "scales", "head"):
            assert weights.read(name).shape == shapes[name]
            weights.release(name)
    assert read.count("blocks") == read.count("scales") == 1
    assert read.count("head") == 3
    assert not np.array_equal(weights.read("next"), weights.read("blocks"))


@pytest.mark.long
def test_one_process_gives_the_answers_of_the_model(sharded: Path) -> None:
    assert answer(sharded, 1) == answer(DEMO, 1) == answer(sharded, 1, use_cache=False)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_is_refused(world: int, sharded: Path, tmp_path: Path) -> None:
    for folder in (sharded, tmp_path / "bundles"):
        if folder != sharded:
            export_ranks(DEMO.parent / "demo.psm", folder, 2)
        elif world == 1:
            continue  # the whole model
        with raises(InvalidArgumentError, param="tensor_parallel_size", match="expected 2") as raised:
            answer(folder, world)
        assert raised.value.param == "tensor_parallel_size"


def test_a_missing_bundle_of_a_rank_is_named(tmp_path: Path) -> None:
    export_ranks(DEMO.parent / "demo.psm", tmp_path / "bundles", 2)
    (tmp_path / "bundles" / "rank_1.psm").unlink()
    with pytest.raises(InvalidFileError, match=r"bundles: expected rank_1\.psm, got no file"):
        answer(tmp_path / "bundles", 2)


def test_a_missing_part_is_named_before_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard_folder(DEMO, tmp_path / "cut", strategy_of(DEMO, 2))
    (tmp_path / "cut" / "rank_1" / WEIGHTS).unlink()
    monkeypatch.setattr("penstock.runtime.build.build_in_child", lambda *_, **__: pytest.fail("made a bundle"))
    for use_cache in (True, False):
        with raises(InvalidFileError, param="path", match=r"rank_1/model\.safetensors"):
            answer(tmp_path / "cut", 2, use_cache=use_cache)


def test_bundles_of_two_cuts_are_no_group(tmp_path: Path) -> None:
    demo = DEMO.parent / "demo.psm"
    export_ranks(demo, tmp_path / "two", 2)
    export_ranks(demo, tmp_path / "three", 3)
    (tmp_path / "two" / "rank_1.psm").write_bytes((tmp_path / "three" / "rank_1.psm").read_bytes())
    with raises(InvalidArgumentError, param="tensor_parallel_size", match="of 3"):
        answer(tmp_path / "two", 2)
    other = save("llama", tmp_path / "other")
    export_bundle(other, tmp_path / "other.psm", scheme="f32")
    export_ranks(tmp_path / "other.psm", tmp_path / "others", 2)
    (tmp_path / "two" / "rank_1.psm").write_bytes((tmp_path / "others" / "rank_1.psm").read_bytes())
    with raises(PenstockError, param="text"):
        answer(tmp_path / "two", 2)


def swapped(strategy: Strategy) -> Strategy:
    """The strategy with the rows of two ranks exchanged, which have equal sizes."""
    name = "model.layers.0.mlp.down_proj.weight"
    own = strategy.parameters[name]
    changed = replace(own, ranges=own.ranges[::-1])
    return replace(strategy, parameters={**strategy.parameters, name: changed})


@pytest.mark.long
def test_rows_that_the_graph_does_not_want_are_named(tmp_path: Path) -> None:
    shard_folder(DEMO, tmp_path / "cut", swapped(strategy_of(DEMO, 2)))
    with pytest.raises(
        UnsupportedError, match=rf"{STRATEGY}: parameters: 'model.layers.0.mlp.down_proj.weight': rank 0"
    ):
        export_bundle(tmp_path / "cut", tmp_path / "x.psm", rank=0)


def test_what_needs_a_whole_folder_says_so(sharded: Path, tmp_path: Path) -> None:
    with raises(UnsupportedError, param="folder", match="several ranks; `penstock shard FOLDER OUT --merge`"):
        quantize_checkpoint(sharded, tmp_path / "x", "w8a8")
    with raises(UnsupportedError, param="folder"):
        open_program(sharded, mode="eager")


def test_a_rank_needs_no_other_part(sharded: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    (alone / "rank_1").mkdir(parents=True)
    for path in (*(path for path in sharded.iterdir() if path.is_file()), sharded / "rank_1" / WEIGHTS):
        (alone / path.relative_to(sharded)).write_bytes(path.read_bytes())
    export_bundle(alone, tmp_path / "rank_1.psm", rank=1)
    graph = read_graph(tmp_path / "rank_1.psm")[0]
    assert (graph.properties["rank"], graph.properties["world"]) == ("1", "2")
    assert len(graph.properties["whole"]) == 64
