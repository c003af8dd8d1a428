"""Mixtral: Llama's attention, and experts of which each token takes the best two."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig, read_mixture
from penstock.nn import Routing

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> MixtureConfig:
        """Read and check config.json; errors name the key."""
        window = reader.int("sliding_window") if reader.has("sliding_window") else 0
        decoder = read_decoder(
            reader, (window,) * read_num_layers(reader), context_len=131072, norm_eps=1e-5, theta=1e6
        )
        routing = Routing(reader.int("num_experts_per_tok", 2), renormalise=True)
        key = "num_local_experts"
        return read_mixture(reader, decoder, routing, experts_key=key, size_key="intermediate_size")


class Network(ExpertsLM):
    """The language model."""

    def __init__(self, config: MixtureConfig) -> None:
        attentions = [LlamaAttention(config.decoder, window) for window in config.decoder.windows]
        mixtures = [Mixture(config, ("w1", "w3", "w2")) for _ in attentions]
        super().__init__(config, attentions, mixtures, "block_sparse_moe")
