"""Qwen 3 with experts: Qwen 3's attention, and experts in the sparse layers."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import read_decoder, read_num_layers
from penstock.models.decoders.qwen3 import Qwen3Attention
from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig, read_mixture, read_sparse_layers
from penstock.nn import Routing

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> MixtureConfig:
        """Read and check config.json; errors name the key."""
        num_layers = read_num_layers(reader)
        window = reader.int("sliding_window", 4096) if reader.bool("use_sliding_window", False) else 0
        decoder = read_decoder(reader, (window,) * num_layers, context_len=32768)
        routing = Routing(reader.int("num_experts_per_tok", 8), renormalise=reader.bool("norm_topk_prob", False))
        key = "num_experts" if reader.has("num_experts") else "num_local_experts"
        sparse = read_sparse_layers(reader, num_layers)
        return read_mixture(reader, decoder, routing, experts_key=key, sparse=sparse)


class Network(ExpertsLM):
    """The language model."""

    def __init__(self, config: MixtureConfig) -> None:
        attentions = [Qwen3Attention(config.decoder, window) for window in config.decoder.windows]
        super().__init__(config, attentions, [Mixture(config) for _ in attentions])
