"""MPNet (Song et al., arXiv 2004.09297): RoBERTa without token types, whose scores have a bias by distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader
from penstock.models.encoder_decoder.t5 import distance_buckets
from penstock.models.encoders.bert import AddNorm, BertConfig, BertEmbeddings, read_bert
from penstock.models.encoders.roberta import RobertaHead
from penstock.nn import (
    Batch,
    DistanceBias,
    LayerNorm,
    Linear,
    LMHead,
    Module,
    OutputRows,
    RelativeAttention,
    gelu,
)
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "Network"]

_NUM_BUCKETS: Final = 32
_REACH: Final = 128
"""transformers computes with these numbers, whatever the config says; it reads a larger table in part."""
_FIRST_POSITION: Final = 2


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> BertConfig:
        """Read and check config.json; errors name the key."""
        reader.int("relative_attention_num_buckets", _NUM_BUCKETS, min=_NUM_BUCKETS, max=_NUM_BUCKETS)
        config = read_bert(reader, "MPNet")
        if config.context_len <= _FIRST_POSITION:
            raise reader.error("max_position_embeddings", f"more than {_FIRST_POSITION}", config.context_len)
        return replace(config, first_position=_FIRST_POSITION, context_len=config.context_len - _FIRST_POSITION)


class MPNetSelfAttention(Module):
    """Attention over all tokens of a request, with a bias by distance."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.q = Linear(size, size, True)
        self.k = Linear(size, size, True)
        self.v = Linear(size, size, True)
        self.o = Linear(size, size, True)
        head_dim = size // heads
        self.attention = RelativeAttention(heads, head_dim, causal=False, scale=head_dim**-0.5)

    def forward(self, x: Tensor, batch: Batch, bias: Tensor) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        rows = self.attention.store_and_attend(self.q(x), self.k(x), self.v(x), batch, bias=bias)
        return self.o(rows)


class MPNetLayer(Module):
    """Attention and feed-forward, each followed by the norm of its sum with the residual stream."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.attention = nn.ModuleDict({"attn": MPNetSelfAttention(config), "LayerNorm": norm})
        dense = Linear(config.hidden_size, config.intermediate_size, True)
        self.intermediate = nn.ModuleDict({"dense": dense})
        self.output = AddNorm(config.intermediate_size, config)
        self.gelu_form = config.gelu_form

    def forward(self, x: Tensor, batch: Batch, bias: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = self.attention["LayerNorm"](self.attention["attn"](x, batch, bias) + x)
        return self.output(gelu(self.intermediate["dense"](x), self.gelu_form), x)


class MPNetLayers(Module):
    """The layers, and the bias that all of them add."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(MPNetLayer(config) for _ in range(config.num_layers))
        self.relative_attention_bias = DistanceBias(config.num_heads, _REACH)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the hidden rows [T, hidden] for the rows of tokens x [T, hidden]."""
        for layer in self.layer.children():
            x = layer(x, batch, self.relative_attention_bias.weight)
        return x


class MPNetEncoder(Module):
    """The network without its head: token ids to hidden rows."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.encoder = MPNetLayers(config)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        return self.encoder(self.embeddings(batch), batch)


class Network(Module):
    """The encoder with its masked-language head.

    Without one, the table of tokens takes its place, and only the hidden rows mean something.
    """

    tensor_prefix = "mpnet."
    unread_tensors = (
        *("embeddings.position_ids", "pooler.*", "mpnet.embeddings.position_ids", "mpnet.pooler.*"),
        *("lm_head.bias", "lm_head.decoder.*"),
    )
    tied_tensors: ClassVar[Mapping[str, str]] = {"lm_head.decoder.bias": "lm_head.bias"}

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.mpnet = MPNetEncoder(config)
        self.output_rows = OutputRows()
        words = self.mpnet.embeddings.word_embeddings
        if config.has_head:
            self.lm_head: Module = RobertaHead(config, words if config.tied else None)
        else:
            self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=words)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        logits: Tensor = self.lm_head(self.output_rows(self.mpnet(batch), batch.output_rows))
        return logits

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from that are not the tensor of their name."""
        first, positions = self.config.first_position, "mpnet.embeddings.position_embeddings.weight"
        bias = "mpnet.encoder.relative_attention_bias.weight"
        buckets = distance_buckets(_NUM_BUCKETS, _REACH, looks_ahead=True)
        rows = tuple((bucket, bucket + 1) for bucket in buckets)
        table = {
            positions: Source(positions, ((first, first + self.config.context_len),), skipped=first),
            bias: Source(bias, rows, rows_transposed=True, has_gaps=True),
        }
        if self.config.has_head and self.config.tied:  # otherwise transformers adds the decoder's own bias
            table["lm_head.decoder.bias"] = Source("lm_head.bias")
        return table
