"""The families (values of model_type) that Penstock has a network for, found without importing PyTorch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from penstock.config import ConfigReader

__all__ = [
    "BOTH_IN_EACH_LAYER", "DEFAULT_SIZES", "built_in_families", "family_modules", "maps_tensors", "network_type",
    "prompt_masks",
]  # fmt: skip

# A file of a subfolder defines a network if it defines or re-exports a class Network.
_DEFINES_NETWORK: Final = re.compile(
    r"^(class Network\(|from penstock\.models\.\w+\.\w+ import (\w+, )*Network(, \w+)*( +#.*)?$)", re.MULTILINE
)

_MAPS_TENSORS: Final = re.compile(r"^    (def tensor_sources\(|(unread_tensors|tensor_prefix)\b)", re.MULTILINE)

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
    """Return the module of each model_type: the file's name is the model_type, except for the aliases."""
    folder = Path(__file__).parent
    modules = {
        path.stem: f"penstock.models.{path.parent.name}.{path.stem}"
        for path in folder.glob("*/*.py")
        if _DEFINES_NETWORK.search(path.read_text())
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


@cache
def maps_tensors(model_type: str) -> bool:
    """Return True for a family whose file says that a parameter differs from the checkpoint's tensor of its name."""
    module = family_modules().get(model_type)
    if module is None:
        return False
    path = Path(__file__).parent.joinpath(*module.split(".")[2:]).with_suffix(".py")
    return _MAPS_TENSORS.search(path.read_text()) is not None
