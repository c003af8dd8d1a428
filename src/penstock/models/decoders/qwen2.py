"""Qwen 2 and 2.5: biases on q, k and v, and optional sliding windows on the later layers."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers, windows_by_type
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import Linear

__all__ = ["Config", "Network", "read_windows"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        return read_decoder(reader, read_windows(reader), context_len=32768)


def read_windows(reader: ConfigReader) -> tuple[int, ...]:
    """Return the window of each layer, from layer_types or else from max_window_layers."""
    num_layers = read_num_layers(reader)
    window = reader.int("sliding_window", 4096) if reader.bool("use_sliding_window", False) else 0
    if "sliding_window" in reader.values and not reader.has("sliding_window"):
        window = 0
    first = reader.int("max_window_layers", 28, min=0)
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return windows_by_type(reader, window, kinds)


class Qwen2Attention(LlamaAttention):
    """Llama's attention with biases on q, k and v only."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__(replace(config, attention_bias=True), window)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [Qwen2Attention(config, window) for window in config.windows])
