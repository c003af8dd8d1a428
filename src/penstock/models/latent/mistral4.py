"""Mistral 4: latent attention, and experts chosen by softmax in groups.

Queries are scaled by the logarithm of their position behind the context that the model was trained with
(llama_4_scaling_beta).  That scale is not computed, so the context ends there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.experts.mixture import SharedMixture, read_mixture
from penstock.models.latent.attention import latent_sources, read_latent, read_latent_decoder
from penstock.models.latent.experts import LatentExpertsConfig, LatentExpertsLM
from penstock.nn import Routing

__all__ = ["Config", "Network"]

_BETA: Final = "llama_4_scaling_beta"
_ORIGINAL: Final = "original_max_position_embeddings"
_ROPE: Final[dict[str, Any]] = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    _ORIGINAL: 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}
"""The rotary positions of a config without rope_parameters."""


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> LatentExpertsConfig:
        """Read and check config.json; errors name the key."""
        section = reader.object("rope_parameters") or ConfigReader(_ROPE, reader.file)
        beta = section.float(_BETA, 0.0)
        # These keys say nothing about the rotary dimensions, which are those of qk_rope_head_dim.
        others = (_BETA, "max_position_embeddings", "partial_rotary_factor")
        rope = {key: value for key, value in section.values.items() if key not in others}
        reader = ConfigReader(reader.values | {"rope_parameters": rope}, reader.file)
        latent = read_latent(
            reader,
            query_rank=1024,
            latent_dim=256,
            nope_dim=64,
            rope_dim=64,
            value_dim=128,
            interleaved=reader.bool("rope_interleave", True),
        )
        decoder = read_latent_decoder(reader, latent.rope_dim, context_len=1048576)
        if beta:
            decoder = replace(decoder, context_len=min(decoder.context_len, section.int(_ORIGINAL)))
        routing = Routing(
            reader.int("num_experts_per_tok", 4),
            renormalise=reader.bool("norm_topk_prob", True),
            factor=reader.float("routed_scaling_factor", 1.0),
            groups=reader.int("n_group", 1),
            kept_groups=reader.int("topk_group", 1),
            group_rule="best_two",
        )
        num_dense = reader.int("first_k_dense_replace", 0, min=0)
        mixture = read_mixture(
            reader,
            decoder,
            routing,
            experts_key="n_routed_experts",
            sparse=tuple(layer >= num_dense for layer in range(len(decoder.windows))),
            shared_size=reader.int("n_shared_experts", 1) * reader.int("moe_intermediate_size", 2048),
        )
        return LatentExpertsConfig(mixture, latent)


class Network(LatentExpertsLM):
    """The language model."""

    def __init__(self, config: LatentExpertsConfig) -> None:
        super().__init__(config, SharedMixture)

    def tensor_sources(self) -> dict[str, Source | tuple[Source, ...]]:
        """Return where the parameters come from that the checkpoint stores in fused tensors."""
        return latent_sources(self)
