"""ALBERT (Lan et al., arXiv 1909.11942): BERT whose layers share their weights, with narrow embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader
from penstock.models.decoder import MAX_LAYERS
from penstock.models.encoders.bert import BertConfig, BertEmbeddings, embedding_sources, unread
from penstock.models.encoders.electra import read_factorized
from penstock.nn import Attention, Batch, Embedding, LayerNorm, Linear, LMHead, Module, OutputRows, gelu
from penstock.nn.base import Tensor, nn

__all__ = ["AlbertConfig", "Config", "Network"]


@dataclass(frozen=True)
class AlbertConfig:
    """The sizes of the network.  ``groups``: by layer, the group of weights that it computes with, each several times.

    ``group_len`` is the number of layers of a group.
    """

    bert: BertConfig
    groups: tuple[int, ...]
    group_len: int

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.bert.context_len

    @property
    def vocab_size(self) -> int:
        """The number of rows of the table of tokens."""
        return self.bert.vocab_size


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> AlbertConfig:
        """Read and check config.json; errors name the key."""
        bert = read_factorized(reader, "Albert", gelu="gelu_new")
        num_groups = reader.int("num_hidden_groups", 1, max=MAX_LAYERS)
        group_len = reader.int("inner_group_num", 1, max=MAX_LAYERS)
        if bert.num_layers * group_len > MAX_LAYERS:
            raise reader.error("inner_group_num", f"at most {MAX_LAYERS} layers in all", group_len)
        groups = tuple(int(layer / (bert.num_layers / num_groups)) for layer in range(bert.num_layers))
        return AlbertConfig(bert, groups, group_len)


class AlbertSelfAttention(Module):
    """Attention with the norm of its sum with the residual stream.  The caller has the pages of keys and values."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.query = Linear(size, size, True)
        self.key = Linear(size, size, True)
        self.value = Linear(size, size, True)
        self.dense = Linear(size, size, True)
        self.LayerNorm = LayerNorm(size, config.norm_eps)

    def forward(self, x: Tensor, attention: Attention, batch: Batch) -> Tensor:
        """Return the normalised sum of x [T, hidden] and attention over it: [T, hidden]."""
        rows = attention(self.query(x), self.key(x), self.value(x), batch)
        return self.LayerNorm(self.dense(rows) + x)


class AlbertLayer(Module):
    """Attention and feed-forward, each followed by the norm of its sum with the residual stream."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = AlbertSelfAttention(config)
        self.ffn = Linear(config.hidden_size, config.intermediate_size, True)
        self.ffn_output = Linear(config.intermediate_size, config.hidden_size, True)
        self.full_layer_layer_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.gelu_form = config.gelu_form

    def forward(self, x: Tensor, attention: Attention, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = self.attention(x, attention, batch)
        return self.full_layer_layer_norm(self.ffn_output(gelu(self.ffn(x), self.gelu_form)) + x)


class AlbertLayers(Module):
    """The groups of layers, and pages of keys and values for every time that one is computed."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        bert, each = config.bert, range(config.group_len)
        self.embedding_hidden_mapping_in = Linear(bert.embedding_size, bert.hidden_size, True)
        self.albert_layer_groups = nn.ModuleList(
            nn.ModuleDict({"albert_layers": nn.ModuleList(AlbertLayer(bert) for _ in each)})
            for _ in range(max(config.groups) + 1)
        )
        self.order = [(group, layer) for group in config.groups for layer in each]
        heads = bert.num_heads
        self.attentions = nn.ModuleList(
            Attention(heads, heads, bert.hidden_size // heads, causal=False) for _ in self.order
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the hidden rows [T, hidden] for the rows of tokens x [T, embedding]."""
        x = self.embedding_hidden_mapping_in(x)
        for (group, layer), attention in zip(self.order, self.attentions.children(), strict=True):
            inner = self.get_submodule(f"albert_layer_groups.{group}.albert_layers.{layer}")
            x = inner(x, attention, batch)
        return x


class AlbertEncoder(Module):
    """The network without its head: token ids to hidden rows."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config.bert.of_embeddings)
        self.encoder = AlbertLayers(config)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        return self.encoder(self.embeddings(batch), batch)


class AlbertPredictions(Module):
    """The masked-language head."""

    def __init__(self, config: BertConfig, tied: Embedding | None) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.embedding_size, True)
        self.LayerNorm = LayerNorm(config.embedding_size, config.norm_eps)
        self.decoder = LMHead(config.embedding_size, config.vocab_size, True, tied=tied)
        self.gelu_form = config.gelu_form

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [R, vocab] of x [R, hidden]."""
        return self.decoder(self.LayerNorm(gelu(self.dense(x), self.gelu_form)))


class Network(Module):
    """The encoder with its masked-language head.

    Without one, the table of tokens takes its place, and only the hidden rows mean something.
    """

    tensor_prefix = "albert."
    unread_tensors = (*unread("albert."), "predictions.bias", "predictions.decoder.*", "sop_classifier.*")
    tied_tensors: ClassVar[Mapping[str, str]] = {"predictions.decoder.bias": "predictions.bias"}

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.config = config.bert
        self.albert = AlbertEncoder(config)
        self.output_rows = OutputRows(config.bert.hidden_size)
        words = self.albert.embeddings.word_embeddings
        if config.bert.has_head:
            self.predictions = AlbertPredictions(config.bert, words if config.bert.tied else None)
        else:
            self.lm_head = LMHead(config.bert.embedding_size, config.vocab_size, tied=words)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        x = self.output_rows(self.albert(batch), batch.output_rows)
        if self.config.has_head:
            return self.predictions(x)
        return self.lm_head(x[:, : self.config.embedding_size])

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from that are not the tensor of their name."""
        table = embedding_sources(self.config, "albert.embeddings")
        if self.config.has_head and self.config.tied:  # otherwise transformers adds the decoder's own bias
            table["predictions.decoder.bias"] = Source("predictions.bias")
        return table
