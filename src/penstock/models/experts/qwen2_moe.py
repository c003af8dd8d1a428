"""Qwen 2 with experts: Qwen 2's attention, experts, and one shared expert behind a gate of its own."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import GatedMLP, read_decoder, read_num_layers
from penstock.models.decoders.qwen2 import Qwen2Attention, read_windows
from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig, read_mixture, read_sparse_layers
from penstock.nn import Router, Routing, sigmoid_gate
from penstock.nn.base import Tensor

__all__ = ["Config", "GatedSharedMixture", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> MixtureConfig:
        """Read and check config.json; errors name the key."""
        if not reader.bool("qkv_bias", True):
            raise UnsupportedError(f"{reader.file}: qkv_bias: expected true, got false", param="qkv_bias")
        decoder = read_decoder(reader, read_windows(reader), context_len=32768)
        routing = Routing(reader.int("num_experts_per_tok", 4), renormalise=reader.bool("norm_topk_prob", False))
        sparse = read_sparse_layers(reader, read_num_layers(reader))
        shared = reader.int("shared_expert_intermediate_size", 5632)
        return read_mixture(reader, decoder, routing, experts_key="num_experts", sparse=sparse, shared_size=shared)


class GatedSharedMixture(Mixture):
    """The experts that a token chooses, and the shared one."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        hidden_size = config.decoder.hidden_size
        self.shared_expert = GatedMLP(hidden_size, config.shared_size)
        self.shared_expert_gate = Router(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return super().forward(x) + sigmoid_gate(self.shared_expert(x), self.shared_expert_gate(x))


class Network(ExpertsLM):
    """The language model."""

    def __init__(self, config: MixtureConfig) -> None:
        attentions = [Qwen2Attention(config.decoder, window) for window in config.decoder.windows]
        super().__init__(config, attentions, [GatedSharedMixture(config) for _ in attentions])
