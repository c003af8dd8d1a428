"""Phi 1, 1.5 and 2 (arXiv 2309.05463): attention and feed-forward in parallel, behind one layer norm."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import ConfigReader, RopeConfig
from penstock.models.layer_norm.parts import PlainMLP, SelfAttention, Sizes, read_gelu, read_sizes
from penstock.nn import Batch, Embedding, LayerNorm, LMHead, Module, RotaryEmbedding
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "Network"]


@dataclass(frozen=True)
class Config:
    """The values of config.json."""

    sizes: Sizes
    rope: RopeConfig
    qk_layernorm: bool

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
        sizes = read_sizes(reader, gelu_form=read_gelu(reader, "hidden_act", "gelu_new"), tied=False, context_len=2048)
        rope = reader.rope(sizes.head_dim, rotary_share=0.5)
        return Config(sizes, rope, reader.bool("qk_layernorm", False))


class PhiAttention(SelfAttention):
    """Attention that normalises q and k per head if the config says so; the heads turn in part."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.sizes, output="dense")
        head_dim, eps = config.sizes.head_dim, config.sizes.norm_eps
        self.q_layernorm = LayerNorm(head_dim, eps) if config.qk_layernorm else None
        self.k_layernorm = LayerNorm(head_dim, eps) if config.qk_layernorm else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of x, with q and k normalised."""
        q, k, v = super().project(x)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q, k, v


class PhiLayer(Module):
    """Attention and feed-forward of the same normalised rows, with one residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(config.sizes.hidden_size, config.sizes.norm_eps)
        self.self_attn = PhiAttention(config)
        self.mlp = PlainMLP(config.sizes, ("fc1", "fc2"))

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        y = self.input_layernorm(x)
        return x + (self.self_attn(y, cos_sin, batch) + self.mlp(y))


class PhiDecoder(Module):
    """The decoder without its output head: token ids to hidden rows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        sizes = config.sizes
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(PhiLayer(config) for _ in range(sizes.num_layers))
        self.final_layernorm = LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rope)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embed_tokens(batch.token_ids)
        cos_sin = self.rotary_emb(batch.positions)
        for layer in self.layers:
            x = layer(x, cos_sin, batch)
        return self.final_layernorm(x)


class Network(Module):
    """The language model; its output head has a bias."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = PhiDecoder(config)
        tied = self.model.embed_tokens if config.sizes.tied else None
        self.lm_head = LMHead(config.sizes.hidden_size, config.sizes.vocab_size, bias=True, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return self.lm_head(self.model(batch), batch.output_rows)
