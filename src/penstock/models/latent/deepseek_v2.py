"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): latent attention, and experts chosen by softmax, perhaps in groups."""

from __future__ import annotations

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.experts.mixture import SharedMixture, read_mixture
from penstock.models.latent.attention import latent_sources, read_latent, read_latent_decoder
from penstock.models.latent.experts import LatentExpertsConfig, LatentExpertsLM
from penstock.nn import Routing

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> LatentExpertsConfig:
        """Read and check config.json; errors name the key."""
        reader.one_of("scoring_func", ("softmax",), "softmax")
        if reader.bool("norm_topk_prob", False):  # its implementations differ
            raise reader.error("norm_topk_prob", "false", True)
        if reader.int("moe_layer_freq", 1) != 1:
            raise reader.error("moe_layer_freq", "1", reader.int("moe_layer_freq"))
        latent = read_latent(
            reader,
            query_rank=1536,
            latent_dim=512,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            interleaved=True,
        )
        decoder = read_latent_decoder(reader, latent.rope_dim, context_len=2048)
        method = reader.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy")
        in_groups = method == "group_limited_greedy"
        routing = Routing(
            reader.int("num_experts_per_tok"),
            factor=reader.float("routed_scaling_factor", 1.0),
            groups=reader.int("n_group") if in_groups else 1,
            kept_groups=reader.int("topk_group") if in_groups else 1,
        )
        num_dense = reader.int("first_k_dense_replace", 0, min=0)
        mixture = read_mixture(
            reader,
            decoder,
            routing,
            experts_key="n_routed_experts",
            sparse=tuple(layer >= num_dense for layer in range(len(decoder.windows))),
            shared_size=reader.int("n_shared_experts", 2) * reader.int("moe_intermediate_size"),
        )
        return LatentExpertsConfig(mixture, latent)


class Network(LatentExpertsLM):
    """The language model."""

    def __init__(self, config: LatentExpertsConfig) -> None:
        super().__init__(config, SharedMixture)

    def tensor_sources(self) -> dict[str, Source | tuple[Source, ...]]:
        """Return where the parameters come from that the checkpoint stores in fused tensors."""
        return latent_sources(self)
