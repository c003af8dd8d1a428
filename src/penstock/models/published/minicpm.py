"""MiniCPM 1, 2 and 4 (arXiv 2404.06395): Llama with factors of the embedding, the residuals and the head's input."""

from __future__ import annotations

import math

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders import granite
from penstock.models.long_rope import read_with_longrope

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> granite.Config:
        """Read and check config.json; errors name the key."""
        if reader.int("num_experts", 0, min=0):
            raise reader.error("num_experts", "0, because MiniCPM-MoE is not supported", reader.values["num_experts"])
        if reader.has("sparse_config"):
            raise UnsupportedError(
                f"{reader.file}: sparse_config: expected null, got an object; sparse attention is not supported",
                param="sparse_config",
            )
        windows = (0,) * read_num_layers(reader)

        def read(plain: ConfigReader) -> DecoderConfig:
            return read_decoder(plain, windows, context_len=2048, tied=True)

        decoder = read_with_longrope(reader, read)
        return granite.Config(
            decoder,
            embedding_multiplier=reader.float("scale_emb", min=1e-6),
            residual_multiplier=reader.float("scale_depth", min=1e-6) / math.sqrt(len(decoder.windows)),
            attention_multiplier=decoder.head_dim**-0.5,
            logits_scaling=decoder.hidden_size / reader.float("dim_model_base", min=1e-6),
        )


class Network(granite.Network):
    """The language model."""

    unread_tensors = ("*.rotary_emb.inv_freq",)
