"""GGUF files of further architectures have the logits of the models that they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidFileError, UnsupportedError
from tests.support.errors import raises
from tests.support.gguf_experts import EXPERT_FAMILIES
from tests.support.gguf_gemma import GEMMA_FAMILIES
from tests.support.gguf_hybrids import HYBRID_FAMILIES
from tests.support.gguf_models import FAMILIES, eps_of, gguf_arrays, random_model, write_gguf

ALL = {**FAMILIES, **EXPERT_FAMILIES, **HYBRID_FAMILIES, **GEMMA_FAMILIES}
IDS = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]
PLAIN_NORMS = ("phi2", "cohere2", "olmo", "nemotron_h")
QUICK = (
    "gemma3",
    "qwen2moe",
    "gpt-oss",
    "lfm2",
    "qwen35",
    "glm4",
    "phi2",
    "falcon with two norms",
    "gpt2",
    "deepseek2",
)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ALL]
)
def test_a_float_file_has_the_logits_of_its_original(tmp_path: Path, name: str) -> None:
    family, path = ALL[name], tmp_path / "model.gguf"
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


@pytest.mark.parametrize(("name", "shape"), [("blk.0.ffn_up_exps.weight", None), ("blk.0.ffn_up_exps.bias", (4, 95))])
def test_gates_need_their_up_projections(tmp_path: Path, name: str, shape: Any) -> None:
    family, path = FAMILIES["gpt-oss"], tmp_path / "model.gguf"
    model = random_model(family)
    arrays = gguf_arrays(family, model)
    if shape is None:
        del arrays[name]
    else:
        arrays[name] = np.zeros(shape, np.float32)
    write_gguf(path, family.arch, arrays, {**eps_of(model), **family.keys})
    with raises(InvalidFileError, param=name):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gemma3", {"attention.sliding_window": 0}, r"gemma3\.attention\.sliding_window: expected a window"),
        ("gemma3", {"attention.sliding_window_pattern": [1, 0]}, "expected a number, or an array of 2 booleans"),
        ("gemma2", {"attention.head_count_kv": [0, 2]}, "expected a number of heads in every layer"),
        (
            "lfm2",
            {"block_count": 1 << 30, "attention.head_count_kv": 2},
            "block_count: expected an integer from 1 to 65",
        ),
        ("phi2", {"rope.dimension_count": 18}, r"phi2\.rope\.dimension_count: expected an integer from 2 to 16"),
        ("glm4", {"rope.dimension_count": 0}, r"glm4\.rope\.dimension_count: expected an integer from 2 to 16"),
        ("cohere2", {"attention.sliding_window_pattern": [True]}, "expected a number, or an array of 2 booleans"),
        ("minicpm", {"logit_scale": 0.0}, r"minicpm\.logit_scale: expected a number above 0"),
        ("apertus", {"xielu.alpha_n": [0.5]}, r"xielu\.alpha_n: expected an array of 2 finite numbers, got an array"),
        ("olmo", {"attention.layer_norm_epsilon": 1e-6}, r"olmo\.attention\.layer_norm_epsilon: expected 1e-05"),
        ("lfm2", {"attention.head_count_kv": [1, 2]}, "expected the same number of heads in all layers"),
    ],
)
def test_values_of_layers_are_checked(tmp_path: Path, name: str, keys: dict[str, Any], message: str) -> None:
    family, path = FAMILIES[name], tmp_path / "model.gguf"
    arrays = {"token_embd.weight": np.zeros((300, 64), np.float32)}
    eps = {"attention.layer_norm_epsilon" if name in PLAIN_NORMS else "attention.layer_norm_rms_epsilon": 1e-5}
    write_gguf(path, family.arch, arrays, {**eps, **family.keys, **keys})
    with pytest.raises(InvalidFileError, match=message):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("name", "key", "width"), [("qwen3moe", "expert_feed_forward_length", 32),
                               ("qwen2moe", "expert_shared_feed_forward_length", 48)]
)  # fmt: skip
def test_the_width_of_experts_is_that_of_their_tensors(tmp_path: Path, name: str, key: str, width: int) -> None:
    family, path = FAMILIES[name], tmp_path / "model.gguf"
    model = random_model(family)
    write_gguf(path, family.arch, gguf_arrays(family, model), {**eps_of(model), **family.keys, key: 31})
    with raises(InvalidFileError, param=f"{name}.{key}", match=f"expected {width}, "):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("keys", "field", "message"),
    [
        ({"rope.scaling.type": "yarn"}, "olmo2.rope.scaling.type", r"expected none, got 'yarn'"),
        ({"rope.freq_base_swa": 2e4}, "olmo2.rope.freq_base_swa", r"expected 10000, got 20000"),
    ],
)
def test_positions_that_differ_between_layers_are_refused(tmp_path: Path, keys: Any, field: str, message: str) -> None:
    family, path = FAMILIES["olmo2 with windows"], tmp_path / "model.gguf"
    model = random_model(family)
    write_gguf(path, family.arch, gguf_arrays(family, model), {**eps_of(model), **family.keys, **keys})
    with raises(UnsupportedError, param=field, match=message):
        Checkpoint.open(path)


def test_recurrent_layers_are_those_of_the_file(tmp_path: Path) -> None:
    family, path = FAMILIES["qwen35"], tmp_path / "model.gguf"
    model = random_model(family)
    keys = {**eps_of(model), **family.keys, "attention.recurrent_layers": [True, False, False]}
    del keys["full_attention_interval"]
    write_gguf(path, family.arch, gguf_arrays(family, model), keys | {"block_count": 3, "nextn_predict_layers": 1})
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(path, mode="eager") as llm:
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4


def test_delta_projections_keep_blocks_of_several_heads(tmp_path: Path) -> None:
    family = FAMILIES["qwen35"]
    config, sizes = {**family.config, "linear_value_head_dim": 16}, {**family.keys, "ssm.inner_size": 64}
    model = random_model(replace(family, config=config))
    logits = []
    for kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0):
        path = tmp_path / f"{kind.name}.gguf"
        write_gguf(path, family.arch, gguf_arrays(family, model), {**eps_of(model), **sizes}, kind)
        with LLM(path, kv_cache="f32", threads=2) as llm:
            logits.append(llm.logits(IDS))
    checkpoint = Checkpoint.open(path)
    assert checkpoint.block_scheme("model.layers.0.linear_attn.out_proj.weight") == "q8_0"
    assert not checkpoint.widening_note("q8_0")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(logits[0] - expected).max() < 1e-4
    assert 0 < np.abs(logits[1] - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("keys", "change", "field", "message"),
    [
        (
            {"attention.head_count_kv": 2},
            {},
            "granitehybrid.attention.head_count_kv",
            r"expected an array of 2 integers, got 2",
        ),
        (
            {"attention.head_count_kv": [0, 2, 2]},
            {},
            "granitehybrid.attention.head_count_kv",
            r"expected an array of 2 integers, got an array of",
        ),
        ({"ssm.inner_size": 130}, {}, "granitehybrid.ssm.inner_size", r"expected a multiple of 8 heads, got 130"),
        (
            {"ssm.inner_size": 136},
            {},
            "granitehybrid.ssm.inner_size",
            r"expected a multiple of 8 heads and of 64, got 136",
        ),
        ({"ssm.group_count": 4}, {}, "blk.0.ssm_in.weight", r"expected 360 rows, got the shape \[312, 64\]"),
        ({}, {"blk.0.ssm_a": np.zeros((8, 1), np.float32)}, "blk.0.ssm_a", r"expected finite numbers below 0"),
    ],
)
def test_sizes_of_mamba_are_checked(tmp_path: Path, keys: Any, change: Any, field: str, message: str) -> None:
    family, path = FAMILIES["granitehybrid"], tmp_path / "model.gguf"
    model = random_model(family)
    write_gguf(path, family.arch, gguf_arrays(family, model) | change, {**eps_of(model), **family.keys, **keys})
    with raises(InvalidFileError, param=field, match=message):
        Checkpoint.open(path).read("model.layers.0.mamba.A_log")


@pytest.mark.parametrize(
    ("keys", "field", "message"),
    [
        (
            {"attention.head_count_kv": 2},
            "nemotron_h_moe.attention.head_count_kv",
            r"expected an array of 4 integers, got 2",
        ),
        ({"feed_forward_length": 96}, "nemotron_h_moe.feed_forward_length", r"expected an array of 4 integers, got 96"),
        (
            {"expert_shared_count": 2},
            "nemotron_h_moe.expert_shared_count",
            r"expected 1, the rows of the shared experts, got 2",
        ),
    ],
)
def test_kinds_of_layers_are_checked(tmp_path: Path, keys: Any, field: str, message: str) -> None:
    family, path = HYBRID_FAMILIES["nemotron_h_moe"], tmp_path / "model.gguf"
    write_gguf(path, family.arch, gguf_arrays(family, random_model(family)), {**family.keys, **keys})
    with raises(InvalidFileError, param=field, match=message):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("name", "keys", "field", "message"),
    [
        (
            "gemma4",
            {"attention.value_length_swa": 8},
            "gemma4.attention.value_length_swa",
            r"expected 16, the length of a key in layers",
        ),
        (
            "gemma4",
            {"feed_forward_length": [96, 96, 97, 97]},
            "gemma4.feed_forward_length",
            "expected one width, or its double",
        ),
        (
            "gemma4",
            {"attention.head_count_kv": [2, 1, 1, 1]},
            "gemma4.attention.head_count_kv",
            "expected the same number of heads, at",
        ),
        (
            "gemma4",
            {"attention.sliding_window_pattern": 2},
            "gemma4.attention.sliding_window_pattern",
            "expected an array of 4 booleans",
        ),
        (
            "gemma4 with experts",
            {"expert_feed_forward_length": 41},
            "gemma4.expert_feed_forward_length",
            "expected 40, the col",
        ),
        (
            "gemma3n",
            {"activation_sparsity_scale": [np.nan] * 4},
            "gemma3n.activation_sparsity_scale",
            "sparsity_scale: expected an array of 4 numbers",
        ),
        (
            "gemma3n",
            {"attention.sliding_window": 0},
            "gemma3n.attention.sliding_window",
            r"expected a window in tokens, got 0",
        ),
    ],
)
def test_values_of_shared_layers_are_checked(tmp_path: Path, name: str, keys: Any, field: str, message: str) -> None:
    family, path = GEMMA_FAMILIES[name], tmp_path / "model.gguf"
    model = random_model(family)
    write_gguf(path, family.arch, gguf_arrays(family, model), {**eps_of(model), **family.keys, **keys})
    with raises(InvalidFileError, param=field, match=message):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("name", "divisors", "keys", "field", "message"),
    [
        ("gemma4", [1.0] * 4 + [8.0] * 12, {}, "rope_freqs.weight", r"expected 16 numbers, 1 and then 1e30"),
        ("gemma3n", None, {"rope.scaling.type": "linear"}, "gemma3n.rope.scaling.type", r"expected none, got 'linear'"),
    ],
)
def test_other_positions_of_shared_layers_are_refused(
    tmp_path: Path, name: str, divisors: Any, keys: Any, field: str, message: str
) -> None:
    family, path = GEMMA_FAMILIES[name], tmp_path / "model.gguf"
    model = random_model(family)
    arrays = gguf_arrays(family, model)
    if divisors is not None:
        arrays["rope_freqs.weight"] = np.array(divisors, np.float32)
    write_gguf(path, family.arch, arrays, {**eps_of(model), **family.keys, **keys})
    with raises(UnsupportedError, param=field, match=message):
        Checkpoint.open(path)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_keys_of_layers_that_share_them_are_not_read(tmp_path: Path, name: str) -> None:
    family, path = GEMMA_FAMILIES[name], tmp_path / "model.gguf"
    model = random_model(family)
    arrays = gguf_arrays(family, model)
    unread = {f"blk.3.attn_{part}.weight": arrays[f"blk.1.attn_{part}.weight"] for part in ("k", "v", "k_norm")}
    assert not set(unread) & set(arrays)
    write_gguf(path, family.arch, arrays | unread, {**eps_of(model), **family.keys})
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(path, mode="eager") as llm:
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4


def test_factors_of_experts_are_one_for_each(tmp_path: Path) -> None:
    family, path = GEMMA_FAMILIES["gemma4 with experts"], tmp_path / "model.gguf"
    model = random_model(family)
    arrays = gguf_arrays(family, model) | {"blk.1.ffn_down_exps.scale": np.ones(3, np.float32)}
    write_gguf(path, family.arch, arrays, {**eps_of(model), **family.keys})
    with raises(InvalidFileError, param="blk.1.ffn_down_exps.scale", match="expected 4 "):
        Checkpoint.open(path)


def test_a_tensor_of_q_k_and_v_has_rows_of_all_heads(tmp_path: Path) -> None:
    family, path = FAMILIES["gpt2"], tmp_path / "model.gguf"
    model = random_model(family)
    arrays = gguf_arrays(family, model)
    arrays["blk.1.attn_qkv.weight"] = np.zeros((191, 64), np.float32)
    write_gguf(path, family.arch, arrays, {**eps_of(model), **family.keys})
    with raises(InvalidFileError, param="blk.1.attn_qkv.weight", match="12 heads"):
        Checkpoint.open(path)


def test_a_correction_of_scores_may_be_a_row(tmp_path: Path) -> None:
    """The converter of llama.cpp leaves that of ERNIE 4.5 as it is in the checkpoint."""
    family, path = EXPERT_FAMILIES["ernie4_5-moe"], tmp_path / "model.gguf"
    model = random_model(family)
    arrays = gguf_arrays(family, model)
    biases = [name for name in arrays if "exp_probs_b" in name]
    rows = arrays | {name: arrays[name].reshape(1, -1) for name in biases}
    write_gguf(path, family.arch, rows, {**eps_of(model), **family.keys})
    checkpoint = Checkpoint.open(path)
    corrections = [name for name in checkpoint.tensors if name.endswith("e_score_correction_bias")]
    assert len(corrections) == len(biases) > 0
    for name, stored in zip(sorted(corrections), sorted(biases), strict=True):
        assert np.array_equal(checkpoint.read(name), arrays[stored].reshape(-1))


def test_experts_in_a_tensor_each_are_refused(tmp_path: Path) -> None:
    family, path = FAMILIES["mixtral"], tmp_path / "model.gguf"
    arrays = {"token_embd.weight": np.zeros((300, 64), np.float32),
              "blk.0.ffn_gate.0.weight": np.zeros((96, 64), np.float32)}  # fmt: skip
    write_gguf(path, family.arch, arrays, {"attention.layer_norm_rms_epsilon": 1e-5, **family.keys})
    with raises(UnsupportedError, param="blk.0.ffn_gate_exps.weight"):
        Checkpoint.open(path)


def test_older_forms_of_hybrids_have_the_same_parameters(tmp_path: Path) -> None:
    family = FAMILIES["qwen3next"]
    model = random_model(family)
    arrays, keys = gguf_arrays(family, model), {**eps_of(model), **family.keys}
    write_gguf(tmp_path / "new.gguf", family.arch, arrays, keys)
    del arrays["blk.0.attn_qkv.weight"], arrays["blk.0.attn_gate.weight"]
    arrays["blk.0.ssm_in.weight"] = model.model.layers[0].linear_attn.in_proj_qkvz.weight.detach().numpy()
    arrays["blk.2.nextn.eh_proj.weight"] = np.zeros((64, 64), np.float32)  # predicts further tokens
    write_gguf(tmp_path / "old.gguf", family.arch, arrays, keys | {"block_count": 3, "nextn_predict_layers": 1})
    new, old = (Checkpoint.open(tmp_path / f"{name}.gguf") for name in ("new", "old"))
    assert old.tensors.keys() == new.tensors.keys()
    assert old.config.values == new.config.values
    assert all(np.array_equal(old.read(name), new.read(name)) for name in new.tensors)


@pytest.mark.parametrize(
    ("keys", "change", "field", "message"),
    [
        ({"ssm.time_step_rank": 3}, {}, "qwen35.ssm.time_step_rank", r"expected a multiple of 2"),
        ({"ssm.time_step_rank": 1 << 30}, {}, "qwen35.ssm.time_step_rank", r"expected an integer from 1 to 4096"),
        ({"attention.head_count": 1 << 30}, {}, "qwen35.attention.head_count", r"expected an integer from 1 to 4096"),
        ({"ssm.inner_size": 127}, {}, "qwen35.ssm.inner_size", r"expected a multiple of 4"),
        ({"ssm.inner_size": 256}, {}, "blk.0.ssm_conv1d.weight", "expected 320 rows, got the shape"),
        (
            {"attention.recurrent_layers": [True]},
            {},
            "qwen35.attention.recurrent_layers",
            r"expected an array of 2 booleans, got an ar",
        ),
        (
            {"attention.recurrent_layers": [1, 0]},
            {},
            "qwen35.attention.recurrent_layers",
            r"expected an array of 2 booleans",
        ),
        ({"nextn_predict_layers": 2}, {}, "qwen35.nextn_predict_layers", r"expected an integer from 0 to 1, got 2"),
        ({}, {"blk.0.ssm_a": np.zeros(4, np.float32)}, "blk.0.ssm_a", r"expected finite numbers below 0"),
    ],
)
def test_sizes_of_hybrids_are_checked(tmp_path: Path, keys: Any, change: Any, field: str, message: str) -> None:
    family, path = FAMILIES["qwen35"], tmp_path / "model.gguf"
    model = random_model(family)
    write_gguf(path, family.arch, gguf_arrays(family, model) | change, {**eps_of(model), **family.keys, **keys})
    with raises(InvalidFileError, param=field, match=message):
        Checkpoint.open(path).read("model.layers.0.linear_attn.A_log")
