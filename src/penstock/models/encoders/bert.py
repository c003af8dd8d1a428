"""BERT (Devlin et al., arXiv 1810.04805) with its masked-language head: ``LLM.logits`` has a row for each position.

Every token is of segment 0: the row of that token type is added to the table of positions when weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.decoder import MAX_LAYERS
from penstock.nn import (
    Attention,
    Batch,
    ColumnParallelLinear,
    Embedding,
    LayerNorm,
    LMHead,
    Module,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_rows,
    gelu,
)

__all__ = ["BertConfig", "BertEncoder", "Config", "Network", "embedding_sources", "read_bert"]


@dataclass(frozen=True)
class BertConfig:
    """The sizes of the network.  ``first_position`` is the row of the position table that the first token reads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    context_len: int
    norm_eps: float
    tied: bool
    first_position: int = 0


def read_bert(reader: ConfigReader, architecture: str, *, skips_padding: bool = False) -> BertConfig:
    """Read and check config.json; errors name the key.

    ``architecture`` is the only one that has a network here.  With ``skips_padding`` positions count from
    pad_token_id + 1, as in RoBERTa.
    """
    names = reader.text_list("architectures") or [architecture]
    if names != [architecture]:
        raise reader.error("architectures", f"[{architecture!r}], the only one supported", names)
    reader.one_of("hidden_act", ("gelu",), "gelu")
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
        vocab_size=reader.int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.int("intermediate_size", 3072),
        num_layers=reader.int("num_hidden_layers", 12, max=MAX_LAYERS),
        num_heads=num_heads,
        context_len=num_positions - first,
        norm_eps=reader.float("layer_norm_eps", 1e-12),
        tied=reader.bool("tie_word_embeddings", True),
        first_position=first,
    )


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> BertConfig:
        """Read and check config.json; errors name the key."""
        return read_bert(reader, "BertForMaskedLM")


class Embeddings(Module):
    """The sum of the rows of tokens and positions, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = Embedding(config.context_len, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        """Return the rows of a step, [T, hidden]."""
        return self.LayerNorm(self.word_embeddings(batch.token_ids) + self.position_embeddings(batch.positions))


class SelfAttention(Module):
    """Attention over all tokens of a request, without the output linear."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.query = ColumnParallelLinear(size, size, True)
        self.key = ColumnParallelLinear(size, size, True)
        self.value = ColumnParallelLinear(size, size, True)
        self.attention = Attention(heads, heads, size // heads, causal=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        return self.attention(self.query(x), self.key(x), self.value(x), batch)


class AddNorm(Module):
    """A linear, whose result is added to the residual stream, and the norm of the sum."""

    def __init__(self, in_features: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = RowParallelLinear(in_features, config.hidden_size, True)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the norm of dense(y) + x: [T, hidden] for y [T, in_features] and x [T, hidden]."""
        return self.LayerNorm(self.dense(y) + x)


class Layer(Module):
    """Attention and feed-forward, each followed by the norm of its sum with the residual stream."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(config), "output": AddNorm(config.hidden_size, config)})
        dense = ColumnParallelLinear(config.hidden_size, config.intermediate_size, True)
        self.intermediate = nn.ModuleDict({"dense": dense})
        self.output = AddNorm(config.intermediate_size, config)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = self.attention["output"](self.attention["self"](x, batch), x)
        return self.output(gelu(self.intermediate["dense"](x)), x)


class BertEncoder(Module):
    """The network without its head: token ids to hidden rows."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(config) for _ in range(config.num_layers))})

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embeddings(batch)
        for layer in self.encoder["layer"].children():
            x = layer(x, batch)
        return x


def embedding_sources(config: BertConfig, path: str) -> dict[str, Source]:
    """Return the source of the position table of the embeddings at module ``path``: with the row of token type 0."""
    first = config.first_position
    own = Source(
        f"{path}.position_embeddings.weight",
        ((first, first + config.context_len),),
        skipped=first,
        add_row=f"{path}.token_type_embeddings.weight",
    )
    return {own.tensor: own}


class Transform(Module):
    """The layer between the encoder and the output head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = ColumnParallelLinear(config.hidden_size, config.hidden_size, True)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed rows of x [R, hidden]: [R, hidden]."""
        return self.LayerNorm(gelu(self.dense(x)))


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
    """The encoder with its masked-language head."""

    unread_tensors = (
        "bert.embeddings.token_type_embeddings.weight",
        "bert.embeddings.position_ids",
        "bert.pooler.*",
        "cls.seq_relationship.*",
        "cls.predictions.bias",
        "cls.predictions.decoder.*",
    )

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertEncoder(config)
        tied = self.bert.embeddings.word_embeddings if config.tied else None
        self.cls = nn.ModuleDict({"predictions": Predictions(config, tied)})

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        logits: Tensor = self.cls["predictions"](gather_rows(self.bert(batch), batch.output_rows))
        return logits

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from that are not the tensor of their name."""
        table = embedding_sources(self.config, "bert.embeddings")
        if self.config.tied:  # otherwise transformers adds the decoder's own bias
            table["cls.predictions.decoder.bias"] = Source("cls.predictions.bias")
        return table
