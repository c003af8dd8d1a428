"""Rotated schemes of whole models: folders, bundles, methods with data, mixed schemes, and planted outliers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import penstock
from benchmarks.plant_outliers import plant_outliers
from penstock.calibration.auto import methods_for
from penstock.calibration.budget import Budget
from penstock.calibration.levels import make_levels, write_checkpoint
from penstock.calibration.mixed import MixedOptions, quantize_mixed
from penstock.calibration.quantize import DataOptions, quantize_with_data
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.core.native import Model
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.passes.assign_scheme import rotated_weights
from penstock.graph.unpack_bundle import unpack_bundle
from penstock.llm.llm import LLM
from penstock.models.mapped import open_mapped
from penstock.quant.round_to_nearest import RoundToNearest, RoundToNearestConfig
from penstock.quant.scheme import find_scheme
from tests.support.command import FOLDER
from tests.support.errors import raises
from tests.support.tiny_llama import write_tiny_llama

IDS = list(range(5, 69))


def logits(path: Path, scheme: str | None = None) -> np.ndarray:
    with LLM(path, scheme=scheme, kv_cache="f32", use_cache=False) as llm:
        return np.asarray(llm.logits(IDS))


def divergence(found: np.ndarray, expected: np.ndarray) -> float:
    """The mean Kullback-Leibler divergence, in nats per token."""
    logs = [x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
            for x in (expected.astype(np.float64), found.astype(np.float64))]  # fmt: skip
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean())


@pytest.mark.parametrize("scheme", ["w8a8_h32", "w4a8_h32"])
def test_folders_and_bundles_have_the_same_weights(tmp_path: Path, scheme: str) -> None:
    source = write_tiny_llama(tmp_path / "model")
    quantize_checkpoint(source, tmp_path / "out", scheme)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["scheme"] == scheme
    for folder, bundle, own in ((tmp_path / "out", "a.psm", None), (source, "b.psm", scheme)):
        export_bundle(folder, tmp_path / bundle, scheme=own)
    graphs = [read_graph(tmp_path / name)[0] for name in ("a.psm", "b.psm")]
    assert rotated_weights(graphs[0])
    assert {node.attrs["scheme"] for node in graphs[0].nodes if node.op == "linear"} == {scheme, "w8a8"}
    assert logits(tmp_path / "a.psm").tobytes() == logits(tmp_path / "b.psm").tobytes()
    unpack_bundle(tmp_path / "b.psm", tmp_path / "unpacked")
    export_bundle(tmp_path / "unpacked", tmp_path / "again.psm")
    assert logits(tmp_path / "again.psm").tobytes() == logits(tmp_path / "a.psm").tobytes()


def write_encoder(path: Path, kind: str, **changes: object) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1}
    config = transformers.AutoConfig.for_model(kind, **sizes | changes)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(path)
    return path


def version(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["quantization_config"]["version"])


def test_an_unlisted_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_llama(tmp_path / "model")
    monkeypatch.setattr("penstock.checkpoint.quantize.HEADS", ())
    monkeypatch.setattr("penstock.quant.mixed_schemes.is_head", lambda name: False)
    quantize_checkpoint(source, tmp_path / "out", "w8a8_h32")
    with raises(UnsupportedError, param="scheme"):
        export_bundle(tmp_path / "out", tmp_path / "out.psm")


@pytest.mark.parametrize("scheme", ["w8a8_h32", "w4a8_h32"])
def test_folders_with_rotated_heads_are_not_misread(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders without a list of heads: their plan knew only the head lm_head.weight."""
    source = write_encoder(tmp_path / "model", "distilbert", hidden_dim=64, tie_word_embeddings=False)
    expected = logits(source, "f32")
    quantize_checkpoint(source, tmp_path / "listed", scheme)
    assert divergence(logits(tmp_path / "listed"), expected) < 0.01
    monkeypatch.setattr("penstock.checkpoint.quantize.HEADS", ("lm_head.weight",))
    monkeypatch.setattr("penstock.checkpoint.quantize._has_float_head", lambda *_: False)
    quantize_checkpoint(source, tmp_path / "old", scheme)
    quantize_checkpoint(source, tmp_path / "old_mixed", scheme, blacklist=["vocab_transform"])
    assert [version(tmp_path / name) for name in ("old", "old_mixed")] == [2, 3]
    with raises((UnsupportedError, InvalidFileError), match=r"vocab_projector\.weight"):
        logits(tmp_path / "old")
    assert divergence(logits(tmp_path / "old_mixed"), expected) < 0.01


def test_only_rotated_folders_list_their_heads(tmp_path: Path) -> None:
    source = write_encoder(tmp_path / "model", "distilbert", hidden_dim=64, tie_word_embeddings=False)
    for scheme, number in {"w8a8": 2, "w4a8": 2, "w8a8_h32": 3}.items():
        quantize_checkpoint(source, tmp_path / scheme, scheme)
        assert version(tmp_path / scheme) == number
    schemes = Checkpoint.open(tmp_path / "w8a8_h32").mixed_schemes or {}
    assert schemes["vocab_projector.weight"] == "w8a8"


