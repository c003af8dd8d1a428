"""Qwen3.5 with experts (text): Qwen3-Next's layers, whose projections the checkpoint stores apart."""

from __future__ import annotations

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.experts.mixture import read_mixture
from penstock.models.experts.qwen2_moe import GatedSharedMixture
from penstock.models.hybrids.delta import DeltaLM, norms_and_gates, read_delta
from penstock.models.hybrids.qwen3_next import Qwen3NextConfig
from penstock.nn import Routing

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Qwen3NextConfig:
        """Read and check config.json; errors name the key."""
        delta = read_delta(reader)
        routing = Routing(reader.int("num_experts_per_tok", 8), renormalise=True)
        shared = reader.int("shared_expert_intermediate_size", 512)
        mixture = read_mixture(reader, delta.decoder, routing, experts_key="num_experts", shared_size=shared)
        return Qwen3NextConfig(delta, mixture)


class Network(DeltaLM):
    """The language model."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        super().__init__(config.delta, lambda _: GatedSharedMixture(config.mixture))

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: norms, which the checkpoint stores less 1, and the gate of queries."""
        return norms_and_gates(self)
