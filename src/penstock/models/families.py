"""The families (values of model_type) that Penstock has a network for; this module imports no network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from penstock.config import ConfigReader

__all__ = [
    "BOTH_IN_EACH_LAYER", "DEFAULT_SIZES", "built_in_families", "family_modules", "maps_tensors", "network_type",
    "prompt_masks",
]  # fmt: skip

_FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "decoders": (
        "apertus", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "granite",
        "hunyuan_v1_dense", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
    ),
    "encoder_decoder": ("t5", "umt5"),
    "encoders": (
        "albert", "bert", "deberta-v2", "distilbert", "electra", "eurobert", "modernbert", "mpnet", "nomic_bert",
        "roberta",
    ),
    "experts": (
        "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "minimax_m2", "mixtral", "olmoe",
        "qwen2_moe", "qwen3_moe",
    ),
    "hybrids": (
        "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_next",
    ),
    "latent": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4"),
    "layer_norm": (
        "bloom", "cohere", "cohere2", "falcon", "gpt2", "gpt_neox", "olmo", "phi", "starcoder2",
    ),
    "published": ("baichuan", "chatglm", "chatglm1", "internlm", "internlm2", "internlm3", "minicpm"),
    "shared_kv": ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
    "sub_norms": ("bitnet",),
}  # fmt: skip
"""The values of model_type that have a network, by the folder of their file; its name has underscores for hyphens."""

_READ_AS_STORED: Final = frozenset({
    "bitnet", "cohere2", "ernie4_5", "eurobert", "exaone4", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "internlm3", "lfm2", "llama", "minimax_m2", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
})  # fmt: skip
"""The families each of whose parameters equals the checkpoint's tensor of its name."""

_ALIASES: Final[dict[str, str]] = {"camembert": "roberta", "kimi_k2": "deepseek_v3", "xlm-roberta": "roberta"}
"""Further values of model_type, with the file name of the family whose network they have."""

BOTH_IN_EACH_LAYER: Final = ("falcon_h1",)
"""Hybrids each of whose layers has attention and a recurrent state, so that no key tells which layer has which."""

DEFAULT_SIZES: Final[dict[str, dict[str, int]]] = {
    "gemma3": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""The sizes that the config.json of published folders leaves out, by model_type: transformers' defaults."""


@cache
def family_modules() -> dict[str, str]:
    """Return the module of each model_type."""
    modules = {
        name: f"penstock.models.{folder}.{name.replace('-', '_')}"
        for folder, names in _FAMILIES.items()
        for name in names
    }
    return modules | {alias: modules[name] for alias, name in _ALIASES.items()}


def built_in_families() -> tuple[str, ...]:
    """Return every model_type that has a network here, sorted."""
    return tuple(sorted(family_modules()))


def network_type(values: Mapping[str, Any]) -> str:
    """Return the family of a config with a model_type: "chatglm1" for the chatglm whose positions have two parts."""
    model_type: str = values["model_type"]
    return "chatglm1" if model_type == "chatglm" and values.get("position_encoding_2d") is True else model_type


def prompt_masks(config: ConfigReader) -> dict[int, str]:
    """Return the tokens, by priority, whose place in a prompt decides the positions of its answer, and their keys."""
    if not config.has("model_type") or network_type(config.values) != "chatglm1":
        return {}
    tokens = {"gmask_token_id": 130001, "mask_token_id": 130000}
    return {config.int(key, token, min=0): key for key, token in tokens.items()}


def maps_tensors(model_type: str) -> bool:
    """Return True for a family with a parameter that differs from the checkpoint's tensor of its name."""
    return model_type in family_modules() and _ALIASES.get(model_type, model_type) not in _READ_AS_STORED
