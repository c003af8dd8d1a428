"""ModernBERT (Warner et al., arXiv 2412.13663) with its masked-language head.

Windowed layers see ``local_attention`` / 2 tokens to each side and have a theta of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader, RopeConfig
from penstock.models.decoder import MAX_LAYERS
from penstock.models.encoders.bert import check_architecture
from penstock.models.layer_norm.parts import read_gelu
from penstock.models.sources import fused_rows
from penstock.nn import (
    Attention,
    Batch,
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    Module,
    OutputRows,
    RotaryEmbedding,
    apply_rope,
    gelu,
)
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "ModernBertConfig", "ModernBertEncoder", "Network"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLD_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _SLIDING: ("local_rope_theta", 10_000.0)}


@dataclass(frozen=True)
class ModernBertConfig:
    """The sizes of the network.

    ``windows`` has one entry per layer; 0 attends to every position.  ``ropes`` are the rotary positions of full layers
    and of windowed ones.  ``gelu_form`` and ``head_gelu_form`` are "none" or "tanh".
    ``has_head``: it has a masked-language head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    context_len: int
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    head_bias: bool
    decoder_bias: bool
    tied: bool
    windows: tuple[int, ...]
    ropes: tuple[RopeConfig, RopeConfig]
    gelu_form: str
    head_gelu_form: str
    has_head: bool


