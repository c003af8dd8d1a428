"""InternLM 3: Llama with two switches for biases, one of q, k and v, and one of every other linear of a layer."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, read_decoder, read_num_layers
from penstock.models.decoders.seed_oss import SeedOssAttention, SeedOssConfig, with_output_bias
from penstock.models.published.internlm import fixed_rope

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> SeedOssConfig:
        """Read and check config.json; errors name the key."""
        key = "rope_scaling" if reader.has("rope_scaling") else "rope_parameters"
        bias, qkv_bias = reader.bool("bias", False), reader.bool("qkv_bias", False)
        decoder = read_decoder(fixed_rope(reader, key), (0,) * read_num_layers(reader), context_len=32768)
        return with_output_bias(replace(decoder, mlp_bias=bias), qkv_bias=qkv_bias, out_bias=bias)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: SeedOssConfig) -> None:
        super().__init__(config, [SeedOssAttention(config, window) for window in config.windows])