@pytest.mark.parametrize("levels", [("w8a8_h32", "f32"), ("w4a8_h32", "w8a8_h32")])
def test_mixes_list_heads_at_every_level(tmp_path: Path, levels: tuple[str, ...]) -> None:
    source = write_encoder(tmp_path / "model", "distilbert", hidden_dim=64, tie_word_embeddings=False)
    checkpoint, head = Checkpoint.open(source), "vocab_projector.weight"
    made = make_levels(source, checkpoint, tmp_path, levels, "rtn", ([], 1), None)
    for level in levels:
        folder = tmp_path / f"mix_{level}"
        write_checkpoint(made.compose(dict.fromkeys(made.quantized_names(), level)), folder)
        assert (Checkpoint.open(folder).mixed_schemes or {})[head] == find_scheme(level).plain
        assert divergence(logits(folder), logits(source, "f32")) < 0.01


@pytest.mark.parametrize(("kind", "scheme"), [("bert", "w8a8_h32"), ("bert", "w4a8_h32"), ("modernbert", "w8a8_h32")])
def test_a_head_may_have_any_name(tmp_path: Path, kind: str, scheme: str) -> None:
    """An encoder's head is its word embeddings, whose name does not tell that they are a head."""
    write_encoder(tmp_path / "model", kind, pad_token_id=0)
    export_bundle(tmp_path / "model", tmp_path / "a.psm", scheme=scheme)
    unpack_bundle(tmp_path / "a.psm", tmp_path / "unpacked")
    algorithm = RoundToNearest(RoundToNearestConfig(scheme=scheme))
    algorithm.apply(penstock.load_network(tmp_path / "model"))
    algorithm.save(tmp_path / "rounded")
    quantize_checkpoint(
        open_mapped(tmp_path / "model"), tmp_path / "floats", scheme
    )  # the embeddings, and so the head, stay floats
    schemes = {}
    names = ["model", "unpacked", "rounded", "floats"]
    for name in names:
        own = scheme if name == "model" else None
        export_bundle(tmp_path / name, tmp_path / f"{name}.psm", scheme=own)
        graph = read_graph(tmp_path / f"{name}.psm")[0]
        schemes[name] = [node.attrs["scheme"] for node in graph.nodes if node.op == "linear"]
        assert scheme in schemes[name]
        with Model.open(tmp_path / f"{name}.psm") as model:
            schemes[f"{name} bytes"] = bytes(model.segment("weights") or b"")
    for name in names[:-1]:
        assert schemes[name] == schemes["model"]
        assert schemes[f"{name} bytes"] == schemes["model bytes"]
    assert (schemes["model"][-1], schemes["floats"][-1]) == ("w8a8", "f32")  # the head
    assert schemes["floats"][:-1] == schemes["model"][:-1]  # the halves of gated layers, too


@pytest.mark.parametrize("method", ["gptq", "imatrix", "smooth+gptq", "awq"])
def test_methods_see_the_rotated_inputs(tmp_path: Path, method: str) -> None:
    source = write_tiny_llama(tmp_path / "model")
    expected, losses = logits(source, "f32"), {}
    for scheme in ("w4a8_h32", "w4a8"):
        quantize_with_data(source, tmp_path / scheme, scheme, DataOptions(method, num_tokens=512))
        losses[scheme] = divergence(logits(tmp_path / scheme), expected)
    assert losses["w4a8_h32"] < 1.5 * losses["w4a8"]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_rotated_schemes_mix(tmp_path: Path, method: str) -> None:
    source = write_tiny_llama(tmp_path / "model", tied=True)
    options = MixedOptions(Budget(bits=6.0), method, num_tokens=512)
    report = quantize_mixed(source, tmp_path / "out", "w4a8_h32", options)
    assert set(report.counts()) == {"w4a8_h32", "w8a8_h32"}
    assert (report.recipe["method"], report.bits <= 6.0) == (method, True)
    assert report.highest[1].mean < report.divergence.mean < report.lowest[1].mean
    checkpoint = Checkpoint.open(tmp_path / "out")
    schemes = checkpoint.mixed_schemes or {}
    assert {schemes[name] for name in schemes if name == "model.embed_tokens.weight"} <= {"w8a8", "w4a8"}
    assert divergence(logits(tmp_path / "out"), logits(source, "f32")) == pytest.approx(
        report.divergence.mean, rel=5.0, abs=0.02
    )


def test_auto_tries_the_rotation() -> None:
    assert {"hadamard", "hadamard+gptq"} <= set(methods_for(find_scheme("w4a8")))
    assert not {name for name in methods_for(find_scheme("w4a8_h32")) if "hadamard" in name}
    assert not {name for name in methods_for(find_scheme("w8a16")) if "hadamard" in name}


@pytest.mark.long
def test_rotation_cures_planted_outliers(tmp_path: Path) -> None:
    plant_outliers(FOLDER, tmp_path / "planted", ("channels", "down", "values"), 32.0)
    expected = logits(tmp_path / "planted", "f32")
    losses = [divergence(logits(tmp_path / "planted", own), expected) for own in ("w8a8", "w8a8_h32")]
    assert losses[1] < 0.15 * losses[0]
