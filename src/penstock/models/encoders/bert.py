"""BERT (Devlin et al., arXiv 1810.04805) with its masked-language head: ``LLM.logits`` has a row for each position.

Every token is of segment 0: the row of that token type is added to the table of positions when weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from penstock.checkpoint.pooling.files import classifier_names, has_segments
from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader
from penstock.models.decoder import MAX_LAYERS
from penstock.models.layer_norm.parts import read_gelu
from penstock.nn import Attention, Batch, Embedding, LayerNorm, Linear, LMHead, Module, OutputRows, gelu
from penstock.nn.base import Tensor, nn

__all__ = [
    "BertConfig", "BertEncoder", "Config", "Network", "check_architecture", "embedding_sources", "read_bert", "unread",
]  # fmt: skip


@dataclass(frozen=True)
class BertConfig:
    """The sizes of the network.  ``first_position`` is the row of the position table that the first token reads.

    ``has_head``: it has a masked-language head.  With ``num_segments`` 2 the table of tokens has every word twice, the
    second time for the second text of a pair; ``vocab_size`` counts both.  ``gelu_form`` is "none" or "tanh".
    ``embedding_size``: the width of the embeddings, if it is not ``hidden_size``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    context_len: int
    norm_eps: float
    tied: bool
    first_position: int = 0
    has_head: bool = True
    num_segments: int = 1
    gelu_form: str = "none"
    embedding_size: int = 0

    @property
    def of_embeddings(self) -> BertConfig:
        """The sizes of the embeddings, whose width is ``hidden_size``."""
        return replace(self, hidden_size=self.embedding_size or self.hidden_size)


_PRETRAINED = ("Albert", "Bert")
"""Families whose class ForPreTraining has a masked-language head; that of ELECTRA tells which tokens were replaced."""


def check_architecture(reader: ConfigReader, base: str) -> bool:
    """Return True for a folder with a masked-language head, False for the bare model and a classifier.

    ``base`` begins the names of transformers' classes.  Errors name the key.
    """
    with_head = [f"{base}ForMaskedLM", *([f"{base}ForPreTraining"] if base in _PRETRAINED else [])]
    without = ["ElectraForPreTraining"] if base == "Electra" else []
    known = [*with_head, f"{base}Model", *classifier_names(base), *without]
    names = reader.text_list("architectures") or known[:1]
    if len(names) != 1 or names[0] not in known:
        raise reader.error("architectures", f"one of {', '.join(known)}", names)
    return names[0] in with_head


def read_bert(
    reader: ConfigReader, base: str, *, skips_padding: bool = False, gelu: str = "gelu", embedding_size: int = 0
) -> BertConfig:
    """Read and check config.json; errors name the key.

    ``base`` begins the names of transformers' classes.  With ``skips_padding`` positions count from pad_token_id + 1,
    as in RoBERTa.  ``gelu`` and ``embedding_size`` are the family's defaults; a size of 0 is that of the hidden rows.
    """
    has_head = check_architecture(reader, base)
    num_segments = 2 if has_segments(reader) else 1
    reader.one_of("position_embedding_type", ("absolute",), "absolute")
    for key in ("is_decoder", "add_cross_attention"):
        if reader.bool(key, False):
            raise reader.error(key, "false", True)
    hidden_size, num_heads = reader.int("hidden_size", 768), reader.int("num_attention_heads", 12)
    if hidden_size % num_heads:
        raise reader.error("hidden_size", f"a multiple of num_attention_heads ({num_heads})", hidden_size)
    first = reader.int("pad_token_id", 1, min=0) + 1 if skips_padding else 0
    num_positions = reader.int("max_position_embeddings", 512)
    if num_positions <= first:
        raise reader.error("max_position_embeddings", f"more than pad_token_id + 1 ({first})", num_positions)
    return BertConfig(
        vocab_size=reader.int("vocab_size") * num_segments,
        hidden_size=hidden_size,
        intermediate_size=reader.int("intermediate_size", 3072),
        num_layers=reader.int("num_hidden_layers", 12, max=MAX_LAYERS),
        num_heads=num_heads,
        context_len=num_positions - first,
        norm_eps=reader.float("layer_norm_eps", 1e-12),
        tied=reader.bool("tie_word_embeddings", True),
        first_position=first,
        has_head=has_head,
        num_segments=num_segments,
        gelu_form=read_gelu(reader, "hidden_act", gelu),
        embedding_size=reader.int("embedding_size", embedding_size) if embedding_size else 0,
    )


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> BertConfig:
        """Read and check config.json; errors name the key."""
        return read_bert(reader, "Bert")


