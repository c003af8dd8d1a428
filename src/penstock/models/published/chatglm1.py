"""ChatGLM 1 (GLM, arXiv 2103.10360 and 2210.02414): a prompt is a prefix whose tokens see each other.

A prompt ends with the token [gMASK], and bos_token_id begins the answer.  The first half of each head turns by the
position in the prompt, where the answer has that of the prompt's last token, and the second half by the position in the
answer.  A branch adds to its normalised input, times sqrt(2 * num_layers).  A config of model_type chatglm with
position_encoding_2d has this network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader, RopeConfig, show
from penstock.errors import UnsupportedError
from penstock.models.layer_norm.parts import PlainMLP, Sizes, read_sizes
from penstock.models.sources import fused_rows
from penstock.nn import (
    Batch,
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    Module,
    PrefixLengths,
    RelativeAttention,
    RotaryEmbedding,
    apply_rope,
    prefix_positions,
    scale,
)
from penstock.nn.base import Tensor, nn, torch

__all__ = ["Config", "Network"]

_KEYS: Final = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "inner_hidden_size",
    "num_key_value_heads": "",
    "max_position_embeddings": "max_sequence_length",
    "layer_norm_eps": "layernorm_epsilon",
}
_FIXED: Final = {"position_encoding_2d": True, "prefix_projection": False}
"""Switches that have one supported value, which is also the default."""


@dataclass(frozen=True)
class _GlmConfig:
    """The sizes, and the token that begins an answer."""

    sizes: Sizes
    start_token: int

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.sizes.vocab_size

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.sizes.context_len


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> _GlmConfig:
        """Read and check config.json; errors name the key."""
        for key, expected in _FIXED.items():
            if reader.bool(key, expected) is not expected:
                raise UnsupportedError(
                    f"{reader.file}: {key}: expected {show(expected)}, got {show(not expected)}", param=key
                )
        for key in ("pre_seq_len", "quantization_bit"):
            if reader.int(key, 0, min=0):
                raise reader.error(key, "0 or null", reader.values[key])
        sizes = read_sizes(reader, gelu_form="tanh", tied=False, context_len=2048, keys=_KEYS)
        if sizes.head_dim % 4 or sizes.head_dim > 1024:
            raise reader.error("num_attention_heads", "heads of a multiple of 4, at most 1024", sizes.num_heads)
        start_token = reader.int("bos_token_id", 130004, min=0)
        if start_token >= sizes.vocab_size:
            raise reader.error("bos_token_id", f"a token below {sizes.vocab_size}", start_token)
        return _GlmConfig(sizes, start_token)


class _HalfRotary(RotaryEmbedding):
    """The cosines and sines of the pairs of one half of a head; the pairs of the other half do not turn."""

    def __init__(self, head_dim: int, half: int) -> None:
        super().__init__(RopeConfig(theta=10000.0, rotary_dim=head_dim // 2))
        values = self.inv_freq.numpy()
        self.inv_freq = torch.from_numpy(np.concatenate([values * (half == i) for i in range(2)]))


class _Attention(Module):
    """Attention of every token to the prompt, and of the answer to itself up to the token.

    Rows of q and k are in the order of the pairs that turn together: see ``Network.tensor_sources``.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, self.num_heads, self.head_dim = sizes.hidden_size, sizes.num_heads, sizes.head_dim
        self.q_proj = Linear(hidden, hidden, bias=True)
        self.k_proj = Linear(hidden, hidden, bias=True)
        self.v_proj = Linear(hidden, hidden, bias=True)
        self.dense = Linear(hidden, hidden, bias=True)
        self.attention = RelativeAttention(
            sizes.num_heads, sizes.head_dim, causal=True, keys="span", scale=sizes.head_dim**-0.5
        )

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], prefix: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k = (layer(x).view(-1, self.num_heads, self.head_dim) for layer in (self.q_proj, self.k_proj))
        for cos_sin in turns:
            q, k = apply_rope(q, cos_sin), apply_rope(k, cos_sin)
        y: Tensor = self.dense(self.attention.store_and_attend(q, k, self.v_proj(x), batch, prefix=prefix))
        return y


class _Layer(Module):
    """Attention and feed-forward, each added to its normalised input times ``alpha``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.alpha = math.sqrt(2 * sizes.num_layers)
        self.input_layernorm = LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.attention = _Attention(sizes)
        self.post_attention_layernorm = LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.mlp = PlainMLP(sizes, ("dense_h_to_4h", "dense_4h_to_h"))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], prefix: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = self.input_layernorm(x)
        x = self.post_attention_layernorm(scale(x, self.alpha) + self.attention(x, turns, prefix, batch))
        y: Tensor = scale(x, self.alpha) + self.mlp(x)
        return y


class _Transformer(Module):
    """The network without its output head."""

    def __init__(self, config: _GlmConfig) -> None:
        super().__init__()
        sizes = config.sizes
        self.word_embeddings = Embedding(sizes.vocab_size, sizes.hidden_size)
        self.prefix = PrefixLengths(config.start_token)
        self.rotary_prompt, self.rotary_answer = (_HalfRotary(sizes.head_dim, half) for half in range(2))
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.num_layers))
        self.final_layernorm = LayerNorm(sizes.hidden_size, sizes.norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x, prefix = self.word_embeddings(batch.token_ids), self.prefix(batch)
        turns = (
            self.rotary_prompt(prefix_positions(batch.positions, prefix, behind=False)),
            self.rotary_answer(prefix_positions(batch.positions, prefix, behind=True)),
        )
        for layer in self.layers:
            x = layer(x, turns, prefix, batch)
        y: Tensor = self.final_layernorm(x)
        return y


class Network(Module):
    """The language model."""

    unread_tensors = ("*.rotary_emb.inv_freq",)

    def __init__(self, config: _GlmConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = _Transformer(config)
        tied = self.transformer.word_embeddings if config.sizes.tied else None
        self.lm_head = LMHead(config.sizes.hidden_size, config.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return self.lm_head(self.transformer(batch), batch.output_rows)

    def tensor_sources(self) -> dict[str, Source]:
        """Return where q, k and v come from, which lie together in each head.

        A half of a head turns in pairs of its own two halves.  The quarters of q and k are stored in the order 0, 1, 2,
        3 and read in the order 0, 2, 1, 3, so that both halves turn as one head does.
        """
        table = fused_rows(self, "query_key_value", ("q_proj", "k_proj", "v_proj"), self.config.sizes.num_heads)
        size = self.config.sizes.head_dim // 4
        for name, source in table.items():
            if not name.split(".")[-2].startswith("v"):
                starts = (start + size * quarter for start, _ in source.rows for quarter in (0, 2, 1, 3))
                table[name] = replace(source, rows=tuple((start, start + size) for start in starts))
        return table
