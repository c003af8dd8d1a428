"""GGUF files of further architectures have the logits of the models that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidFileError, UnsupportedError
from tests.support.gguf_models import FAMILIES, gguf_arrays, random_model, write_gguf

IDS = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]
QUICK = ("gemma3", "qwen2moe", "gpt-oss", "lfm2")


def eps_of(model: Any) -> dict[str, float]:
    config = model.config
    eps = config.norm_eps if config.model_type == "lfm2" else config.rms_norm_eps
    return {"attention.layer_norm_rms_epsilon": eps}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_a_float_file_has_the_logits_of_its_original(tmp_path: Path, name: str) -> None:
    family, path = FAMILIES[name], tmp_path / "model.gguf"
    model = random_model(family)
    write_gguf(path, family.arch, gguf_arrays(family, model), {**eps_of(model), **family.keys})
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(path, mode="eager") as llm:
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4


def test_experts_keep_their_blocks(tmp_path: Path) -> None:
    family, path = FAMILIES["qwen3moe"], tmp_path / "model.gguf"
    model = random_model(family)
    kind = gguf.GGMLQuantizationType.Q8_0
    arrays = gguf_arrays(family, model)
    write_gguf(path, family.arch, arrays, {**eps_of(model), **family.keys}, kind)
    checkpoint = Checkpoint.open(path)
    for part, own in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        stacked = arrays[f"blk.1.ffn_{part}_exps.weight"]
        for expert in range(4):
            name = f"model.layers.1.mlp.experts.{expert}.{own}.weight"
            assert checkpoint.block_scheme(name) == "q8_0"
            assert np.array_equal(checkpoint.read_blocks(name), gguf.quantize(stacked[expert], kind))
            checkpoint.release(name)


def test_gates_alternate_with_up_projections_in_their_blocks(tmp_path: Path) -> None:
    family, path = FAMILIES["gpt-oss"], tmp_path / "model.gguf"
    model, kind = random_model(family), gguf.GGMLQuantizationType.MXFP4
    arrays = gguf_arrays(family, model)
    write_gguf(path, family.arch, arrays, {**eps_of(model), **family.keys}, kind)
    checkpoint, name = Checkpoint.open(path), "model.layers.1.mlp.experts.2.gate_up_proj.weight"
    assert checkpoint.choose_scheme(None) == checkpoint.block_scheme(name) == "mxfp4"
    blocks, values = checkpoint.read_blocks(name), checkpoint.read(name)
    for start, part in enumerate(("gate", "up")):
        expected = gguf.quantize(arrays[f"blk.1.ffn_{part}_exps.weight"][2], kind)
        assert np.array_equal(blocks[start::2], expected)
        assert np.array_equal(values[start::2], gguf.dequantize(expected, kind))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.0.ffn_up_exps.weight", None, "expected tensor blk.0.ffn_up_exps.weight beside blk.0.ffn_gate_exps"),
        ("blk.0.ffn_up_exps.bias", (4, 95), r"ffn_up_exps.bias: expected the shape of blk.0.ffn_gate_exps.bias, "),
    ],
)
def test_gates_need_their_up_projections(tmp_path: Path, name: str, shape: Any, message: str) -> None:
    family, path = FAMILIES["gpt-oss"], tmp_path / "model.gguf"
    model = random_model(family)
    arrays = gguf_arrays(family, model)
    if shape is None:
        del arrays[name]
    else:
        arrays[name] = np.zeros(shape, np.float32)
    write_gguf(path, family.arch, arrays, {**eps_of(model), **family.keys})
    with pytest.raises(InvalidFileError, match=message):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gemma3", {"attention.sliding_window": 0}, r"gemma3\.attention\.sliding_window: expected a window"),
        ("gemma3", {"attention.sliding_window_pattern": [1, 0]}, "expected a number, or an array of 2 booleans"),
        ("gemma2", {"attention.head_count_kv": [0, 2]}, "expected a number of heads in every layer"),
        ("lfm2", {"attention.head_count_kv": [1, 2]}, "expected the same number of heads in all layers"),
    ],
)
def test_values_of_layers_are_checked(tmp_path: Path, name: str, keys: dict[str, Any], message: str) -> None:
    family, path = FAMILIES[name], tmp_path / "model.gguf"
    arrays = {"token_embd.weight": np.zeros((300, 64), np.float32)}
    write_gguf(path, family.arch, arrays, {"attention.layer_norm_rms_epsilon": 1e-5, **family.keys, **keys})
    with pytest.raises(InvalidFileError, match=message):
        Checkpoint.open(path)


def test_experts_in_a_tensor_each_are_refused(tmp_path: Path) -> None:
    family, path = FAMILIES["mixtral"], tmp_path / "model.gguf"
    arrays = {"token_embd.weight": np.zeros((300, 64), np.float32),
              "blk.0.ffn_gate.0.weight": np.zeros((96, 64), np.float32)}  # fmt: skip
    write_gguf(path, family.arch, arrays, {"attention.layer_norm_rms_epsilon": 1e-5, **family.keys})
    with pytest.raises(UnsupportedError, match=r"expected the experts of a layer in one tensor blk\.0\.ffn_gate_exps"):
        Checkpoint.open(path)
