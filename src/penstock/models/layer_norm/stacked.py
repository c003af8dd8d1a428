"""The network of GPT-2, GPT-NeoX, Falcon and BLOOM: one form of module paths, with a table of the checkpoint's names.

The families differ in the place of norms, in positions, and in how a checkpoint stores q, k and v.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import RopeConfig
from penstock.models.layer_norm.parts import PlainMLP, SelfAttention, Sizes
from penstock.nn import Batch, Embedding, LayerNorm, LMHead, Module, RotaryEmbedding
from penstock.nn.base import Tensor, nn

__all__ = ["StackedConfig", "StackedNetwork"]


@dataclass(frozen=True)
class StackedConfig:
    """The sizes and the form of a network.

    ``parallel``: attention and feed-forward read the same rows.  ``one_norm``: they share a norm.  ``slopes`` are those
    of ALiBi; without them and without ``rope``, ``learned_positions`` adds a row for each position.  ``scales``: of
    the scores in each layer; empty means 1 / sqrt(head_dim).  ``groups``: the tensor of q, k and v repeats rows of q, k
    and v that many times.
    """

    sizes: Sizes
    rope: RopeConfig | None = None
    slopes: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    groups: int = 1
    parallel: bool = False
    one_norm: bool = False
    embedding_norm: bool = False
    learned_positions: bool = False
    attention_bias: bool = True

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.sizes.vocab_size

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.sizes.context_len


class StackedLayer(Module):
    """Attention and feed-forward, one after the other or in parallel."""

    def __init__(self, config: StackedConfig, index: int) -> None:
        super().__init__()
        sizes, scale = config.sizes, config.scales[index] if config.scales else None
        self.parallel = config.parallel
        self.input_layernorm = LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.self_attn = SelfAttention(sizes, slopes=config.slopes, scale=scale, bias=config.attention_bias)
        self.mlp_layernorm = None if config.one_norm else LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.mlp = PlainMLP(sizes)

    def forward(self, x: Tensor, cos_sin: Tensor | None, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        normed = self.input_layernorm(x)
        attended = self.self_attn(normed, cos_sin, batch)
        if not self.parallel:
            x = x + attended
        if self.mlp_layernorm is not None:
            normed = self.mlp_layernorm(x)
        y = self.mlp(normed)
        return x + (y + attended) if self.parallel else x + y


class StackedNetwork(Module):
    """The language model."""

    def __init__(self, config: StackedConfig) -> None:
        super().__init__()
        sizes = config.sizes
        self.config = config
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.hidden_size)
        self.embed_positions = Embedding(sizes.context_len, sizes.hidden_size) if config.learned_positions else None
        self.embed_norm = LayerNorm(sizes.hidden_size, sizes.norm_eps) if config.embedding_norm else None
        self.layers = nn.ModuleList(StackedLayer(config, index) for index in range(sizes.num_layers))
        self.final_norm = LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.rotary_emb = None if config.rope is None else RotaryEmbedding(config.rope)
        tied = self.embed_tokens if sizes.tied else None
        self.lm_head = LMHead(sizes.hidden_size, sizes.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        x = self.embed_tokens(batch.token_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(batch.positions)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        cos_sin = None if self.rotary_emb is None else self.rotary_emb(batch.positions)
        for layer in self.layers:
            x = layer(x, cos_sin, batch)
        return self.lm_head(self.final_norm(x), batch.output_rows)
