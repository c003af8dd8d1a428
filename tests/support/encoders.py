"""Tiny encoders and decoders without a language-model head, with tokenizers and sentence-transformers' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock.runtime.program import ProgramLimits

__all__ = ["DEBERTA_V3", "LIMITS", "build", "hidden_rows", "sentence_transformer", "write_tokenizer"]

LIMITS = ProgramLimits(96, 3, num_pages=16, context_len=96)
_SMALL: dict[str, Any] = {"vocab_size": 1003, "hidden_size": 80, "intermediate_size": 100, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 100, "pad_token_id": 0}
_SMALL |= {"initializer_range": 0.1}
DEBERTA_V3: dict[str, Any] = {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_V3 |= {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}


def build(kind: type, model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(_SMALL | changes))
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn_like(parameter))
    return model


def hidden_rows(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        rows: np.ndarray = (
            model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).last_hidden_state[0].numpy()
        )
    return rows


def write_tokenizer(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", "##s", "query", ":"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def sentence_transformer(folder: Path, mode: str, *, has_dense: bool) -> tuple[Any, dict[str, np.ndarray]]:
    """Write a BERT with the files of sentence-transformers, and return the model and the dense layer."""
    model = build(transformers.AutoModel, "bert")
    model.save_pretrained(folder)
    write_tokenizer(folder)
    random = np.random.default_rng(5)
    dense = {"linear.weight": random.normal(size=(30, 80)), "linear.bias": random.normal(size=30)}
    dense = {name: array.astype(np.float32) for name, array in dense.items()}
    modules = ["Transformer", "Pooling", *(["Dense"] if has_dense else []), "Normalize"]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(modules) if i)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(modules, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    modes = {"word_embedding_dimension": 80, "pooling_mode_mean_tokens": False, mode: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    if has_dense:
        (folder / "2_Dense").mkdir()
        activation = "torch.nn.modules.activation.Tanh"
        sizes = {"in_features": 80, "out_features": 30, "bias": True, "activation_function": activation}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(sizes))
        save_file(dense, folder / "2_Dense" / "model.safetensors")
    prompts = {"prompts": {"query": "query: ", "plain": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return model, dense
