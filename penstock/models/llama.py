"""Llama 2 and 3, and what shares their shape (Mistral by config)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from penstock.config import ConfigReader, RopeConfig
from penstock.errors import UnsupportedError
from penstock.nn import (
    Attention,
    Batch,
    ColumnParallelLinear,
    LMHead,
    Module,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_rope,
    silu_mul,
)

__all__ = ["MAX_LAYERS", "Config", "GatedMLP", "Network"]

MAX_LAYERS = 1024
"""More is a damaged config: the layers are made before the weights are looked at."""


@dataclass(frozen=True)
class Config:
    """What config.json says of the network.  ``window`` is 0 where every position is seen."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    norm_eps: float
    rope: RopeConfig
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    window: int = 0

    @classmethod
    def read(cls, reader: ConfigReader) -> Config:
        """Reads and checks config.json; errors name the key."""
        reader.one_of("hidden_act", ("silu",), "silu")
        if reader.has("sliding_window") and reader.str("model_type") == "llama":
            raise UnsupportedError(
                f"{reader.file}: sliding_window: expected null in a llama, whose layers see everything"
            )
        hidden_size, num_heads = reader.int("hidden_size"), reader.int("num_attention_heads")
        head_dim = reader.int("head_dim", hidden_size // num_heads)
        num_kv_heads = reader.int("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})", num_kv_heads)
        return cls(
            vocab_size=reader.int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.int("intermediate_size"),
            num_layers=reader.int("num_hidden_layers", max=MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context_len=reader.int("max_position_embeddings", 2048),
            norm_eps=reader.float("rms_norm_eps", 1e-6),
            rope=reader.rope(head_dim),
            tied=reader.bool("tie_word_embeddings", False),
            attention_bias=reader.bool("attention_bias", False),
            mlp_bias=reader.bool("mlp_bias", False),
        )


class LlamaAttention(Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = ColumnParallelLinear(config.hidden_size, q_size, bias)
        self.k_proj = ColumnParallelLinear(config.hidden_size, kv_size, bias)
        self.v_proj = ColumnParallelLinear(config.hidden_size, kv_size, bias)
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, bias)
        self.attention = Attention(config.num_heads, config.num_kv_heads, config.head_dim, window=config.window)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden]: [T, hidden]."""
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x)
        return self.o_proj(self.attention(apply_rope(q, cos_sin), apply_rope(k, cos_sin), v, batch))


class GatedMLP(Module):
    """The gated feed-forward layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden]: [T, hidden]."""
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))


class LlamaLayer(Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden]: [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(Module):
    """Token ids to hidden rows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rope)

    def forward(self, batch: Batch) -> Tensor:
        """The hidden rows of a step, [T, hidden]."""
        x = self.embed_tokens(batch.token_ids)
        cos_sin = self.rotary_emb(batch.positions)
        for layer in self.layers:
            x = layer(x, cos_sin, batch)
        return self.norm(x)


class Network(Module):
    """The language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        tied = self.model.embed_tokens if config.tied else None
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the wanted rows, [R, vocab]."""
        return self.lm_head(self.model(batch), batch.output_rows)