class BertEmbeddings(Module):
    """The sum of the rows of tokens and positions, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = Embedding(config.context_len, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        """Return the rows of a step, [T, hidden]."""
        return self.LayerNorm(self.word_embeddings(batch.token_ids) + self.position_embeddings(batch.positions))


class BertSelfAttention(Module):
    """Attention over all tokens of a request, without the output linear."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.query = Linear(size, size, True)
        self.key = Linear(size, size, True)
        self.value = Linear(size, size, True)
        self.attention = Attention(heads, heads, size // heads, causal=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        return self.attention(self.query(x), self.key(x), self.value(x), batch)


class AddNorm(Module):
    """A linear, whose result is added to the residual stream, and the norm of the sum."""

    def __init__(self, in_features: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = Linear(in_features, config.hidden_size, True)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the norm of dense(y) + x: [T, hidden] for y [T, in_features] and x [T, hidden]."""
        return self.LayerNorm(self.dense(y) + x)


class BertLayer(Module):
    """Attention and feed-forward, each followed by the norm of its sum with the residual stream."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": BertSelfAttention(config), "output": AddNorm(config.hidden_size, config)}
        )
        dense = Linear(config.hidden_size, config.intermediate_size, True)
        self.intermediate = nn.ModuleDict({"dense": dense})
        self.output = AddNorm(config.intermediate_size, config)
        self.gelu_form = config.gelu_form

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = self.attention["output"](self.attention["self"](x, batch), x)
        return self.output(gelu(self.intermediate["dense"](x), self.gelu_form), x)


class BertEncoder(Module):
    """The network without its head: token ids to hidden rows."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))})

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embeddings(batch)
        for layer in self.encoder["layer"].children():
            x = layer(x, batch)
        return x


def embedding_sources(config: BertConfig, path: str) -> dict[str, Source | tuple[Source, ...]]:
    """Return the sources of the tables of the embeddings at module ``path``: rows with that of their token type added.

    With one segment it is added to positions, otherwise to the words of each segment.
    """
    first, types = config.first_position, f"{path}.token_type_embeddings.weight"
    words = f"{path}.word_embeddings.weight"
    positions = Source(f"{path}.position_embeddings.weight", ((first, first + config.context_len),), skipped=first)
    if config.num_segments == 1:
        return {positions.tensor: replace(positions, add_row=types)}
    segments = tuple(Source(words, add_row=types, added_row=segment) for segment in range(config.num_segments))
    return {positions.tensor: positions, words: segments}


def unread(prefix: str) -> tuple[str, ...]:
    """Return the tensors that an encoder at module path ``prefix`` need not read, whose names may lack the prefix."""
    names = ("embeddings.token_type_embeddings.weight", "embeddings.position_ids", "pooler.*")
    return (*names, *(f"{prefix}{name}" for name in names))


class Transform(Module):
    """The layer between the encoder and the output head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, True)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.gelu_form = config.gelu_form

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed rows of x [R, hidden]: [R, hidden]."""
        return self.LayerNorm(gelu(self.dense(x), self.gelu_form))


class Predictions(Module):
    """The masked-language head."""

    def __init__(self, config: BertConfig, tied: Embedding | None) -> None:
        super().__init__()
        self.transform = Transform(config)
        self.decoder = LMHead(config.hidden_size, config.vocab_size, True, tied=tied)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [R, vocab] of x [R, hidden]."""
        return self.decoder(self.transform(x))


class Network(Module):
    """The encoder with its masked-language head.

    Without one, the table of tokens takes its place, and only the hidden rows mean something.
    """

    tensor_prefix = "bert."
    other_ends = ((".LayerNorm.weight", ".LayerNorm.gamma"), (".LayerNorm.bias", ".LayerNorm.beta"))  # TensorFlow's
    unread_tensors = (*unread("bert."), "cls.seq_relationship.*", "cls.predictions.bias", "cls.predictions.decoder.*")
    tied_tensors: ClassVar[Mapping[str, str]] = {"cls.predictions.decoder.bias": "cls.predictions.bias"}

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertEncoder(config)
        self.output_rows = OutputRows()
        words = self.bert.embeddings.word_embeddings
        if config.has_head:
            self.cls = nn.ModuleDict({"predictions": Predictions(config, words if config.tied else None)})
        else:
            self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=words)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        head = self.cls["predictions"] if self.config.has_head else self.lm_head
        logits: Tensor = head(self.output_rows(self.bert(batch), batch.output_rows))
        return logits

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from that are not the tensor of their name."""
        table = embedding_sources(self.config, "bert.embeddings")
        if self.config.has_head and self.config.tied:  # otherwise transformers adds the decoder's own bias
            table["cls.predictions.decoder.bias"] = Source("cls.predictions.bias")
        return table
