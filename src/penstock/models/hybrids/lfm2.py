"""LFM2 of Liquid AI: layers of attention, and layers of a gated convolution over the last few tokens."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import ConfigReader, RopeConfig
from penstock.models.decoder import read_num_layers
from penstock.nn import (
    Attention,
    Batch,
    Embedding,
    Linear,
    LMHead,
    Module,
    RMSNorm,
    RotaryEmbedding,
    ShortConv,
    apply_rope,
    silu_mul,
)
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "Lfm2Config", "Network"]

_MAX_CONV_LEN = 32  # what the op short_conv takes


@dataclass(frozen=True)
class Lfm2Config:
    """The sizes of the network in config.json.  ``is_attention`` has one entry per layer."""

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
    conv_len: int
    conv_bias: bool
    is_attention: tuple[bool, ...]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Lfm2Config:
        """Read and check config.json; errors name the key."""
        hidden_size, num_heads = reader.int("hidden_size"), reader.int("num_attention_heads")
        num_kv_heads = reader.int("num_key_value_heads", 8)
        if num_heads % num_kv_heads:
            raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})", num_kv_heads)
        if hidden_size % 2:
            raise reader.error("hidden_size", "an even number of channels", hidden_size)
        head_dim = reader.int("head_dim", hidden_size // num_heads)
        tied = reader.bool("tie_word_embeddings", True)
        return Lfm2Config(
            vocab_size=reader.int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_read_intermediate_size(reader),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context_len=reader.int("max_position_embeddings", 128000),
            norm_eps=reader.float("norm_eps", 1e-5),
            rope=reader.rope(head_dim, theta=1000000.0),
            tied=reader.bool("tie_embedding", tied),
            conv_len=reader.int("conv_L_cache", 3, max=_MAX_CONV_LEN),
            conv_bias=reader.bool("conv_bias", False),
            is_attention=_read_layers(reader),
        )


def _read_intermediate_size(reader: ConfigReader) -> int:
    """Return the width of the feed-forward layers, which the config may state before its adjustment."""
    size = reader.int("block_ff_dim" if reader.has("block_ff_dim") else "intermediate_size")
    if not reader.bool("block_auto_adjust_ff_dim", True):
        return size
    multiple = reader.int("block_multiple_of", 256)
    size = int(reader.float("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _read_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """Return which layers are attention, from layer_types or else from full_attn_idxs."""
    num_layers, kinds = read_num_layers(reader), reader.text_list("layer_types")
    if kinds is None:
        indices = reader.int_or_list("full_attn_idxs", max=num_layers - 1)
        return tuple(layer in indices or not reader.has("full_attn_idxs") for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise reader.error("layer_types", f"one entry for each of {num_layers} layers", len(kinds))
    for kind in kinds:
        if kind not in ("full_attention", "conv"):
            raise reader.error("layer_types", "full_attention or conv", kind)
    return tuple(kind == "full_attention" for kind in kinds)


class Lfm2Attention(Module):
    """Grouped-query attention; q and k are normalised per head before the rotation."""

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.out_proj = Linear(q_size, config.hidden_size)
        self.q_layernorm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_layernorm = RMSNorm(config.head_dim, config.norm_eps)
        self.attention = Attention(config.num_heads, config.num_kv_heads, config.head_dim)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q = self.q_layernorm(self.q_proj(x).view(-1, self.num_heads, self.head_dim))
        k = self.k_layernorm(self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim))
        v = self.v_proj(x)
        return self.out_proj(self.attention(apply_rope(q, cos_sin), apply_rope(k, cos_sin), v, batch))


class GatedConv(Module):
    """The projection of x to B, C and X, and the projection of C * convolution(B * X)."""

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.conv_bias
        self.in_proj = Linear(hidden, 3 * hidden, bias)
        self.conv = ShortConv(hidden, config.conv_len, bias)
        self.out_proj = Linear(hidden, hidden, bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        before, after, values = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(self.conv(before * values, after, batch))


class Lfm2FeedForward(Module):
    """The gated feed-forward layer, under the checkpoint's names."""

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        self.w1 = Linear(config.hidden_size, config.intermediate_size)
        self.w3 = Linear(config.hidden_size, config.intermediate_size)
        self.w2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return self.w2(silu_mul(self.w1(x), self.w3(x)))


class Lfm2Layer(Module):
    """Attention or the convolution, then feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: Lfm2Config, is_attention: bool) -> None:
        super().__init__()
        self.is_attention = is_attention
        if is_attention:
            self.self_attn = Lfm2Attention(config)
        else:
            self.conv = GatedConv(config)
        self.feed_forward = Lfm2FeedForward(config)
        self.operator_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        normed = self.operator_norm(x)
        x = x + (self.self_attn(normed, cos_sin, batch) if self.is_attention else self.conv(normed, batch))
        return x + self.feed_forward(self.ffn_norm(x))


class Lfm2Decoder(Module):
    """The layers: token ids to hidden rows."""

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Lfm2Layer(config, is_attention) for is_attention in config.is_attention)
        self.embedding_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rope)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embed_tokens(batch.token_ids)
        cos_sin = self.rotary_emb(batch.positions)
        for layer in self.layers:
            x = layer(x, cos_sin, batch)
        return self.embedding_norm(x)


class Network(Module):
    """The language model."""

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        self.config = config
        self.model = Lfm2Decoder(config)
        self.lm_head = LMHead(
            config.hidden_size, config.vocab_size, tied=self.model.embed_tokens if config.tied else None
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return self.lm_head(self.model(batch), batch.output_rows)
