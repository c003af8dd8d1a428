"""T5 (Raffel et al., arXiv 1910.10683) and T5 1.1 with a gated feed-forward layer: an encoder, and mostly a decoder.

A request is one sequence: the tokens of the encoder, then those of the decoder, which begin with
decoder_start_token_id.  The first step of a request has all tokens of the encoder.  Both halves compute every token of
a step, and what is computed of a token of the other half is not used; a program leaves the encoder out of a step that
has none of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader
from penstock.models.decoder import MAX_LAYERS
from penstock.models.layer_norm.parts import GELU_FORMS
from penstock.nn import (
    Batch,
    DistanceBias,
    Embedding,
    Linear,
    LMHead,
    Module,
    OutputRows,
    PrefixLengths,
    RelativeAttention,
    RMSNorm,
    gelu,
    relu,
    scale,
)
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "Network", "T5Config", "distance_buckets", "read_t5"]

_MAX_REACH: Final = 1 << 13
_MAX_BUCKETS: Final = 1 << 12


@dataclass(frozen=True)
class T5Config:
    """The sizes of the network.

    ``num_layers`` are those of the encoder, ``num_decoder_layers`` 0 without a decoder.  ``reach``: the distance from
    which on all biases are equal.  ``each_layer_has_bias``: otherwise the first layer of a stack has that of all.
    ``gelu_form``: "none" or "tanh", "" for ReLU.  ``start_token``: the first of the decoder.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    head_dim: int
    num_buckets: int
    reach: int
    context_len: int
    norm_eps: float
    gelu_form: str
    is_gated: bool
    tied: bool
    scales_output: bool
    start_token: int
    each_layer_has_bias: bool


def _read_feed_forward(reader: ConfigReader, default: str) -> tuple[str, bool]:
    """Return the form of GELU, "" for ReLU, and whether the feed-forward layer is gated."""
    choices = ("relu", "gated-relu", *GELU_FORMS, *(f"gated-{name}" for name in GELU_FORMS))
    name = reader.one_of("feed_forward_proj", choices, default)
    if name == "gated-gelu":  # the tanh form, as the checkpoints of T5 1.1 were trained
        return "tanh", True
    activation = name.removeprefix("gated-")
    return GELU_FORMS.get(activation, ""), name.startswith("gated-")


def read_t5(reader: ConfigReader, base: str, *, feed_forward: str, each_layer_has_bias: bool) -> T5Config:
    """Read and check config.json; errors name the key.

    ``base`` begins the names of transformers' classes; ``feed_forward`` is the family's default.
    """
    known = (f"{base}ForConditionalGeneration", f"{base}EncoderModel")
    names = reader.text_list("architectures") or [known[0]]
    if len(names) != 1 or names[0] not in known:
        raise reader.error("architectures", " or ".join(known), names)
    has_decoder = names[0] == known[0]
    num_layers = reader.int("num_layers", 6, max=MAX_LAYERS)
    num_buckets = reader.int("relative_attention_num_buckets", 32, min=4, max=_MAX_BUCKETS)
    if num_buckets % 4:
        raise reader.error("relative_attention_num_buckets", "a multiple of 4", num_buckets)
    ties = reader.bool("tie_word_embeddings", True)
    gelu_form, is_gated = _read_feed_forward(reader, feed_forward)
    vocab_size = reader.int("vocab_size", 32128)
    start_tokens = reader.int_or_list("decoder_start_token_id") or (0,)
    if len(start_tokens) != 1 or start_tokens[0] >= vocab_size:
        raise reader.error("decoder_start_token_id", f"one token below {vocab_size}", list(start_tokens))
    return T5Config(
        vocab_size=vocab_size,
        hidden_size=reader.int("d_model", 512),
        intermediate_size=reader.int("d_ff", 2048),
        num_layers=num_layers,
        num_decoder_layers=reader.int("num_decoder_layers", num_layers, max=MAX_LAYERS) if has_decoder else 0,
        num_heads=reader.int("num_heads", 8),
        head_dim=reader.int("d_kv", 64),
        num_buckets=num_buckets,
        reach=reader.int("relative_attention_max_distance", 128, min=num_buckets, max=_MAX_REACH),
        context_len=reader.int("n_positions", 512) * (2 if has_decoder else 1),
        norm_eps=reader.float("layer_norm_epsilon", 1e-6),
        gelu_form=gelu_form,
        is_gated=is_gated,
        tied=ties or not has_decoder,
        scales_output=has_decoder and reader.bool("scale_decoder_outputs", ties),
        start_token=start_tokens[0],
        each_layer_has_bias=each_layer_has_bias,
    )


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> T5Config:
        """Read and check config.json; errors name the key."""
        return read_t5(reader, "T5", feed_forward="relu", each_layer_has_bias=False)


