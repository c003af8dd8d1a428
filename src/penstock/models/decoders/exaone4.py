"""EXAONE 4: norms behind attention and feed-forward, q and k normalised per head.

In a model with sliding windows the layers with full attention have no rotary positions.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.config import ConfigReader
from penstock.models.decoder import (
    CausalLM,
    DecoderConfig,
    PostNormLayer,
    read_decoder,
    read_num_layers,
    windows_by_type,
)
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import RMSNorm
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        num_layers = read_num_layers(reader)
        window = reader.int("sliding_window", 4096)
        if "sliding_window" in reader.values and not reader.has("sliding_window"):
            window = 0
        kinds = ["full_attention"] * num_layers
        if window and not reader.has("layer_types"):
            pattern = reader.int("sliding_window_pattern", 4)
            kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
        windows = windows_by_type(reader, window, kinds)
        config = read_decoder(reader, windows, context_len=2048, norm_eps=1e-5)
        return replace(config, rope_layers=tuple(not window or bool(own) for own in windows))


class Exaone4Attention(LlamaAttention):
    """Llama's attention, with q and k normalised before the rotation."""

    def __init__(self, config: DecoderConfig, window: int, *, rope: bool) -> None:
        super().__init__(config, window, rope=rope)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of x, with q and k normalised."""
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        layers = zip(config.windows, config.rope_layers, strict=True)
        super().__init__(config, [Exaone4Attention(config, own, rope=rope) for own, rope in layers], PostNormLayer)
