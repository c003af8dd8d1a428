"""Phi-3, 3.5 and 4, and Phi-4-mini: Llama whose checkpoints store q, k and v as one tensor, and gate and up as one.

Rotary positions may turn a part of each head (partial_rotary_factor).
"""

from __future__ import annotations

from typing import Final

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.long_rope import read_with_longrope
from penstock.models.sources import fused_rows

__all__ = ["Config", "Network"]

_LONGROPE: Final = ("longrope", "su", "yarn")  # the older names of longrope in this family


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        windows = (reader.optional_int("sliding_window") or 0,) * read_num_layers(reader)

        def read(plain: ConfigReader) -> DecoderConfig:
            return read_decoder(plain, windows, context_len=4096, norm_eps=1e-5)

        return read_with_longrope(reader, read, names=_LONGROPE, original=4096)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [LlamaAttention(config, window) for window in config.windows])

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from that the checkpoint stores in fused tensors."""
        attention = fused_rows(self, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        return attention | fused_rows(self, "gate_up_proj", ("gate_proj", "up_proj"))
