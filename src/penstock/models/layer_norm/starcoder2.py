"""StarCoder 2 (arXiv 2402.19173): layer norms, rotary positions, a plain feed-forward layer, an optional window."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import ConfigReader, RopeConfig
from penstock.models.layer_norm.parts import PlainMLP, SelfAttention, Sizes, read_gelu, read_sizes
from penstock.nn import Batch, Embedding, LayerNorm, LMHead, Module, RotaryEmbedding
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "Network"]


@dataclass(frozen=True)
class Config:
    """The values of config.json.  ``window`` is a number of positions; 0 attends to every position."""

    sizes: Sizes
    rope: RopeConfig
    window: int

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.sizes.vocab_size

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.sizes.context_len

    @staticmethod
    def read(reader: ConfigReader) -> Config:
        """Read and check config.json; errors name the key."""
        sizes = read_sizes(
            reader,
            gelu_form=read_gelu(reader, "hidden_act", "gelu_pytorch_tanh"),
            tied=True,
            context_len=4096,
            bias=reader.bool("use_bias", True),
            keys={"layer_norm_eps": "norm_epsilon"},
        )
        return Config(sizes, reader.rope(sizes.head_dim), reader.optional_int("sliding_window") or 0)


class Starcoder2Layer(Module):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        sizes = config.sizes
        self.input_layernorm = LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.self_attn = SelfAttention(sizes, window=config.window)
        self.post_attention_layernorm = LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.mlp = PlainMLP(sizes, ("c_fc", "c_proj"))

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Starcoder2Decoder(Module):
    """The decoder without its output head: token ids to hidden rows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        sizes = config.sizes
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(Starcoder2Layer(config) for _ in range(sizes.num_layers))
        self.norm = LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rope)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embed_tokens(batch.token_ids)
        cos_sin = self.rotary_emb(batch.positions)
        for layer in self.layers:
            x = layer(x, cos_sin, batch)
        return self.norm(x)


class Network(Module):
    """The language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Starcoder2Decoder(config)
        tied = self.model.embed_tokens if config.sizes.tied else None
        self.lm_head = LMHead(config.sizes.hidden_size, config.sizes.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return self.lm_head(self.model(batch), batch.output_rows)
