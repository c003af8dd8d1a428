"""Seed-OSS: Llama with biases on q, k and v, and a switch of its own for the bias of the output projection."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import RowParallelLinear

__all__ = ["Config", "Network"]


@dataclass(frozen=True)
class SeedOssConfig(DecoderConfig):
    """The sizes of the network; ``out_bias`` is that of the output projection."""

    out_bias: bool = False


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> SeedOssConfig:
        """Read and check config.json; errors name the key."""
        windows = (0,) * read_num_layers(reader)
        config = read_decoder(reader, windows, context_len=524288, head_dim=128)
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        values["attention_bias"] = reader.bool("attention_bias", True)
        return SeedOssConfig(**values, out_bias=reader.bool("attention_out_bias", False))


class SeedOssAttention(LlamaAttention):
    """Llama's attention with a separate switch for the bias of the output projection."""

    def __init__(self, config: SeedOssConfig, window: int) -> None:
        super().__init__(config, window)
        self.o_proj = RowParallelLinear(config.num_heads * config.head_dim, config.hidden_size, config.out_bias)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: SeedOssConfig) -> None:
        super().__init__(config, [SeedOssAttention(config, window) for window in config.windows])
