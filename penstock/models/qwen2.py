"""Qwen 2 and 2.5: biases on q, k and v, windows on the later layers by config."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from penstock.config import ConfigReader, RopeConfig
from penstock.models.llama import MAX_LAYERS, GatedMLP
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
)

__all__ = ["Config", "Network", "read_windows"]


@dataclass(frozen=True)
class Config:
    """What config.json says of the network.  ``windows`` has one entry per layer, 0 where every position is seen."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    windows: tuple[int, ...]

    @classmethod
    def read(cls, reader: ConfigReader) -> Config:
        """Reads and checks config.json; errors name the key."""
        reader.one_of("hidden_act", ("silu",), "silu")
        hidden_size, num_heads = reader.int("hidden_size"), reader.int("num_attention_heads")
        head_dim = reader.int("head_dim", hidden_size // num_heads)
        num_kv_heads = reader.int("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})", num_kv_heads)
        return cls(
            vocab_size=reader.int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.int("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context_len=reader.int("max_position_embeddings", 32768),
            norm_eps=reader.float("rms_norm_eps", 1e-6),
            rope=reader.rope(head_dim),
            tied=reader.bool("tie_word_embeddings", False),
            windows=read_windows(reader),
        )


def read_windows(reader: ConfigReader) -> tuple[int, ...]:
    """The window of each layer: from layer_types, else from max_window_layers on."""
    num_layers = reader.int("num_hidden_layers", max=MAX_LAYERS)
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
            raise reader.error("layer_types", "full_attention, for there is no sliding_window", kind)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


class Qwen2Attention(Module):
    """Grouped-query attention with rotary positions; q, k and v have biases."""

    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = ColumnParallelLinear(config.hidden_size, q_size, bias=True)
        self.k_proj = ColumnParallelLinear(config.hidden_size, kv_size, bias=True)
        self.v_proj = ColumnParallelLinear(config.hidden_size, kv_size, bias=True)
        self.o_proj = RowParallelLinear(q_size, config.hidden_size)
        self.attention = Attention(config.num_heads, config.num_kv_heads, config.head_dim, window=window)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden]: [T, hidden]."""
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x)
        return self.o_proj(self.attention(apply_rope(q, cos_sin), apply_rope(k, cos_sin), v, batch))


class Qwen2Layer(Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Qwen2Attention(config, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden]: [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2Model(Module):
    """Token ids to hidden rows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen2Layer(config, window) for window in config.windows)
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
        self.model = Qwen2Model(config)
        tied = self.model.embed_tokens if config.tied else None
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the wanted rows, [R, vocab]."""
        return self.lm_head(self.model(batch), batch.output_rows)
