"""GGUF files of Baichuan: rotary positions or ALiBi by the number of layers, and rows of length 1 in the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.weights import GgufFile, GgufSource, GgufWeights
from tests.support.gguf_models import in_pairs, write_gguf
from tests.support.own_references import Baichuan

IDS = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def model_of(num_layers: int, **changes: Any) -> Baichuan:
    torch.manual_seed(1)
    values = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": num_layers,
              "num_attention_heads": 4, "rms_norm_eps": 1e-6}  # fmt: skip
    model = Baichuan(values | changes)
    model.fill()
    return model


def arrays_of(model: Baichuan) -> dict[str, np.ndarray]:
    """Return the tensors of the file, as llama.cpp's converter writes them."""
    weights = {name: tensor.numpy() for name, tensor in model.weights.items()}
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    arrays = {f"{own}.weight": weights[f"{name}.weight"] for own, name in top.items()}
    for layer in range(model.num_layers):
        prefix, block = f"model.layers.{layer}.", f"blk.{layer}."
        arrays |= {f"{block}{own}.weight": weights[f"{prefix}{name}.weight"] for name, own in NAMES.items()}
        q, k, v = np.split(weights[f"{prefix}self_attn.W_pack.weight"], 3)
        arrays |= {f"{block}attn_q.weight": in_pairs(q, 4), f"{block}attn_k.weight": in_pairs(k, 4),
                   f"{block}attn_v.weight": v}  # fmt: skip
    return arrays


def write(path: Path, model: Baichuan) -> None:
    keys = {"block_count": model.num_layers, "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": 16, "tensor_data_layout": "Meta AI original pth"}  # fmt: skip
    write_gguf(path, gguf.MODEL_ARCH.BAICHUAN, arrays_of(model), keys)


@pytest.mark.parametrize("num_layers", [2, 40])
def test_the_logits_are_those_of_its_original(tmp_path: Path, num_layers: int) -> None:
    model = model_of(num_layers, **({"max_position_embeddings": 128} if num_layers == 2 else {}))
    write(tmp_path / "model.gguf", model)
    expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(tmp_path / "model.gguf", mode="eager") as llm:
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4 * np.abs(expected).max()


def test_rows_of_the_head_of_baichuan_2_have_length_1(tmp_path: Path) -> None:
    model = model_of(1, max_position_embeddings=128, vocab_size=125696, hidden_size=32, intermediate_size=32)
    path = tmp_path / "model.gguf"
    arrays = {name: array for name, array in arrays_of(model).items() if not name.startswith("blk")}
    write_gguf(path, gguf.MODEL_ARCH.BAICHUAN, arrays, {"attention.layer_norm_rms_epsilon": 1e-6})
    checkpoint = Checkpoint.open(path)
    assert np.allclose(np.linalg.norm(checkpoint.read("lm_head.weight"), axis=1), 1, atol=1e-6)
    assert np.array_equal(checkpoint.read("model.embed_tokens.weight"), arrays["token_embd.weight"])


def test_rows_of_length_1_are_no_blocks(tmp_path: Path) -> None:
    values, path = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32), tmp_path / "model.gguf"
    values[2], kind = 0, gguf.GGMLQuantizationType.Q8_0
    write_gguf(path, gguf.MODEL_ARCH.LLAMA, {"a.weight": values}, {}, kind)
    file = GgufWeights(GgufFile(path), {"a": GgufSource("a.weight", is_unit=True)})
    expected = gguf.dequantize(gguf.quantize(values, kind), kind)
    assert file.block_scheme("a") is None
    assert np.allclose(file.read("a"), expected / np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-9))
