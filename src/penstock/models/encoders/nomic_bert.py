"""Nomic BERT (arXiv 2402.01613): BERT with rotary positions and a gate of SiLU, without biases and without a head.

Reads the published folders, whose config.json has the keys of GPT-2, and those that transformers 5 writes.  Both have
the published names of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader, RopeConfig
from penstock.errors import UnsupportedError
from penstock.models.decoder import MAX_LAYERS, GatedMLP
from penstock.models.sources import fused_rows, renamed
from penstock.nn import Attention, Batch, Embedding, LayerNorm, Linear, LMHead, Module, RotaryEmbedding, apply_rope
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "Network", "NomicBertConfig"]

_NAMES: Final = (
    ("layers.", "encoder.layers."),
    ("embeddings.LayerNorm.", "emb_ln."),
    ("self_attn.o_proj.", "attn.out_proj."),
    ("self_attn.", "attn."),
    ("mlp.up_proj.", "mlp.fc11."),
    ("mlp.gate_proj.", "mlp.fc12."),
    ("mlp.down_proj.", "mlp.fc2."),
    ("post_attention_layernorm.", "norm1."),
    ("post_mlp_layernorm.", "norm2."),
)
_PUBLISHED_KEYS: Final = ("n_embd", "n_inner", "n_layer", "n_head", "n_positions", "layer_norm_epsilon")
_KEYS: Final = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings", "layer_norm_eps"),
)
_FIXED: Final = {
    "prenorm": False,
    "parallel_block": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "use_rms_norm": False,
    "causal": False,
    "rotary_emb_interleaved": False,
}
"""Switches of the published folders that have one supported value."""


@dataclass(frozen=True)
class NomicBertConfig:
    """The sizes of the network."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    context_len: int
    norm_eps: float
    rope: RopeConfig


def _read_rope(reader: ConfigReader, head_dim: int) -> RopeConfig:
    """Return the rotary positions.  Scaling of the published folders begins behind n_positions, the context."""
    if not reader.has("n_embd"):
        return reader.rope(head_dim, theta=1000.0)
    if reader.has("rotary_emb_scale_base") or reader.float("rotary_emb_fraction", 1.0) != 1.0:
        key = "rotary_emb_scale_base" if reader.has("rotary_emb_scale_base") else "rotary_emb_fraction"
        raise reader.error(key, "null" if key.endswith("base") else "1", reader.values[key])
    return RopeConfig(theta=reader.float("rotary_emb_base", 1000.0, min=1.0), rotary_dim=head_dim)


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> NomicBertConfig:
        """Read and check config.json; errors name the key."""
        names = reader.text_list("architectures") or ["NomicBertModel"]
        if names != ["NomicBertModel"]:
            raise reader.error("architectures", "NomicBertModel", names)
        for key, expected in _FIXED.items():
            if reader.has(key) and reader.bool(key) is not expected:
                raise UnsupportedError(f"{reader.file}: {key}: expected false, got true", param=key)
        if reader.int("num_experts", 0, min=0):
            raise reader.error("num_experts", "0, because experts are not supported", reader.values["num_experts"])
        is_published = reader.has("n_embd")
        keys = _PUBLISHED_KEYS if is_published else _KEYS
        if is_published:
            reader.one_of("activation_function", ("swiglu",), "swiglu")
        else:
            reader.one_of("hidden_act", ("silu",), "silu")
        hidden_size, num_heads = reader.int(keys[0], 768), reader.int(keys[3], 12)
        if hidden_size % num_heads:
            raise reader.error(keys[0], f"a multiple of {keys[3]} ({num_heads})", hidden_size)
        return NomicBertConfig(
            vocab_size=reader.int("vocab_size", 30528),
            hidden_size=hidden_size,
            intermediate_size=reader.int(keys[1], 4 * hidden_size),
            num_layers=reader.int(keys[2], 12, max=MAX_LAYERS),
            num_heads=num_heads,
            context_len=reader.int(keys[4], 2048),
            norm_eps=reader.float(keys[5], 1e-12),
            rope=_read_rope(reader, hidden_size // num_heads),
        )


class NomicBertSelfAttention(Module):
    """Attention over all tokens of a request, with rotary positions."""

    def __init__(self, config: NomicBertConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.num_heads, self.head_dim = heads, size // heads
        self.q_proj = Linear(size, size)
        self.k_proj = Linear(size, size)
        self.v_proj = Linear(size, size)
        self.o_proj = Linear(size, size)
        self.attention = Attention(heads, heads, size // heads, causal=False)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k = (y.view(-1, self.num_heads, self.head_dim) for y in (self.q_proj(x), self.k_proj(x)))
        q, k = apply_rope(q, cos_sin), apply_rope(k, cos_sin)
        return self.o_proj(self.attention(q, k, self.v_proj(x), batch))


class NomicBertLayer(Module):
    """Attention and feed-forward, each followed by the norm of its sum with the residual stream."""

    def __init__(self, config: NomicBertConfig) -> None:
        super().__init__()
        self.self_attn = NomicBertSelfAttention(config)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.post_mlp_layernorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = self.post_attention_layernorm(x + self.self_attn(x, cos_sin, batch))
        return self.post_mlp_layernorm(x + self.mlp(x))


class Network(Module):
    """The encoder.  The table of tokens takes the place of a head, and only the hidden rows mean something."""

    unread_tensors = ("embeddings.token_type_embeddings.weight", "embeddings.position_ids", "pooler.*")

    def __init__(self, config: NomicBertConfig) -> None:
        super().__init__()
        self.config = config
        words = Embedding(config.vocab_size, config.hidden_size)
        norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.embeddings = nn.ModuleDict({"word_embeddings": words, "LayerNorm": norm})
        self.layers = nn.ModuleList(NomicBertLayer(config) for _ in range(config.num_layers))
        self.rotary_emb = RotaryEmbedding(config.rope)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=words)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        x = self.embeddings["LayerNorm"](self.embeddings["word_embeddings"](batch.token_ids))
        cos_sin = self.rotary_emb(batch.positions)
        for layer in self.layers:
            x = layer(x, cos_sin, batch)
        return self.lm_head(x, batch.output_rows)

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: every token is of type 0, whose row is added to its own."""
        words, types = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"
        table = renamed(self, fused_rows(self, "Wqkv", ("q_proj", "k_proj", "v_proj")), _NAMES)
        return table | {words: Source(words, add_row=types)}
