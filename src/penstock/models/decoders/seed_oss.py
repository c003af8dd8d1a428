"""Seed-OSS: Llama with biases on q, k and v, and a switch of its own for the bias of the output projection."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import Linear

__all__ = ["Config", "Network", "SeedOssAttention", "SeedOssConfig", "with_output_bias"]


@dataclass(frozen=True)
class SeedOssConfig(DecoderConfig):
    """The sizes of the network; ``out_bias`` is that of the output projection."""

    out_bias: bool = False


def with_output_bias(config: DecoderConfig, *, qkv_bias: bool, out_bias: bool) -> SeedOssConfig:
    """Return ``config`` with the switches for the biases of q, k and v, and of the output projection."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return SeedOssConfig(**(values | {"attention_bias": qkv_bias}), out_bias=out_bias)


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> SeedOssConfig:
        """Read and check config.json; errors name the key."""
        windows = (0,) * read_num_layers(reader)
        config = read_decoder(reader, windows, context_len=524288, head_dim=128)
        qkv_bias, out_bias = reader.bool("attention_bias", True), reader.bool("attention_out_bias", False)
        return with_output_bias(config, qkv_bias=qkv_bias, out_bias=out_bias)


class SeedOssAttention(LlamaAttention):
    """Llama's attention with a separate switch for the bias of the output projection."""

    def __init__(self, config: SeedOssConfig, window: int) -> None:
        super().__init__(config, window)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, config.out_bias)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: SeedOssConfig) -> None:
        super().__init__(config, [SeedOssAttention(config, window) for window in config.windows])
