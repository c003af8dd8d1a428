"""Small random transformers models as GGUF files: names, forms and keys are those of llama.cpp's converter."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

__all__ = ["FAMILIES", "Family", "eps_of", "gguf_arrays", "in_pairs", "random_model", "write_gguf"]

Kind = gguf.GGMLQuantizationType
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 16, "_attn_implementation": "eager",
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
COUNTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
DELTA_KEYS = {"rope.dimension_count": 4, "full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 16,
              "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 128}  # fmt: skip
MAMBA = {
    "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2, "position_embedding_type": "nope",
}  # fmt: skip
MAMBA_KEYS = {"attention.head_count_kv": [0, 2], "ssm.conv_kernel": 4, "ssm.state_size": 12, "ssm.group_count": 2,
              "ssm.time_step_rank": 8, "ssm.inner_size": 128, "rope.scaling.finetuned": False}  # fmt: skip
SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0]}
SHARED = {"shared_expert_intermediate_size": 48}
SHARED_KEYS: dict[str, Any] = {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 1.5, "residual_multiplier": 0.5}
GRANITE_KEYS = {"attention.scale": 0.3, "embedding_scale": 2.0, "logit_scale": 1.5, "residual_scale": 0.5}


@dataclass(frozen=True)
class Family:
    """A class of transformers, the architecture of the file, and what both need beside the sizes.

    ``plus``: what is added to the norms.  ``has_pairs``: rows of q and k are stored in adjacent pairs.
    ``turn``: changes a tensor to the form of the file.  ``tables``: further tensors.  ``joins``: q, k, v are one.
    ``forms``: the file's tensors that come from one of the model, {} for one in the usual form.
    """

    name: str
    arch: gguf.MODEL_ARCH
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    plus: float = 0.0
    has_pairs: bool = False
    turn: Callable[[str, np.ndarray], np.ndarray] = lambda _, array: array
    tables: Mapping[str, list[float]] = field(default_factory=dict)
    joins: bool = False
    has_head_dim: bool = True
    head: str = "ForCausalLM"
    forms: Callable[[str, np.ndarray], dict[str, np.ndarray]] = lambda _name, _array: {}


def _parts_together(name: str, array: np.ndarray, groups: int = 4, queries: int = 1) -> np.ndarray:
    """Return q, k and v one below another, where transformers has them for each group of heads."""
    if "query_key_value" not in name:
        return array
    rows = array.reshape(groups, queries + 2, -1, *array.shape[1:])
    parts = (rows[:, :queries], rows[:, queries : queries + 1], rows[:, queries + 1 :])
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def _gpt_2(name: str, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.T) if array.ndim == 2 and ".h." in name else array


POST_WINDOWS: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
WINDOW_KEYS = {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False]}
FULL = {"layer_types": ["full_attention"] * 2}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}  # fmt: skip
ORIGINAL = {"original_max_position_embeddings": 64}
THETA = {"rope_theta": 1e4}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
FALCON = {"multi_query": False, "new_decoder_architecture": True, "alibi": False, "bias": False}

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
    "olmo2 with windows": Family(
        "Olmo3",
        gguf.MODEL_ARCH.OLMO2,
        {**POST_WINDOWS,
         "rope_parameters": dict.fromkeys(POST_WINDOWS["layer_types"], {"rope_type": "default"} | THETA)},
        {**WINDOW_KEYS, "rope.freq_base_swa": 1e4},
    ),
    "apertus": Family(
        "Apertus", gguf.MODEL_ARCH.APERTUS, {"pad_token_id": 0, "rope_parameters": {"rope_type": "default"} | THETA}
    ),
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
    "exaone4": Family("Exaone4", gguf.MODEL_ARCH.EXAONE4, POST_WINDOWS | THETA, WINDOW_KEYS),
    "exaone4 without windows": Family("Exaone4", gguf.MODEL_ARCH.EXAONE4, {"sliding_window": None, **FULL} | THETA),
    "ernie4_5": Family("Ernie4_5", gguf.MODEL_ARCH.ERNIE4_5, THETA),
    "seed_oss": Family(
        "SeedOss", gguf.MODEL_ARCH.SEED_OSS, {"attention_bias": True, "attention_out_bias": True} | THETA
    ),
    "hunyuan-dense": Family("HunYuanDenseV1", gguf.MODEL_ARCH.HUNYUAN_DENSE, THETA),
    "glm4": Family(
        "Glm4", gguf.MODEL_ARCH.GLM4, {"attention_bias": True, "pad_token_id": 0, **HALF}, {"rope.dimension_count": 8}
    ),
    "chatglm": Family(
        "Glm",
        gguf.MODEL_ARCH.CHATGLM,
        {"attention_bias": True, "pad_token_id": 0, **HALF},
        {"rope.dimension_count": 8},
        joins=True,
    ),
    "chatglm with q apart": Family(
        "Glm",
        gguf.MODEL_ARCH.CHATGLM,
        {"attention_bias": True, "pad_token_id": 0, **HALF},
        {"rope.dimension_count": 8},
    ),
    "internlm2": Family("Llama", gguf.MODEL_ARCH.INTERNLM2, has_pairs=True),
    "minicpm": Family(
        "Granite",
        gguf.MODEL_ARCH.MINICPM,
        {**GRANITE, "attention_multiplier": 0.25},
        {key: value for key, value in GRANITE_KEYS.items() if key != "attention.scale"},
        has_pairs=True,
    ),
    "starcoder2": Family("Starcoder2", gguf.MODEL_ARCH.STARCODER2, {"sliding_window": None} | THETA),
    "phi2": Family("Phi", gguf.MODEL_ARCH.PHI2, HALF, {"rope.dimension_count": 8}),
    "gptneox": Family(
        "GPTNeoX",
        gguf.MODEL_ARCH.GPTNEOX,
        {"num_key_value_heads": None, "rotary_pct": 0.25, "use_parallel_residual": False},
        {"attention.head_count_kv": 4, "rope.dimension_count": 4, "use_parallel_residual": False},
        turn=_parts_together,
    ),
    "falcon": Family(
        "Falcon",
        gguf.MODEL_ARCH.FALCON,
        {**FALCON, "new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1} | THETA,
        {"attention.head_count_kv": 1, "feed_forward_length": 256},
        turn=lambda name, array: _parts_together(name, array, 1, 4),
        has_head_dim=False,
    ),
    "falcon with two norms": Family(
        "Falcon",
        gguf.MODEL_ARCH.FALCON,
        {**FALCON, "num_kv_heads": 2} | THETA,
        {"feed_forward_length": 256},
        turn=lambda name, array: _parts_together(name, array, 2, 2),
        has_head_dim=False,
    ),
    "gpt2": Family(
        "GPT2",
        gguf.MODEL_ARCH.GPT2,
        {"n_inner": 256},
        {"attention.head_count_kv": 4, "feed_forward_length": 256},
        turn=_gpt_2,
        has_head_dim=False,
        head="LMHeadModel",
    ),
    "bloom": Family(
        "Bloom",
        gguf.MODEL_ARCH.BLOOM,
        {"n_layer": 2, "n_head": 4},
        {"attention.head_count_kv": 4, "feed_forward_length": 256},
        turn=_parts_together,
    ),
    "command-r": Family(
        "Cohere", gguf.MODEL_ARCH.COMMAND_R, {"logit_scale": 0.5, "use_qk_norm": True} | THETA, {"logit_scale": 0.5}
    ),
    "cohere2": Family(
        "Cohere2", gguf.MODEL_ARCH.COHERE2, {"logit_scale": 0.5, **POST_WINDOWS} | THETA,
        {"logit_scale": 0.5, **WINDOW_KEYS},
    ),
    "olmo": Family(
        "Olmo", gguf.MODEL_ARCH.OLMO, {"clip_qkv": 0.5} | THETA, {"attention.clamp_kqv": 0.5}, has_pairs=True
    ),
    "phi3 with longrope": Family(
        "Phi3",
        gguf.MODEL_ARCH.PHI3,
        {"pad_token_id": 0, "sliding_window": None, **ORIGINAL, "rope_parameters": LONGROPE},
        {"rope.dimension_count": 12, "rope.scaling.original_context_length": 64, "attention.sliding_window": 0,
         "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(2) / np.log(64)))},
        tables={"rope_factors_long.weight": LONGROPE["long_factor"],
                "rope_factors_short.weight": LONGROPE["short_factor"]},
    ),
    "lfm2": Family(
        "Lfm2",
        gguf.MODEL_ARCH.LFM2,
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "rope_theta": 1e4},
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
    "granitehybrid": Family(
        "GraniteMoeHybrid",
        gguf.MODEL_ARCH.GRANITE_HYBRID,
        {**GRANITE, **MAMBA, **EXPERTS, "shared_intermediate_size": 48},
        {**GRANITE_KEYS, **MAMBA_KEYS, **COUNTS, "expert_shared_feed_forward_length": 48},
        has_pairs=True,
    ),
    "granitehybrid without experts": Family(
        "GraniteMoeHybrid",
        gguf.MODEL_ARCH.GRANITE_HYBRID,
        {**GRANITE, **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope"},
        {**GRANITE_KEYS, **MAMBA_KEYS, "rope.scaling.finetuned": True},
        has_pairs=True,
    ),
    "qwen3next": Family(
        "Qwen3Next",
        gguf.MODEL_ARCH.QWEN3NEXT,
        {**QWEN_EXPERTS, **SHARED, **DELTA, "norm_topk_prob": True},
        {**COUNTS, **SHARED_KEYS, **DELTA_KEYS},
        plus=1.0,
    ),
    "qwen35": Family("Qwen3_5", gguf.MODEL_ARCH.QWEN35, DELTA, {**DELTA_KEYS, **SECTIONS}, plus=1.0),
    "qwen35moe": Family(
        "Qwen3_5Moe",
        gguf.MODEL_ARCH.QWEN35MOE,
        {**QWEN_EXPERTS, **SHARED, **DELTA},
        {**COUNTS, **SHARED_KEYS, **DELTA_KEYS, **SECTIONS},
        plus=1.0,
    ),
}  # fmt: skip


def random_model(family: Family) -> PreTrainedModel:
    """Return a model whose every parameter is random, those of norms and sinks too."""
    torch.manual_seed(1)
    sizes = {key: value for key, value in SIZES.items() if key not in ("head_dim",) or family.has_head_dim}
    prefix = (
        f"{family.name}Text" if family.name in ("Gemma3", "Gemma3n", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else family.name
    )
    config = getattr(transformers, f"{prefix}Config")(**copy.deepcopy({**sizes, **family.config}))
    model: PreTrainedModel = getattr(transformers, f"{family.name}{family.head}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name and not family.plus
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim == 1 else 0.1) + is_scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape) * 0.3)
            elif name.endswith("act_fn.beta"):
                buffer.fill_(0.3)
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.2 * torch.rand(buffer.shape))
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


def _delta_arrays(key: str, array: np.ndarray, arch: gguf.MODEL_ARCH) -> dict[str, np.ndarray]:
    """Return the tensors of a delta layer, as llama.cpp's converter writes them, from one of transformers'."""
    block, part = f"blk.{key.split('.')[2]}", key.split("linear_attn.")[1]
    keys, values, key_dim = 2, 4, 16
    above = 2 * keys * key_dim
    value_dim = {
        "in_proj_qkvz.weight": (array.shape[0] - above) // 2,
        "out_proj.weight": array.shape[-1],
        "in_proj_z.weight": array.shape[0],
    }.get(part, array.shape[0] - above) // values

    def tiled(rows: np.ndarray, size: int) -> np.ndarray:
        if arch == gguf.MODEL_ARCH.QWEN3NEXT:
            return rows
        heads = rows.reshape(keys, values // keys, size, *rows.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)

    if part == "in_proj_qkvz.weight":
        sizes = np.cumsum([key_dim, key_dim, values // keys * value_dim])
        parts = np.split(array.reshape(keys, -1, array.shape[1]), sizes, axis=1)
        q, k, v, z = (np.ascontiguousarray(rows).reshape(-1, array.shape[1]) for rows in parts)
        return {f"{block}.attn_qkv.weight": np.concatenate([q, k, v]), f"{block}.attn_gate.weight": z}
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        own, array = ("attn_qkv", array) if "qkv" in part else ("ssm_conv1d", array.squeeze())
        return {f"{block}.{own}.weight": np.concatenate([array[:above], tiled(array[above:], value_dim)])}
    if part == "out_proj.weight":
        return {f"{block}.ssm_out.weight": np.ascontiguousarray(tiled(array.T.copy(), value_dim).T)}
    if part == "A_log":
        return {f"{block}.ssm_a": -np.exp(tiled(array, 1))}
    names = {"in_proj_z.weight": ("attn_gate.weight", value_dim), "in_proj_b.weight": ("ssm_beta.weight", 1),
             "in_proj_a.weight": ("ssm_alpha.weight", 1), "dt_bias": ("ssm_dt.bias", 1)}  # fmt: skip
    if part in names:
        return {f"{block}.{names[part][0]}": tiled(array, names[part][1])}
    return {f"{block}.{ {'in_proj_ba.weight': 'ssm_ba', 'norm.weight': 'ssm_norm'}[part] }.weight": array}


def _granite_arrays(key: str, array: np.ndarray, has_experts: bool) -> dict[str, np.ndarray]:
    """Return the tensors of a layer of Granite 4 whose forms differ, from one of transformers'; {} for the others."""
    block, part, end = f"blk.{key.split('.')[2]}", key.split(".", 3)[3], "_shexp" if has_experts else ""
    plain = {"mamba.dt_bias": ("ssm_dt.bias", array), "mamba.A_log": ("ssm_a", -np.exp(array[:, None])),
             "mamba.D": ("ssm_d", array[:, None]), "mamba.norm.weight": ("ssm_norm.weight", array.reshape(2, -1)),
             "shared_mlp.output_linear.weight": (f"ffn_down{end}.weight", array)}  # fmt: skip
    if part in plain:
        return {f"{block}.{plain[part][0]}": plain[part][1]}
    if part == "shared_mlp.input_linear.weight":
        return {
            f"{block}.ffn_{own}{end}.weight": rows for own, rows in zip(("gate", "up"), np.split(array, 2), strict=True)
        }
    return {}


