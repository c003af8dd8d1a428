"""Small random transformers models as GGUF files: names, forms and keys are those of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

__all__ = ["FAMILIES", "Family", "gguf_arrays", "in_pairs", "random_model", "write_gguf"]

Kind = gguf.GGMLQuantizationType
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 16, "_attn_implementation": "eager",
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
COUNTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 1.5, "residual_multiplier": 0.5}
GRANITE_KEYS = {"attention.scale": 0.3, "embedding_scale": 2.0, "logit_scale": 1.5, "residual_scale": 0.5}


@dataclass(frozen=True)
class Family:
    """A class of transformers, the architecture of the file, and what both need beside the sizes.

    ``plus``: what is added to the norms.  ``has_pairs``: rows of q and k are stored in adjacent pairs.
    """

    name: str
    arch: gguf.MODEL_ARCH
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    plus: float = 0.0
    has_pairs: bool = False


FAMILIES = {
    "gemma": Family("Gemma", gguf.MODEL_ARCH.GEMMA, plus=1.0),
    "gemma2": Family(
        "Gemma2",
        gguf.MODEL_ARCH.GEMMA2,
        {"sliding_window": 4, "query_pre_attn_scalar": 16},
        {"attention.sliding_window": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        plus=1.0,
    ),
    "gemma3": Family(
        "Gemma3",
        gguf.MODEL_ARCH.GEMMA3,
        {"sliding_window": 4, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        {"attention.sliding_window": 4, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
         "rope.scaling.factor": 8.0, "attention.sliding_window_pattern": [True, False]},
        plus=1.0,
    ),
    "olmo2": Family("Olmo2", gguf.MODEL_ARCH.OLMO2),
    "smollm3": Family("SmolLM3", gguf.MODEL_ARCH.SMOLLM3, {"no_rope_layers": [1, 1], "pad_token_id": 0,
                                                           "rope_theta": 1e4}, has_pairs=True),
    "mixtral": Family(
        "Mixtral", gguf.MODEL_ARCH.LLAMA, EXPERTS, {**COUNTS, "rope.freq_base": 1e6}, has_pairs=True
    ),
    "qwen2moe": Family(
        "Qwen2Moe",
        gguf.MODEL_ARCH.QWEN2MOE,
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 48},
        {**COUNTS, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3moe": Family(
        "Qwen3Moe",
        gguf.MODEL_ARCH.QWEN3MOE,
        {**QWEN_EXPERTS, "norm_topk_prob": True},
        {**COUNTS, "expert_feed_forward_length": 32},
    ),
    "olmoe": Family("Olmoe", gguf.MODEL_ARCH.OLMOE, {"num_experts": 4, "num_experts_per_tok": 2}, COUNTS),
    "granitemoe": Family(
        "GraniteMoe", gguf.MODEL_ARCH.GRANITE_MOE, {**EXPERTS, **GRANITE}, {**COUNTS, **GRANITE_KEYS}, has_pairs=True
    ),
    "gpt-oss": Family(
        "GptOss",
        gguf.MODEL_ARCH.GPT_OSS,
        {**EXPERTS, "sliding_window": 4},
        {**COUNTS, "attention.sliding_window": 4, "rope.freq_base": 150000.0, "rope.scaling.type": "yarn",
         "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096},
    ),
    "lfm2": Family(
        "Lfm2",
        gguf.MODEL_ARCH.LFM2,
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "rope_theta": 1e4},
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
}  # fmt: skip


def random_model(family: Family) -> PreTrainedModel:
    """Return a model whose every parameter is random, those of norms and sinks too."""
    torch.manual_seed(1)
    prefix = "Gemma3Text" if family.name == "Gemma3" else family.name
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **family.config})
    model: PreTrainedModel = getattr(transformers, f"{family.name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name and not family.plus
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim == 1 else 0.1) + is_scale)
    return model


def in_pairs(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows as llama.cpp's converter stores them: adjacent pairs instead of halves."""
    shape = (num_heads, 2, len(array) // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(array.reshape(shape).swapaxes(1, 2)).reshape(array.shape)


def _experts(name: str, array: np.ndarray, is_gpt_oss: bool) -> dict[str, np.ndarray]:
    """Return the tensors of the experts of a layer, as the file has them, from one of transformers' two."""
    block = f"blk.{name.split('.')[2]}"
    end = "bias" if name.endswith("_bias") else "weight"
    if is_gpt_oss and end == "weight":
        array = array.swapaxes(1, 2)
    if "down_proj" in name:
        return {f"{block}.ffn_down_exps.{end}": np.ascontiguousarray(array)}
    half = array.shape[1] // 2
    parts = (array[:, ::2], array[:, 1::2]) if is_gpt_oss else (array[:, :half], array[:, half:])
    names = (f"{block}.ffn_gate_exps.{end}", f"{block}.ffn_up_exps.{end}")
    return {own: np.ascontiguousarray(part) for own, part in zip(names, parts, strict=True)}


def gguf_arrays(family: Family, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return the float32 tensors of the file by name."""
    names, result = gguf.get_tensor_name_map(family.arch, 2), {}
    for key, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".experts." in key:
            result |= _experts(key, array, family.name == "GptOss")
            continue
        for part, num_heads in (("q_proj", 4), ("k_proj", 2)):
            if family.has_pairs and part in key:
                array = in_pairs(array, num_heads)
        if "norm" in key:
            array = array + np.float32(family.plus)
        if ".router." in key or ".mlp.gate." in key:
            own = f"blk.{key.split('.')[2]}.ffn_gate_inp.{key.rsplit('.', 1)[1]}"
        elif key.endswith("sinks"):
            own = f"blk.{key.split('.')[2]}.attn_sinks.weight"
        else:
            own = names.get_name(key, (".weight", ".bias"))
        result[own] = array.squeeze()
    return result


def write_gguf(
    path: Path,
    arch: gguf.MODEL_ARCH,
    arrays: Mapping[str, np.ndarray],
    keys: Mapping[str, Any],
    kind: gguf.GGMLQuantizationType = Kind.F32,
) -> None:
    """Write a file of two layers; matrices have the element type ``kind``, except for routers."""
    name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(path, name)
    sizes = {
        "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "rope.freq_base": 10000.0,
    }  # fmt: skip
    for key, value in (sizes | dict(keys)).items():
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        kinds[type(value)](f"{name}.{key}", value)
    for tensor, array in arrays.items():
        is_float = array.ndim == 1 or "ffn_gate_inp" in tensor or tensor.endswith(".bias") or "conv.conv" in tensor
        data = array if is_float else gguf.quantize(array, kind)
        writer.add_tensor(tensor, data, raw_dtype=None if is_float else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