def distance_buckets(num_buckets: int, reach: int, *, looks_ahead: bool) -> list[int]:
    """Return the bucket of each distance (key position - query position) from -reach to reach.

    Near distances have a bucket each; the others share buckets by the logarithm, up to ``reach`` (section 2.1 of the
    paper).  With ``looks_ahead`` half of the buckets are those of later keys; otherwise these have bucket 0.
    """
    distance = np.arange(-reach, reach + 1)
    behind = -np.minimum(distance, 0)
    first = np.zeros_like(distance)
    if looks_ahead:
        num_buckets //= 2
        first, behind = (distance > 0) * num_buckets, np.abs(distance)
    exact = num_buckets // 2
    near = np.maximum(behind, exact).astype(np.float32)  # nearer ones have a bucket each
    shares = np.log(near / np.float32(exact)) / np.float32(math.log(reach / exact))
    shared = exact + np.minimum((shares * np.float32(num_buckets - exact)).astype(np.int64), num_buckets - exact - 1)
    buckets: list[int] = (first + np.where(behind < exact, behind, shared)).tolist()
    return buckets


class T5SelfAttention(Module):
    """The projections of attention, and the bias by distance of a layer that has it."""

    def __init__(self, config: T5Config, *, causal: bool, keys: str, has_bias: bool) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.num_heads * config.head_dim
        self.q = Linear(hidden, inner)
        self.k = Linear(hidden, inner)
        self.v = Linear(hidden, inner)
        self.o = Linear(inner, hidden)
        self.attention = RelativeAttention(config.num_heads, config.head_dim, causal=causal, keys=keys)
        self.has_bias = has_bias
        if has_bias:
            self.relative_attention_bias = DistanceBias(config.num_heads, config.reach)

    def forward(self, x: Tensor, memory: Tensor, batch: Batch, bias: Tensor | None, prefix: Tensor | None) -> Tensor:
        """Return attention of x [T, hidden] over the keys and values of ``memory`` [T, hidden]: [T, hidden]."""
        k, v = self.k(memory), self.v(memory)
        y: Tensor = self.o(self.attention.store_and_attend(self.q(x), k, v, batch, bias=bias, prefix=prefix))
        return y


