"""DeepSeek-V3 (arXiv 2412.19437) and Kimi K2: latent attention, and experts chosen in groups with a correction.

Layers that predict further tokens (num_nextn_predict_layers) are not used.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.experts.mixture import CorrectedMixture, extra_layers, read_mixture
from penstock.models.latent.attention import latent_sources, read_latent, read_latent_decoder
from penstock.models.latent.experts import LatentExpertsConfig, LatentExpertsLM
from penstock.nn import Routing

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> LatentExpertsConfig:
        """Read and check config.json; errors name the key."""
        reader.one_of("topk_method", ("noaux_tc",), "noaux_tc")
        reader.one_of("scoring_func", ("sigmoid",), "sigmoid")
        if reader.int("moe_layer_freq", 1) != 1:
            raise reader.error("moe_layer_freq", "1", reader.int("moe_layer_freq"))
        latent = read_latent(
            reader,
            query_rank=1536,
            latent_dim=512,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            interleaved=reader.bool("rope_interleave", True),
        )
        decoder = read_latent_decoder(reader, latent.rope_dim, context_len=4096)
        routing = Routing(
            reader.int("num_experts_per_tok", 8),
            "sigmoid",
            renormalise=reader.bool("norm_topk_prob", True),
            factor=reader.float("routed_scaling_factor", 2.5),
            groups=reader.int("n_group", 8),
            kept_groups=reader.int("topk_group", 4),
            group_rule="best_two",
        )
        num_layers, num_dense = len(decoder.windows), reader.int("first_k_dense_replace", 3, min=0)
        mixture = read_mixture(
            reader,
            decoder,
            routing,
            experts_key="n_routed_experts",
            sparse=tuple(layer >= num_dense for layer in range(num_layers)),
            shared_size=reader.int("n_shared_experts", 1) * reader.int("moe_intermediate_size"),
        )
        return LatentExpertsConfig(replace(mixture, unread=extra_layers(reader, num_layers)), latent)


class Network(LatentExpertsLM):
    """The language model."""

    def __init__(self, config: LatentExpertsConfig) -> None:
        super().__init__(config, CorrectedMixture)

    def tensor_sources(self) -> dict[str, Source | tuple[Source, ...]]:
        """Return where the parameters come from that the checkpoint stores in fused tensors."""
        return latent_sources(self)
