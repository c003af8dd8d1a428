"""GLM-4.7-Flash: latent attention, and the experts of GLM 4.5 with dense layers where mlp_layer_types says so."""

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
        latent = read_latent(
            reader,
            query_rank=768,
            latent_dim=512,
            nope_dim=192,
            rope_dim=64,
            value_dim=256,
            interleaved=reader.bool("rope_interleave", True),
        )
        decoder = read_latent_decoder(reader, latent.rope_dim, context_len=202752, norm_eps=1e-5)
        routing = Routing(
            reader.int("num_experts_per_tok", 4),
            "sigmoid",
            renormalise=reader.bool("norm_topk_prob", True),
            factor=reader.float("routed_scaling_factor", 1.8),
            groups=reader.int("n_group", 1),
            kept_groups=reader.int("topk_group", 1),
            group_rule="best_two",
        )
        num_layers = len(decoder.windows)
        mixture = read_mixture(
            reader,
            decoder,
            routing,
            experts_key="n_routed_experts",
            sparse=_read_sparse(reader, num_layers),
            shared_size=reader.int("n_shared_experts", 1) * reader.int("moe_intermediate_size", 1536),
        )
        return LatentExpertsConfig(replace(mixture, unread=extra_layers(reader, num_layers)), latent)


def _read_sparse(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return which layers are mixtures, from mlp_layer_types or else from first_k_dense_replace."""
    kinds = reader.text_list("mlp_layer_types")
    if kinds is None:
        num_dense = reader.int("first_k_dense_replace", 1, min=0)
        return tuple(layer >= num_dense for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise reader.error("mlp_layer_types", f"one entry for each of {num_layers} layers", len(kinds))
    for kind in kinds:
        if kind not in ("dense", "sparse"):
            raise reader.error("mlp_layer_types", "dense or sparse", kind)
    return tuple(kind == "sparse" for kind in kinds)


class Network(LatentExpertsLM):
    """The language model."""

    def __init__(self, config: LatentExpertsConfig) -> None:
        super().__init__(config, CorrectedMixture)

    def tensor_sources(self) -> dict[str, Source | tuple[Source, ...]]:
        """Return where the parameters come from that the checkpoint stores in fused tensors."""
        return latent_sources(self)