class T5FeedForward(Module):
    """The feed-forward layer, gated in T5 1.1."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        self.gelu_form = config.gelu_form
        names = ("wi_0", "wi_1") if config.is_gated else ("wi",)
        self.inner = [Linear(hidden, size) for _ in names]
        for name, layer in zip(names, self.inner, strict=True):
            self.add_module(name, layer)
        self.wo = Linear(size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        first, *gated = (layer(x) for layer in self.inner)
        y = gelu(first, self.gelu_form) if self.gelu_form else relu(first)
        z: Tensor = self.wo(y * gated[0] if gated else y)
        return z


class SubLayer(Module):
    """A norm, and what is computed of the normalised rows and added to the residual stream."""

    def __init__(self, config: T5Config, name: str, inner: Module) -> None:
        super().__init__()
        self.inner_name = name
        self.add_module(name, inner)
        self.layer_norm = RMSNorm(config.hidden_size, config.norm_eps)

    @property
    def inner(self) -> Module:
        """The layer behind the norm."""
        inner: Module = self.get_submodule(self.inner_name)  # type: ignore[assignment]
        return inner


class Block(Module):
    """Self-attention, in a decoder attention over the encoder, and the feed-forward layer."""

    def __init__(self, config: T5Config, *, in_decoder: bool, has_bias: bool) -> None:
        super().__init__()
        has_prefix = config.num_decoder_layers > 0
        keys = "rest" if in_decoder else "prefix" if has_prefix else "all"
        own = T5SelfAttention(config, causal=in_decoder, keys=keys, has_bias=has_bias)
        layers = [SubLayer(config, "SelfAttention", own)]
        if in_decoder:
            cross = T5SelfAttention(config, causal=True, keys="prefix", has_bias=False)
            layers.append(SubLayer(config, "EncDecAttention", cross))
        layers.append(SubLayer(config, "DenseReluDense", T5FeedForward(config)))
        self.layer = nn.ModuleList(layers)

    @property
    def bias(self) -> Tensor | None:
        """The bias by distance, if this layer has one."""
        own = self.get_submodule("layer.0.SelfAttention")
        return own.relative_attention_bias.weight if isinstance(own, T5SelfAttention) and own.has_bias else None

    def forward(
        self, x: Tensor, memory: Tensor | None, batch: Batch, bias: Tensor | None, prefix: Tensor | None
    ) -> Tensor:
        """Return the block's output [T, hidden] for x [T, hidden], and in a decoder ``memory`` [T, hidden]."""
        own, *cross, feed_forward = (layer for layer in self.layer if isinstance(layer, SubLayer))
        y = own.layer_norm(x)
        x = x + own.inner(y, y, batch, bias, prefix)
        for layer in cross:
            x = x + layer.inner(layer.layer_norm(x), memory, batch, None, prefix)
        rows: Tensor = x + feed_forward.inner(feed_forward.layer_norm(x))
        return rows


class Stack(Module):
    """The encoder or the decoder."""

    def __init__(self, config: T5Config, num_layers: int, *, in_decoder: bool) -> None:
        super().__init__()
        has_bias = [config.each_layer_has_bias or i == 0 for i in range(num_layers)]
        self.block = nn.ModuleList(Block(config, in_decoder=in_decoder, has_bias=has) for has in has_bias)
        self.final_layer_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, memory: Tensor | None, batch: Batch, prefix: Tensor | None) -> Tensor:
        """Return the normalised rows [T, hidden] for the rows of tokens x [T, hidden]."""
        bias: Tensor | None = None
        for block in (block for block in self.block if isinstance(block, Block)):
            bias = bias if block.bias is None else block.bias
            x = block(x, memory, batch, bias, prefix)
        y: Tensor = self.final_layer_norm(x)
        return y


class Network(Module):
    """The encoder with the decoder and its head.

    Without a decoder the table of tokens takes the place of the head, and only the hidden rows mean something.
    """

    unread_tensors: tuple[str, ...] = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
    tied_tensors: Mapping[str, str] = dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
    )

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = Embedding(config.vocab_size, config.hidden_size)
        self.encoder = Stack(config, config.num_layers, in_decoder=False)
        if config.num_decoder_layers:
            self.prefix = PrefixLengths(config.start_token)
            self.decoder = Stack(config, config.num_decoder_layers, in_decoder=True)
        self.output_rows = OutputRows()
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=self.shared if config.tied else None)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]; those of tokens of the encoder mean nothing."""
        x = self.shared(batch.token_ids)
        prefix = self.prefix(batch) if self.config.num_decoder_layers else None
        y = self.encoder(x, None, batch, prefix)
        if self.config.num_decoder_layers:
            y = self.decoder(x, y, batch, prefix)
        rows = self.output_rows(y, batch.output_rows)
        logits: Tensor = self.lm_head(scale(rows, self.config.hidden_size**-0.5 if self.config.scales_output else 1.0))
        return logits

    def tensor_sources(self) -> Sources:
        """Return where the biases by distance come from: rows of a table by bucket, in the order of distances."""
        sizes = (self.config.num_buckets, self.config.reach)
        table: dict[str, Source] = {}
        for path, module in self.named_modules():
            if isinstance(module, DistanceBias):
                buckets = distance_buckets(*sizes, looks_ahead=path.startswith("encoder."))
                rows = tuple((bucket, bucket + 1) for bucket in buckets)
                table[f"{path}.weight"] = Source(f"{path}.weight", rows, rows_transposed=True, has_gaps=True)
        return table
