"""Qwen3.5 (text): the gated delta rule in three of four layers, and gated attention in the fourth."""

from __future__ import annotations

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.decoder import GatedMLP
from penstock.models.hybrids.delta import DeltaConfig, DeltaLM, norms_and_gates, read_delta

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DeltaConfig:
        """Read and check config.json; errors name the key."""
        reader.int("intermediate_size")  # required: a dense model
        return read_delta(reader)


class Network(DeltaLM):
    """The language model."""

    def __init__(self, config: DeltaConfig) -> None:
        sizes = config.decoder
        super().__init__(config, lambda _: GatedMLP(sizes.hidden_size, sizes.intermediate_size))

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: norms, which the checkpoint stores less 1, and the gate of queries."""
        return norms_and_gates(self)
