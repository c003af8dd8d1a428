"""GGUF files of T5, UMT5 and an encoder of T5 have the logits and the vectors of their originals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidFileError, UnsupportedError

SIZES: dict[str, Any] = {
    "vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "n_positions": 64,
    "relative_attention_num_buckets": 12, "decoder_start_token_id": 0,
}  # fmt: skip
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", {"num_decoder_layers": 3}),
    "gated": ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": ("UMT5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "encoder": ("T5EncoderModel", {"feed_forward_proj": "gated-gelu"}),
}
ENCODER, DECODER = [3, 5, 7, 11, 13], [0, 17, 19, 23]


def save(path: Path, row: str, changes: dict[str, Any] | None = None) -> transformers.PreTrainedModel:
    """Write a file as llama.cpp's converter does; return the model."""
    torch.manual_seed(2)
    kind, own = ROWS[row]
    config = getattr(transformers, f"{kind.split('T5')[0]}T5Config")(**{**SIZES, **own})
    config._attn_implementation = "eager"
    model: transformers.PreTrainedModel = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim == 1 else 0.2) + ("norm" in name))
    arch = gguf.MODEL_ARCH.T5ENCODER if row == "encoder" else gguf.MODEL_ARCH.T5
    name = gguf.MODEL_ARCH_NAMES[arch]
    names, writer = gguf.get_tensor_name_map(arch, 3), gguf.GGUFWriter(path, name)
    keys: dict[str, Any] = {
        "context_length": 64, "embedding_length": 64, "feed_forward_length": 96, "block_count": 2,
        "attention.head_count": 4, "attention.key_length": 16, "attention.value_length": 16,
        "attention.layer_norm_epsilon": 1e-6, "attention.relative_buckets_count": 12,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    if row != "encoder":
        keys |= {"decoder_block_count": own.get("num_decoder_layers", 2), "decoder_start_token_id": 0}
    for key, value in (keys | (changes or {})).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{name}.{key}", value)
    tied = own.get("tie_word_embeddings", True)
    for key, tensor in model.state_dict().items():
        if key in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight") or (key == "lm_head.weight" and tied):
            continue
        writer.add_tensor(names.get_name(key, (".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("row", ["t5", "gated", "umt5"])
def test_the_logits_are_those_of_the_original(tmp_path: Path, row: str) -> None:
    model = save(tmp_path / "model.gguf", row)
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([ENCODER]), "decoder_input_ids": torch.tensor([DECODER])}
        expected = model(**inputs).logits[0].numpy()
    with LLM(tmp_path / "model.gguf", mode="eager") as llm:
        found = llm.logits([*ENCODER, *DECODER])[len(ENCODER) :]
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_an_encoder_gives_the_vectors_of_its_original(tmp_path: Path) -> None:
    model = save(tmp_path / "model.gguf", "encoder")
    with torch.no_grad():
        expected = model(torch.tensor([ENCODER])).last_hidden_state[0].mean(0).numpy()
    with LLM(tmp_path / "model.gguf", mode="eager") as llm:
        found = np.array(llm.embed(ENCODER, normalize=False).vector)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention.value_length": 8}, InvalidFileError, r"t5\.attention\.value_length: expected 16, got 8"),
        ({"attention.head_count_kv": 2}, InvalidFileError, r"t5\.attention\.head_count_kv: expected 4, got 2"),
        ({"rope.freq_base": 1e4}, UnsupportedError, r"t5\.rope\.freq_base is not supported"),
    ],
)
def test_values_of_a_t5_are_checked(tmp_path: Path, changes: Any, error: Any, message: str) -> None:
    save(tmp_path / "model.gguf", "t5", changes)
    with pytest.raises(error, match=message):
        Checkpoint.open(tmp_path / "model.gguf")
