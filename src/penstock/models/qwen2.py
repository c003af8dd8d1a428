"""Qwen 2 and 2.5: biases on q, k and v, and optional sliding windows on the later layers."""

from __future__ import annotations

from torch import Tensor

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.nn import Attention, Batch, ColumnParallelLinear, Module, RowParallelLinear, apply_rope

__all__ = ["Config", "Network", "read_windows"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        return read_decoder(reader, read_windows(reader), context_len=32768)


def read_windows(reader: ConfigReader) -> tuple[int, ...]:
    """Return the window of each layer, from layer_types or else from max_window_layers."""
    num_layers = read_num_layers(reader)
    window = reader.int("sliding_window", 4096) if reader.bool("use_sliding_window", False) else 0
    if "sliding_window" in reader.values and not reader.has("sliding_window"):
        window = 0
    kinds = reader.text_list("layer_types")
    if kinds is None:
        first = reader.int("max_window_layers", 28, min=0)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if len(kinds) != num_layers:
        raise reader.error("layer_types", f"one entry for each of {num_layers} layers", len(kinds))
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types", "full_attention or sliding_attention", kind)
        if kind == "sliding_attention" and not window:
            raise reader.error("layer_types", "full_attention, because sliding_window is not set", kind)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


class Qwen2Attention(Module):
    """Grouped-query attention with rotary positions; q, k and v have biases."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = ColumnParallelLinear(config.hidden_size, q_size, bias=True)
        self.k_proj = ColumnParallelLinear(config.hidden_size, kv_size, bias=True)
        self.v_proj = ColumnParallelLinear(config.hidden_size, kv_size, bias=True)
        self.o_proj = RowParallelLinear(q_size, config.hidden_size)
        self.attention = Attention(config.num_heads, config.num_kv_heads, config.head_dim, window=window)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x)
        return self.o_proj(self.attention(apply_rope(q, cos_sin), apply_rope(k, cos_sin), v, batch))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [Qwen2Attention(config, window) for window in config.windows])
