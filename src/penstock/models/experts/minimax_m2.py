"""MiniMax M2: q and k normalised over all heads, part of each head turns, and a sigmoid router with a correction."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import ConfigReader
from penstock.models.decoder import read_decoder, read_num_layers
from penstock.models.decoders.olmo2 import Olmo2Attention
from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig, read_mixture
from penstock.nn import Routing, route
from penstock.nn.base import nn, torch

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> MixtureConfig:
        """Read and check config.json; errors name the key."""
        decoder = read_decoder(reader, (0,) * read_num_layers(reader), head_dim=128, context_len=196608, theta=5e6)
        if reader.has("rotary_dim"):
            decoder = replace(decoder, rope=replace(decoder.rope, rotary_dim=reader.int("rotary_dim")))
        routing = Routing(reader.int("num_experts_per_tok", 8), "sigmoid", renormalise=True)
        key = "num_local_experts"
        return read_mixture(reader, decoder, routing, experts_key=key, size_key="intermediate_size")


class _Mixture(Mixture):
    """The correction is a parameter of the layer, not of its router."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config, ("w1", "w3", "w2"))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the ids of the experts, each [T, k], of x [T, hidden]."""
        return route(self.gate(x), self.routing, self.e_score_correction_bias)


class Network(ExpertsLM):
    """The language model."""

    def __init__(self, config: MixtureConfig) -> None:
        attentions = [Olmo2Attention(config.decoder, window) for window in config.decoder.windows]
        super().__init__(config, attentions, [_Mixture(config) for _ in attentions], "block_sparse_moe")
