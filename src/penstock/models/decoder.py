"""The parts that decoder-only language models share: sizes, the feed-forward layer, the residual stream.

Each family adds its own attention (``src/penstock/models/decoders/llama.py`` and others).  Module paths are the
checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.checkpoint.pooling.files import has_language_head
from penstock.config import ConfigReader, RopeConfig
from penstock.nn import Batch, Embedding, Linear, LMHead, Module, RMSNorm, RotaryEmbedding, silu_mul
from penstock.nn.base import Tensor, nn

__all__ = [
    "CausalLM", "DecoderConfig", "DecoderLayer", "GatedMLP", "PostNormLayer", "read_decoder", "read_num_layers",
    "windows_by_type",
]  # fmt: skip

MAX_LAYERS = 1024
"""A limit against damaged configs: the layers are constructed before the weights are checked."""


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of the network in config.json.

    ``windows`` has one entry per layer; 0 attends to every position.  ``rope_layers`` tells which layers have rotary
    positions; empty means all.
    """

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
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]
    rope_layers: tuple[bool, ...] = ()


def read_num_layers(reader: ConfigReader) -> int:
    """Return the number of layers; InvalidFileError beyond MAX_LAYERS."""
    return reader.int("num_hidden_layers", max=MAX_LAYERS)


def windows_by_type(reader: ConfigReader, window: int, default: Sequence[str]) -> tuple[int, ...]:
    """Return the window of each layer from layer_types: ``window`` in layers with sliding_attention, otherwise 0.

    ``default``: the types when the key is missing.  InvalidFileError for other types, another number of layers, and
    for sliding_attention while ``window`` is 0.
    """
    kinds = reader.text_list("layer_types")
    if kinds is None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in default)
    if len(kinds) != len(default):
        raise reader.error("layer_types", f"one entry for each of {len(default)} layers", len(kinds))
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types", "full_attention or sliding_attention", kind)
        if kind == "sliding_attention" and not window:
            raise reader.error("layer_types", "full_attention, because sliding_window is not set", kind)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_decoder(
    reader: ConfigReader,
    windows: tuple[int, ...],
    *,
    context_len: int,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    theta: float = 10000.0,
    rotary_share: float = 1.0,
    tied: bool = False,
) -> DecoderConfig:
    """Read and check config.json; errors name the key.

    The keyword arguments are the family's defaults of keys that are missing.  Without ``head_dim`` it is
    ``hidden_size`` divided by the number of heads.
    """
    reader.one_of("hidden_act", ("silu",), "silu")
    hidden_size, num_heads = reader.int("hidden_size"), reader.int("num_attention_heads")
    head_dim = reader.int("head_dim", head_dim or hidden_size // num_heads)
    num_kv_heads = reader.int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})", num_kv_heads)
    return DecoderConfig(
        vocab_size=reader.int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.int("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_len=reader.int("max_position_embeddings", context_len),
        norm_eps=reader.float("rms_norm_eps", norm_eps),
        rope=reader.rope(head_dim, theta=theta, rotary_share=rotary_share),
        tied=reader.bool("tie_word_embeddings", tied) or not has_language_head(reader),
        attention_bias=reader.bool("attention_bias", False),
        mlp_bias=reader.bool("mlp_bias", False),
        windows=windows,
    )


class GatedMLP(Module):
    """The gated feed-forward layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(Module):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: DecoderConfig, attention: Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class PostNormLayer(Module):
    """Attention and feed-forward, whose outputs are normalised before they are added."""

    def __init__(self, config: DecoderConfig, attention: Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + self.post_attention_layernorm(self.self_attn(x, cos_sin, batch))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Decoder(Module):
    """The decoder without its output head: token ids to hidden rows."""

    def __init__(self, config: DecoderConfig, layers: Sequence[Module]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rope)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embed_tokens(batch.token_ids)
        cos_sin = self.rotary_emb(batch.positions)
        for layer in self.layers:
            x = layer(x, cos_sin, batch)
        return self.norm(x)


class CausalLM(Module):
    """A language model.  ``attentions`` has one module per layer, which is called with (x, cos_sin, batch).

    ``layer`` makes the layer from the config and its attention; it says where the norms are.
    """

    bare_prefix = "model."

    def __init__(
        self,
        config: DecoderConfig,
        attentions: Sequence[Module],
        layer: Callable[[DecoderConfig, Module], Module] = DecoderLayer,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, [layer(config, attention) for attention in attentions])
        tied = self.model.embed_tokens if config.tied else None
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return self.lm_head(self.model(batch), batch.output_rows)
