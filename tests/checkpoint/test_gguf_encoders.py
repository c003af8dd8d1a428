"""GGUF files of ModernBERT and EuroBERT have the vectors of the models that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import EuroBertConfig, EuroBertModel, ModernBertConfig, ModernBertModel, PreTrainedModel

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidFileError, UnsupportedError
from tests.support.errors import raises
from tests.support.gguf_models import write_gguf

IDS = [3, 5, 7, 11, 13, 17, 19, 23]
SIZES: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "pad_token_id": 0,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
MODERN_KEYS: dict[str, Any] = {
    "block_count": 3, "attention.causal": False, "attention.layer_norm_epsilon": 1e-5, "attention.sliding_window": 4,
    "attention.sliding_window_pattern": 3, "rope.freq_base": 1e5, "rope.freq_base_swa": 1e3, "vocab_size": 90,
    "rope.scaling.type": "none", "hidden_activation": "gelu", "pooling_type": 2,
}  # fmt: skip
EURO_KEYS: dict[str, Any] = {
    "attention.causal": False, "attention.layer_norm_rms_epsilon": 1e-5, "rope.scaling.type": "none",
    "pooling_type": 1, "vocab_size": 90,
}  # fmt: skip


def randomise(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + ("norm" in name))


def save_modern(path: Path, keys: dict[str, Any]) -> ModernBertModel:
    """Write the file of a ModernBERT of three layers; return the model."""
    torch.manual_seed(3)
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}  # fmt: skip
    config = ModernBertConfig(**SIZES, num_hidden_layers=3, local_attention=4, rope_parameters=rope)
    config._attn_implementation = "eager"
    model = ModernBertModel(config).eval()
    randomise(model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MODERN_BERT, 3)
    arrays = {names.get_name(key, (".weight", ".bias")): value.numpy() for key, value in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "modern-bert")
    sizes = {"context_length": 128, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4}
    kinds = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
    for key, value in (sizes | keys).items():
        kinds[type(value)](f"modern-bert.{key}", value)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_modern_bert_gives_the_vectors_of_its_original(tmp_path: Path) -> None:
    model = save_modern(tmp_path / "model.gguf", MODERN_KEYS)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).last_hidden_state[0, 0].numpy()
    with LLM(tmp_path / "model.gguf", mode="eager") as llm:
        found = llm.embed(IDS).vector
    assert np.abs(found - expected / np.linalg.norm(expected)).max() < 1e-5


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"pooling_type": 4}, UnsupportedError, r"pooling_type: expected 0 \(none\), 1 \(mean\), 2 \(cls\) or 3"),
        ({"hidden_activation": "silu"}, UnsupportedError, "hidden_activation: expected one of gelu"),
        ({"rope.scaling.type": "yarn"}, UnsupportedError, r"rope\.scaling\.type: expected none, got 'yarn'"),
        ({"attention.sliding_window": 0}, InvalidFileError, "sliding_window: expected an integer from 1 to"),
    ],
)
def test_values_of_a_modern_bert_are_checked(tmp_path: Path, keys: Any, error: Any, message: str) -> None:
    save_modern(tmp_path / "model.gguf", MODERN_KEYS | keys)
    with pytest.raises(error, match=message), LLM(tmp_path / "model.gguf", mode="eager"):
        pass


def save_euro(path: Path, keys: dict[str, Any]) -> EuroBertModel:
    """Write the file of a EuroBERT; return the model."""
    torch.manual_seed(4)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = EuroBertConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2, rope_parameters=rope)
    config._attn_implementation = "eager"
    model = EuroBertModel(config).eval()
    randomise(model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.EUROBERT, 2)
    arrays = {names.get_name(key, (".weight",)): value.numpy() for key, value in model.state_dict().items()}
    write_gguf(path, gguf.MODEL_ARCH.EUROBERT, arrays, keys)
    return model


def test_a_eurobert_gives_the_vectors_of_its_original(tmp_path: Path) -> None:
    model = save_euro(tmp_path / "model.gguf", EURO_KEYS)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).last_hidden_state[0].mean(0).numpy()
    with LLM(tmp_path / "model.gguf", mode="eager") as llm:
        found = llm.embed(IDS).vector
    assert np.abs(found - expected / np.linalg.norm(expected)).max() < 1e-5


def test_a_eurobert_that_is_causal_is_refused(tmp_path: Path) -> None:
    save_euro(tmp_path / "model.gguf", EURO_KEYS | {"attention.causal": True})
    with raises(UnsupportedError, param="eurobert.attention.causal"):
        Checkpoint.open(tmp_path / "model.gguf")
