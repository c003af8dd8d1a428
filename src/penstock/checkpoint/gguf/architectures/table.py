"""The table of architectures: by the name in a file, and by the model_type of a checkpoint folder."""

from __future__ import annotations

from typing import Final

from penstock.checkpoint.gguf.architectures.architecture import Architecture
from penstock.checkpoint.gguf.architectures.dense import DENSE
from penstock.checkpoint.gguf.architectures.encoder import ENCODERS
from penstock.checkpoint.gguf.architectures.experts import EXPERTS, MIXTRAL
from penstock.checkpoint.gguf.architectures.hybrids import GRANITE_HYBRID, HYBRIDS
from penstock.checkpoint.gguf.architectures.latent import DEEPSEEK_3, LATENT, has_sigmoid_experts
from penstock.checkpoint.gguf.architectures.layer_norm import LAYER_NORMS
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
    **{name: Architecture(model_type) for name, model_type in ENCODERS.items()},
}
_WITH_EXPERTS: Final = {"llama": MIXTRAL, "granitehybrid": GRANITE_HYBRID}
"""Architectures that have experts if the number of them is not 0."""


def find_architecture(metadata: Metadata) -> tuple[str, Architecture]:
    """Return the architecture of a file, with its name; UnsupportedError lists those that Penstock runs."""
    name = metadata.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{metadata.file}: general.architecture: expected one of {', '.join(_ARCHITECTURES)}, found {show(name)}",
            param="general.architecture",
        )
    if name in _WITH_EXPERTS and metadata.integer(f"{name}.expert_count", 0):
        return name, _WITH_EXPERTS[name]
    if name == "deepseek2" and has_sigmoid_experts(metadata, name):
        return name, DEEPSEEK_3
    return name, _ARCHITECTURES[name]


def architecture_of(model_type: str) -> tuple[str, Architecture] | None:
    """Return the architecture that a file of a family has, with its name; None for a family without one."""
    for name, architecture in {**_ARCHITECTURES, "llama-moe": MIXTRAL, "deepseek2-sigmoid": DEEPSEEK_3}.items():
        if architecture.model_type == {"mistral": "llama"}.get(model_type, model_type):
            return name.removesuffix("-moe").removesuffix("-sigmoid"), architecture
    return None
