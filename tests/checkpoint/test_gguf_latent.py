"""GGUF files of experts and of latent attention: blocks of the halves of kv_b_proj, and checked values."""

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
from tests.support.errors import raises
from tests.support.gguf_experts import EXPERT_FAMILIES
from tests.support.gguf_models import Family, gguf_arrays, random_model, write_gguf

IDS = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]
EPS = {"attention.layer_norm_rms_epsilon": 1e-6}
WIDE = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "head_dim": 32, "v_head_dim": 32,
        "q_lora_rank": 32}  # fmt: skip
WIDE_KEYS = {
    "attention.kv_lora_rank": 64, "attention.q_lora_rank": 32, "rope.dimension_count": 32, "attention.key_length": 96,
    "attention.value_length": 64, "attention.key_length_mla": 64, "attention.value_length_mla": 32,
}  # fmt: skip


def _halves(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    if not name.endswith("kv_b_proj.weight"):
        return {}
    rows, block = array.reshape(4, 64, 64), f"blk.{name.split('.')[2]}"
    keys = np.ascontiguousarray(rows[:, :32].swapaxes(1, 2))
    return {f"{block}.attn_k_b.weight": keys, f"{block}.attn_v_b.weight": np.ascontiguousarray(rows[:, 32:])}


def test_halves_of_latents_keep_their_blocks(tmp_path: Path) -> None:
    own, kind = EXPERT_FAMILIES["deepseek2"], gguf.GGMLQuantizationType.Q8_0
    config = {**own.config, **WIDE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    keys = {key: value for key, value in own.keys.items() if "scaling" not in key} | WIDE_KEYS
    family = Family("DeepseekV3", own.arch, config, keys, forms=_halves)
    model, path = random_model(family), tmp_path / "model.gguf"
    arrays = gguf_arrays(family, model)
    write_gguf(path, family.arch, arrays, {**EPS, **keys}, kind)
    checkpoint = Checkpoint.open(path)
    for part, name in (("attn_k_b", "k_up_proj"), ("attn_v_b", "v_up_proj")):
        parameter, stacked = f"model.layers.1.self_attn.{name}.weight", arrays[f"blk.1.{part}.weight"]
        assert checkpoint.block_scheme(parameter) == "q8_0"
        blocks = gguf.quantize(stacked.reshape(-1, stacked.shape[2]), kind)
        assert np.array_equal(checkpoint.read_blocks(parameter), blocks)
    with LLM(path, mode="eager", scheme="f32") as exact, LLM(path, mode="eager") as llm:
        expected = exact.logits(IDS)
        assert np.abs(llm.logits(IDS) - expected).max() < 0.05 * np.abs(expected).max()


def test_older_files_have_the_same_logits(tmp_path: Path) -> None:
    own = EXPERT_FAMILIES["deepseek2"]
    sizes = {"attention.head_count_kv": 4, "attention.key_length": 20, "attention.value_length": 20}
    keys = {key: value for key, value in own.keys.items() if not key.endswith("_mla")} | sizes
    family = Family(own.name, own.arch, own.config, keys)
    model = random_model(family)
    write_gguf(tmp_path / "old.gguf", family.arch, gguf_arrays(family, model), {**EPS, **keys})
    write_gguf(tmp_path / "new.gguf", own.arch, gguf_arrays(own, model), {**EPS, **own.keys})
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    for name in ("old", "new"):
        with LLM(tmp_path / f"{name}.gguf", mode="eager") as llm:
            assert np.abs(llm.logits(IDS) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "keys", "error", "message"),
    [
        ("glm4moe", {"expert_gating_func": 1}, UnsupportedError, r"glm4moe\.expert_gating_func: expected 2, got 1"),
        ("deepseek2", {"expert_gating_func": 4}, UnsupportedError, r"expert_gating_func: expected 1, got 4"),
        (
            "glm4moe",
            {"expert_shared_count": 3},
            InvalidFileError,
            "expert_shared_count: expected 2, the rows of the sh",
        ),
        ("ernie4_5-moe", {"interleave_moe_layer_step": 0}, InvalidFileError, "interleave_moe_layer_step: expected an"),
        ("deepseek2", {"attention.head_count": 5}, InvalidFileError, r"attn_q_b\.weight: expected 100 rows, got the"),
        ("deepseek2", {"rope.dimension_count": 20}, InvalidFileError, "dimension_count: expected an integer from 2 to"),
        ("deepseek2", {"attention.temperature_scale": 0.1}, UnsupportedError, "temperature_scale is not supported"),
    ],
)
def test_values_of_experts_are_checked(tmp_path: Path, name: str, keys: Any, error: Any, message: str) -> None:
    family, path = EXPERT_FAMILIES[name], tmp_path / "model.gguf"
    arrays = gguf_arrays(family, random_model(family))
    write_gguf(path, family.arch, arrays, {**EPS, **family.keys, **keys})
    with pytest.raises(error, match=message):
        Checkpoint.open(path)


def test_fused_experts_have_an_even_number_of_rows(tmp_path: Path) -> None:
    family, path = EXPERT_FAMILIES["mistral4"], tmp_path / "model.gguf"
    arrays = gguf_arrays(family, random_model(family))
    arrays["blk.1.ffn_gate_up_exps.weight"] = np.zeros((4, 65, 64), np.float32)
    write_gguf(path, family.arch, arrays, {**EPS, **family.keys})
    with raises(
        InvalidFileError,
        param="blk.1.ffn_gate_up_exps.weight",
        match=r"ffn_gate_up_exps\.weight: expected matrices with an even number of ro",
    ):
        Checkpoint.open(path)
