"""Qwen 3: q and k are normalised per head, and head_dim is independent of hidden_size."""

from __future__ import annotations

from torch import Tensor

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder
from penstock.models.qwen2 import read_windows
from penstock.nn import Attention, Batch, ColumnParallelLinear, Module, RMSNorm, RowParallelLinear, apply_rope

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        return read_decoder(reader, read_windows(reader), head_dim=128, context_len=32768)


class Qwen3Attention(Module):
    """Grouped-query attention with rotary positions; q and k are normalised before the rotation."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = ColumnParallelLinear(config.hidden_size, q_size, bias=bias)
        self.k_proj = ColumnParallelLinear(config.hidden_size, kv_size, bias=bias)
        self.v_proj = ColumnParallelLinear(config.hidden_size, kv_size, bias=bias)
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.attention = Attention(config.num_heads, config.num_kv_heads, config.head_dim, window=window)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q = self.q_norm(self.q_proj(x).view(-1, self.num_heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim))
        v = self.v_proj(x)
        return self.o_proj(self.attention(apply_rope(q, cos_sin), apply_rope(k, cos_sin), v, batch))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [Qwen3Attention(config, window) for window in config.windows])
