"""ERNIE 4.5: Llama with rotary positions in adjacent pairs, and one switch for the biases of all linears."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        windows = (0,) * read_num_layers(reader)
        config = read_decoder(
            reader, windows, context_len=131072, head_dim=128, norm_eps=1e-5, theta=500000.0, tied=True
        )
        has_bias = reader.bool("use_bias", False)
        return replace(config, attention_bias=has_bias, mlp_bias=has_bias)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [LlamaAttention(config, window, interleaved=True) for window in config.windows])
