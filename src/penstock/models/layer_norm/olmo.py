"""OLMo 1 (arXiv 2402.00838): Llama with layer norms that have neither weights nor biases."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import CausalLM, DecoderConfig, DecoderLayer, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import Module
from penstock.ops.eager import ops

__all__ = ["Config", "Network"]

_EPS = 1e-5
"""The epsilon of every norm; no key of config.json changes it."""


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        if reader.has("clip_qkv"):
            raise UnsupportedError(
                f"{reader.file}: clip_qkv: expected null, found {reader.float('clip_qkv'):g}; queries, keys and values "
                "that are clipped are not supported",
                param="clip_qkv",
            )
        return read_decoder(reader, (0,) * read_num_layers(reader), context_len=2048)


class BareNorm(Module):
    """The norm (x - mean) / sqrt(variance + eps) over the last dimension of x [T, dim]."""

    ones: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.register_buffer("ones", torch.ones(dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [T, dim]; the result has the same shape."""
        y: Tensor = ops.layer_norm(x, self.ones, None, eps=_EPS)
        return y


class OlmoLayer(DecoderLayer):
    """Llama's layer with norms without weights."""

    def __init__(self, config: DecoderConfig, attention: Module) -> None:
        super().__init__(config, attention)
        self.input_layernorm = BareNorm(config.hidden_size)  # type: ignore[assignment]
        self.post_attention_layernorm = BareNorm(config.hidden_size)  # type: ignore[assignment]


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [LlamaAttention(config, window) for window in config.windows], OlmoLayer)
        self.model.norm = BareNorm(config.hidden_size)  # type: ignore[assignment]
