"""Hunyuan dense models: q and k are normalised per head behind the rotation; a fixed alpha may stretch rope_theta."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import Batch, RMSNorm
from penstock.nn.base import Tensor

__all__ = ["Config", "HunyuanAttention", "Network", "with_stretched_theta"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        windows = (0,) * read_num_layers(reader)
        return read_decoder(with_stretched_theta(reader), windows, context_len=2048, norm_eps=1e-5)


def with_stretched_theta(reader: ConfigReader) -> ConfigReader:
    """Return the config with theta * alpha^(d / (d - 2)) for a rope type "dynamic" with alpha, which is constant."""
    key = "rope_scaling" if reader.has("rope_scaling") else "rope_parameters"
    section = reader.object(key)
    if section is None or not section.has("alpha"):
        return reader
    section.one_of("rope_type" if section.has("rope_type") else "type", ("dynamic",))
    theta = section.float("rope_theta", reader.float("rope_theta", 10000.0, min=1.0), min=1.0)
    dim = reader.int("head_dim", reader.int("hidden_size") // reader.int("num_attention_heads"), min=4)
    theta *= section.float("alpha", min=1e-6) ** (dim / (dim - 2))
    return ConfigReader(reader.values | {key: {"rope_type": "default", "rope_theta": theta}}, reader.file)


class HunyuanAttention(LlamaAttention):
    """Llama's attention, with q and k normalised behind the rotation."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__(config, window)
        self.query_layernorm = RMSNorm(config.head_dim, config.norm_eps)
        self.key_layernorm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k, v = self.project(x)
        q, k = self.query_layernorm(self.rotate(q, cos_sin)), self.key_layernorm(self.rotate(k, cos_sin))
        return self.o_proj(self.attention(q, k, v, batch))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [HunyuanAttention(config, window) for window in config.windows])