def _read_windows(reader: ConfigReader) -> tuple[int, ...]:
    num_layers = reader.int("num_hidden_layers", 22, max=MAX_LAYERS)
    window = reader.int("local_attention", 128) // 2 + 1
    kinds = reader.text_list("layer_types")
    if kinds is None:
        period = reader.int("global_attn_every_n_layers", 3)
        kinds = [_SLIDING if layer % period else _FULL for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise reader.error("layer_types", f"one entry for each of {num_layers} layers", len(kinds))
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise reader.error("layer_types", f"{_FULL} or {_SLIDING}", kind)
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def _read_rope(reader: ConfigReader, kind: str, head_dim: int) -> RopeConfig:
    """Return the rotary positions of one kind of layers, from the old keys or from an object per kind."""
    key, theta = _OLD_THETAS[kind]
    values = {name: value for name, value in reader.values.items() if name != "rope_parameters"}
    values["rope_theta"] = reader.float(key, theta, min=1.0)
    sections = reader.object("rope_parameters")
    if sections is not None:
        for name in sections.values:
            if name not in _OLD_THETAS:
                raise sections.error(name, f"{_FULL} and {_SLIDING}", sections.values[name])
        if sections.has(kind):
            values["rope_parameters"] = sections.values[kind]
    return ConfigReader(values, reader.file).rope(head_dim, theta=theta)


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> ModernBertConfig:
        """Read and check config.json; errors name the key."""
        has_head = check_architecture(reader, "ModernBert")
        hidden_size, num_heads = reader.int("hidden_size", 768), reader.int("num_attention_heads", 12)
        if hidden_size % num_heads:
            raise reader.error("hidden_size", f"a multiple of num_attention_heads ({num_heads})", hidden_size)
        head_dim = hidden_size // num_heads
        return ModernBertConfig(
            vocab_size=reader.int("vocab_size", 50368),
            hidden_size=hidden_size,
            intermediate_size=reader.int("intermediate_size", 1152),
            num_heads=num_heads,
            context_len=reader.int("max_position_embeddings", 8192),
            norm_eps=reader.float("norm_eps", 1e-5),
            norm_bias=reader.bool("norm_bias", False),
            attention_bias=reader.bool("attention_bias", False),
            mlp_bias=reader.bool("mlp_bias", False),
            head_bias=reader.bool("classifier_bias", False),
            decoder_bias=reader.bool("decoder_bias", True),
            tied=reader.bool("tie_word_embeddings", True),
            windows=_read_windows(reader),
            ropes=(_read_rope(reader, _FULL, head_dim), _read_rope(reader, _SLIDING, head_dim)),
            gelu_form=read_gelu(reader, "hidden_activation", "gelu"),
            head_gelu_form=read_gelu(reader, "classifier_activation", "gelu"),
            has_head=has_head,
        )


def _norm(config: ModernBertConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)


class ModernBertSelfAttention(Module):
    """Attention over the tokens of a request, or over those near each token."""

    def __init__(self, config: ModernBertConfig, window: int) -> None:
        super().__init__()
        size, heads, bias = config.hidden_size, config.num_heads, config.attention_bias
        self.num_heads, self.head_dim = heads, size // heads
        self.query = Linear(size, size, bias)
        self.key = Linear(size, size, bias)
        self.value = Linear(size, size, bias)
        self.Wo = Linear(size, size, bias)
        self.attention = Attention(heads, heads, size // heads, window=window, causal=False)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q = apply_rope(self.query(x).view(-1, self.num_heads, self.head_dim), cos_sin)
        k = apply_rope(self.key(x).view(-1, self.num_heads, self.head_dim), cos_sin)
        return self.Wo(self.attention(q, k, self.value(x), batch))


class ModernBertMLP(Module):
    """The feed-forward layer, gated by GELU."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.gelu_form = config.gelu_form
        self.gate = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.Wo = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return self.Wo(gelu(self.gate(x), self.gelu_form) * self.up(x))


class ModernBertLayer(Module):
    """Attention and feed-forward, each after a norm and with a residual connection; the first layer has one norm."""

    def __init__(self, config: ModernBertConfig, window: int, *, is_first: bool) -> None:
        super().__init__()
        self.attn_norm = nn.Identity() if is_first else _norm(config)
        self.attn = ModernBertSelfAttention(config, window)
        self.mlp_norm = _norm(config)
        self.mlp = ModernBertMLP(config)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + self.attn(self.attn_norm(x), cos_sin, batch)
        return x + self.mlp(self.mlp_norm(x))


class ModernBertEmbeddings(Module):
    """The rows of tokens, normalised."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, batch: Batch) -> Tensor:
        """Return the rows of a step, [T, hidden]."""
        return self.norm(self.tok_embeddings(batch.token_ids))


class ModernBertEncoder(Module):
    """The network without its head: token ids to hidden rows."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.windows = config.windows
        self.embeddings = ModernBertEmbeddings(config)
        layers = (ModernBertLayer(config, window, is_first=i == 0) for i, window in enumerate(config.windows))
        self.layers = nn.ModuleList(layers)
        self.final_norm = _norm(config)
        kinds = {window > 0 for window in config.windows}
        self.rotary = nn.ModuleDict(
            {
                name: RotaryEmbedding(rope)
                for name, rope in zip(("full", "sliding"), config.ropes, strict=True)
                if (name == "sliding") in kinds
            }
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embeddings(batch)
        tables = {name: rotary(batch.positions) for name, rotary in self.rotary.items()}
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = layer(x, tables["sliding" if window else "full"], batch)
        return self.final_norm(x)


class ModernBertHead(Module):
    """The layer between the encoder and the output linear."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.gelu_form = config.head_gelu_form
        self.dense = Linear(config.hidden_size, config.hidden_size, config.head_bias)
        self.norm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed rows of x [R, hidden]: [R, hidden]."""
        return self.norm(gelu(self.dense(x), self.gelu_form))


class Network(Module):
    """The encoder with its masked-language head.

    Without one, the table of tokens takes its place, and only the hidden rows mean something.
    """

    tensor_prefix = "model."
    unread_tensors = ("decoder.weight",)

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.model = ModernBertEncoder(config)
        self.output_rows = OutputRows()
        words = self.model.embeddings.tok_embeddings
        self.head = ModernBertHead(config) if config.has_head else nn.Identity()
        has_bias = config.decoder_bias and config.has_head
        tied = words if config.tied or not config.has_head else None
        self.decoder = LMHead(config.hidden_size, config.vocab_size, has_bias, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return self.decoder(self.head(self.output_rows(self.model(batch), batch.output_rows)))

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: fused tensors."""
        return fused_rows(self, "Wqkv", ("query", "key", "value")) | fused_rows(self, "Wi", ("gate", "up"))
