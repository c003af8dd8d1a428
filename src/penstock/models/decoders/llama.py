"""Llama 2 and 3, and models of the same structure."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.nn import Attention, Batch, Linear, Module, apply_rope
from penstock.nn.base import Tensor

__all__ = ["Config", "LlamaAttention", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        if reader.has("sliding_window"):
            raise UnsupportedError(
                f"{reader.file}: sliding_window: expected null for model_type llama, which has no sliding window",
                param="sliding_window",
            )
        return read_decoder(reader, (0,) * read_num_layers(reader), context_len=2048)


class LlamaAttention(Module):
    """Grouped-query attention with rotary positions.

    ``rope`` False leaves them out.  ``interleaved`` turns adjacent pairs of a head instead of its halves.
    """

    def __init__(self, config: DecoderConfig, window: int, *, rope: bool = True, interleaved: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.rope, self.interleaved = rope, interleaved
        bias = config.attention_bias
        self.q_proj = Linear(config.hidden_size, q_size, bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias)
        self.attention = Attention(config.num_heads, config.num_kv_heads, config.head_dim, window=window)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, heads, head_dim], k [T, kv_heads, head_dim] and v [T, kv_heads * head_dim] of x [T, hidden]."""
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        return q, k, self.v_proj(x)

    def rotate(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Return x [T, heads, head_dim] turned by the positions; x itself in a layer without them."""
        return apply_rope(x, cos_sin, interleaved=self.interleaved) if self.rope else x

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k, v = self.project(x)
        return self.o_proj(self.attention(self.rotate(q, cos_sin), self.rotate(k, cos_sin), v, batch))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [LlamaAttention(config, window) for window in config.windows])
