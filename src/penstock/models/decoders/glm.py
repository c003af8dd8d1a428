"""GLM-4 (glm-4-9b): half of each head turns, in adjacent pairs; biases on q, k and v; gate and up in one tensor."""

from __future__ import annotations

from dataclasses import replace

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.sources import fused_rows
from penstock.nn import Linear

__all__ = ["Config", "GlmAttention", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        windows = (0,) * read_num_layers(reader)
        config = read_decoder(reader, windows, context_len=131072, head_dim=128, norm_eps=1.5625e-7, rotary_share=0.5)
        return replace(config, attention_bias=reader.bool("attention_bias", True))


class GlmAttention(LlamaAttention):
    """Llama's attention with biases on q, k and v only, which turns adjacent pairs."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__(config, window, interleaved=True)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [GlmAttention(config, window) for window in config.windows])

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from that the checkpoint stores in fused tensors."""
        return fused_rows(self, "gate_up_proj", ("gate_proj", "up_proj"))