def gguf_arrays(family: Family, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return the float32 tensors of the file by name."""
    names = gguf.get_tensor_name_map(family.arch, family.keys.get("block_count", 2))
    result = {name: np.array(values, np.float32) for name, values in family.tables.items()}
    for key, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if (key == "lm_head.weight" and model.config.tie_word_embeddings) or ".act_fn." in key:
            continue
        if key.endswith("e_score_correction_bias"):
            result[f"blk.{key.split('.')[2]}.exp_probs_b.bias"] = array.squeeze()
            continue
        if forms := family.forms(key, array):
            result |= forms
            continue
        if ".experts." in key:
            result |= _experts(key, array, family.name == "GptOss")
            continue
        is_granite = family.arch == gguf.MODEL_ARCH.GRANITE_HYBRID and ".layers." in key
        if is_granite and (granite := _granite_arrays(key, array, "expert_count" in family.keys)):
            result |= granite
            continue
        if ".linear_attn." in key:
            result |= _delta_arrays(key, array, family.arch)
            continue
        array = family.turn(key, array)
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
            short = key.removeprefix("transformer.")
            own = names.get_name(key, (".weight", ".bias")) or names.get_name(short, (".weight", ".bias"))
        result[own] = array.squeeze()
    return _stacked(_joined(result) if family.joins else result)


def _stacked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with those whose names end in "#" and a number as matrices of one."""
    names = {name.split("#")[0] for name in arrays if "#" in name}
    stacks = {own: np.stack([arrays[name] for name in sorted(arrays) if name.split("#")[0] == own]) for own in names}
    return {name: array for name, array in arrays.items() if "#" not in name} | stacks


def _joined(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with q, k and v of each layer as one."""
    result = {name: array for name, array in arrays.items() if not re.search(r"attn_[qkv]\.", name)}
    for block, end in itertools.product(("blk.0", "blk.1"), ("weight", "bias")):
        result[f"{block}.attn_qkv.{end}"] = np.concatenate([arrays[f"{block}.attn_{part}.{end}"] for part in "qkv"])
    return result


LAYER_NORMS = ("starcoder2", "phi", "gpt_neox", "falcon", "gpt2", "bloom", "cohere", "cohere2", "olmo")


def eps_of(model: Any) -> dict[str, Any]:
    """Return the keys whose values are the model's own: the epsilon of norms, and the activation of Apertus."""
    config = model.config
    names = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    eps = next((getattr(config, name) for name in names if hasattr(config, name)), 1e-5)
    is_plain = config.model_type in LAYER_NORMS
    values = model.state_dict() if config.model_type == "apertus" else {}
    activation = {
        f"xielu.{part}": [values[f"model.layers.{layer}.mlp.act_fn.{part}"].item() for layer in range(2)]
        for part in ("alpha_n", "alpha_p", "beta", "eps")
        if values
    }
    return {"attention.layer_norm_epsilon" if is_plain else "attention.layer_norm_rms_epsilon": eps, **activation}


def write_gguf(
    path: Path,
    arch: gguf.MODEL_ARCH,
    arrays: Mapping[str, np.ndarray],
    keys: Mapping[str, Any],
    kind: gguf.GGMLQuantizationType = Kind.F32,
) -> None:
    """Write a file of two layers; matrices have the element type ``kind``, except for routers.

    ``keys`` are those of the architecture, without its name, and of the tokenizer.
    """
    name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(path, name)
    sizes = {
        "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "rope.freq_base": 10000.0,
    }  # fmt: skip
    for key, value in (sizes | dict(keys)).items():
        kinds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        kinds[type(value)](key if key.startswith(("tokenizer.", "xielu.")) else f"{name}.{key}", value)
    for tensor, array in arrays.items():
        is_plain = array.ndim == 1 or tensor.endswith((".scale", ".bias"))
        is_float = is_plain or "ffn_gate_inp" in tensor or "conv" in tensor
        data = array if is_float else gguf.quantize(array, kind)
        writer.add_tensor(tensor, data, raw_dtype=None if is_float else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
