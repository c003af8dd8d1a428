"""The table of architectures: by the name in a file, and by the model_type of a checkpoint folder."""

from __future__ import annotations

from typing import Final

from penstock.checkpoint.gguf.architectures.architecture import GRANITE_FACTORS, WINDOW, Architecture
from penstock.checkpoint.gguf.architectures.dense import DENSE, OLMO_3
from penstock.checkpoint.gguf.architectures.encoder import ENCODERS
from penstock.checkpoint.gguf.architectures.experts import EXPERTS, MIXTRAL
from penstock.checkpoint.gguf.architectures.hybrids import BAMBA, GRANITE_HYBRID, HYBRIDS
from penstock.checkpoint.gguf.architectures.latent import DEEPSEEK_3, LATENT, has_sigmoid_experts
from penstock.checkpoint.gguf.architectures.layer_norm import LAYER_NORMS
from penstock.checkpoint.gguf.architectures.shared_kv import SHARED_KV
from penstock.checkpoint.gguf.architectures.t5 import T5_ARCHITECTURES
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.config import show
from penstock.errors import UnsupportedError

__all__ = ["architecture_of", "find_architecture"]

_ARCHITECTURES: Final[dict[str, Architecture]] = {
    **DENSE,
    **EXPERTS,
    **HYBRIDS,
    **LATENT,
    **LAYER_NORMS,
    **SHARED_KV,
    **{name: Architecture(model_type) for name, model_type in (ENCODERS | T5_ARCHITECTURES).items()},
}
_OTHERS: Final = {
    "llama": ("expert_count", MIXTRAL),
    "granitehybrid": ("expert_count", GRANITE_HYBRID),
    "olmo2": (WINDOW, OLMO_3),
}
"""Architectures that are others if the number of a key is not 0."""
_SAME: Final = {"mistral": "llama", "internlm3": "llama", "glm4_moe_lite": "deepseek_v3", "umt5": "t5"}
"""Families whose files are those of another one."""


def find_architecture(metadata: Metadata) -> tuple[str, Architecture]:
    """Return the architecture of a file, with its name; UnsupportedError lists those that Penstock runs."""
    name = metadata.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{metadata.file}: general.architecture: expected one of {', '.join(_ARCHITECTURES)}, got {show(name)}",
            param="general.architecture",
        )
    if name in _OTHERS and metadata.integer(f"{name}.{_OTHERS[name][0]}", 0):
        return name, _OTHERS[name][1]
    if name == "granitehybrid" and not any(f"{name}.{key}" in metadata.values for key in GRANITE_FACTORS):
        return name, BAMBA
    if name == "deepseek2" and has_sigmoid_experts(metadata, name):
        return name, DEEPSEEK_3
    return name, _ARCHITECTURES[name]


def architecture_of(model_type: str) -> tuple[str, Architecture] | None:
    """Return the architecture that a file of a family has, with its name; None for a family without one."""
    others = ((name, architecture) for name, (_, architecture) in _OTHERS.items())
    for name, architecture in (*_ARCHITECTURES.items(), *others, ("deepseek2", DEEPSEEK_3), ("granitehybrid", BAMBA)):
        if architecture.model_type == _SAME.get(model_type, model_type):
            return name, architecture
    return None
