"""Qwen 3: q and k are normalised per head, and head_dim is independent of hidden_size."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.decoders.qwen2 import read_windows
from penstock.nn import RMSNorm
from penstock.nn.base import Tensor

__all__ = ["Config", "Network", "Qwen3Attention"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        return read_decoder(reader, read_windows(reader), head_dim=128, context_len=32768)


class Qwen3Attention(LlamaAttention):
    """Llama's attention, with q and k normalised before the rotation."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__(config, window)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of x, with q and k normalised."""
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [Qwen3Attention(config, window) for window in config.windows])
