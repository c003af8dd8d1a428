"""GLM 4.5 to 4.7: a sigmoid router with a correction, shared experts, and dense layers at the beginning."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import ConfigReader
from penstock.models.decoder import DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.experts.mixture import CorrectedMixture, ExpertsLM, MixtureConfig, extra_layers, read_mixture
from penstock.nn import Linear, RMSNorm, Routing
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> MixtureConfig:
        """Read and check config.json; errors name the key."""
        num_layers = read_num_layers(reader)
        decoder = read_decoder(reader, (0,) * num_layers, context_len=131072, norm_eps=1e-5, rotary_share=0.5)
        routing = Routing(
            reader.int("num_experts_per_tok", 8),
            "sigmoid",
            renormalise=reader.bool("norm_topk_prob", True),
            factor=reader.float("routed_scaling_factor", 1.0),
            groups=reader.int("n_group", 1),
            kept_groups=reader.int("topk_group", 1),
            group_rule="best_two",
        )
        num_dense = reader.int("first_k_dense_replace", 1, min=0)
        sparse = tuple(layer >= num_dense for layer in range(num_layers))
        shared = reader.int("n_shared_experts", 1) * reader.int("moe_intermediate_size", 1408)
        config = read_mixture(
            reader, decoder, routing, experts_key="n_routed_experts", sparse=sparse, shared_size=shared
        )
        unread = extra_layers(reader, num_layers)
        return replace(config, qk_norm=reader.bool("use_qk_norm", False), unread=unread)


class _Attention(LlamaAttention):
    """Llama's attention with biases on q, k and v only, and optional norms of q and k."""

    def __init__(self, config: DecoderConfig, qk_norm: bool) -> None:
        super().__init__(config, 0)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of x, with q and k normalised if the config says so."""
        q, k, v = super().project(x)
        if self.q_norm is None or self.k_norm is None:
            return q, k, v
        return self.q_norm(q), self.k_norm(k), v


class Network(ExpertsLM):
    """The language model."""

    unread_tensors: tuple[str, ...] = ()

    def __init__(self, config: MixtureConfig) -> None:
        attentions = [_Attention(config.decoder, config.qk_norm) for _ in config.decoder.windows]
        super().__init__(config, attentions, [CorrectedMixture(config) for _ in attentions])
        self.unread_tensors = config.unread
