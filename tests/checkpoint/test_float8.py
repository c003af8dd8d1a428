"""A folder of DeepSeek V3 in 8-bit floats, whose values and logits are those of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from tests.support.quantized_folders import float8_layer, write_folders

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
SIZES = {"vocab_size": 160, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "n_group": 1,
         "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 128, "topk_group": 1,
         "q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 48,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
         "first_k_dense_replace": 1}  # fmt: skip
"""Sizes of whole blocks: transformers takes a block for the size divided by the number of scales."""
IDS = [5, 9, 100, 31, 7, 44]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layer = partial(float8_layer, np.random.default_rng(1), block=128)
    return write_folders(tmp_path_factory.mktemp("deepseek"), FP8, layer, "deepseek_v3", SIZES)[0]


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    """The folder as transformers dequantizes it."""
    config = transformers.FineGrainedFP8Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config, attn_implementation="eager"
    ).eval()


def test_values_are_those_of_transformers(folder: Path, model: transformers.PreTrainedModel) -> None:
    checkpoint, count, state = Checkpoint.open(folder), 0, model.state_dict()
    for name in checkpoint.tensors:
        values = checkpoint.read(name)
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            expert, kind = rest.split(".")[:2]
            fused = state[f"{layer}.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"][int(expert)]
            halves = {"gate_proj": slice(0, len(values)), "up_proj": slice(len(values), None)}
            expected = fused[halves.get(kind, slice(None))]
        else:
            expected = state[name]
        assert np.array_equal(values, expected.numpy()), name
        count += checkpoint.block_scheme(name) == "q8_0"
    assert count == 2 * 5 + 3 + 4 * 3 + 3  # attention, a dense layer, the experts and the shared one


def test_logits_are_those_of_transformers(folder: Path, model: transformers.PreTrainedModel) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(folder, mode="eager", scheme="f32") as llm:
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4 * np.abs(expected).max()
    with LLM(folder) as llm:
        assert llm.info.scheme == "q8_0"
        assert np.linalg.norm(llm.logits(IDS) - expected) < 0.05 * np.linalg.norm(expected)
