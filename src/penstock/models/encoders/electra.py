"""ELECTRA (Clark et al., arXiv 2003.10555): BERT with embeddings of a width of their own, and its two heads.

The generator has a masked-language head.  The discriminator, which tells which tokens were replaced, is read without
its head.
"""

from __future__ import annotations

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.encoders.bert import BertConfig, BertEmbeddings, BertLayer, embedding_sources, read_bert, unread
from penstock.nn import Batch, LayerNorm, Linear, LMHead, Module, OutputRows, gelu
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "Network", "read_factorized"]


def read_factorized(reader: ConfigReader, base: str, *, gelu: str = "gelu") -> BertConfig:
    """Read and check config.json of a family whose embeddings have a width of their own; errors name the key."""
    config = read_bert(reader, base, gelu=gelu, embedding_size=128)
    if not config.has_head and config.embedding_size > config.hidden_size:
        expected = f"at most hidden_size ({config.hidden_size}) without a masked-language head"
        raise reader.error("embedding_size", expected, config.embedding_size)
    return config


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> BertConfig:
        """Read and check config.json; errors name the key."""
        return read_factorized(reader, "Electra")


class ElectraEncoder(Module):
    """The network without its head: token ids to hidden rows."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config.of_embeddings)
        is_narrow = config.embedding_size != config.hidden_size
        self.embeddings_project = (
            Linear(config.embedding_size, config.hidden_size, True) if is_narrow else nn.Identity()
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))})

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embeddings_project(self.embeddings(batch))
        for layer in self.encoder["layer"].children():
            x = layer(x, batch)
        return x


class ElectraPredictions(Module):
    """The layer between the encoder and the output linear."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.embedding_size, True)
        self.LayerNorm = LayerNorm(config.embedding_size, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows [R, embedding] of x [R, hidden]."""
        return self.LayerNorm(gelu(self.dense(x)))


class Network(Module):
    """The encoder with its masked-language head.

    Without one, the table of tokens takes its place, and only the hidden rows mean something.
    """

    tensor_prefix = "electra."
    unread_tensors = (*unread("electra."), "generator_lm_head.weight", "discriminator_predictions.*")

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.electra = ElectraEncoder(config)
        self.output_rows = OutputRows(config.hidden_size)
        words = self.electra.embeddings.word_embeddings
        if config.has_head:
            self.generator_predictions = ElectraPredictions(config)
            tied = words if config.tied else None
            self.generator_lm_head = LMHead(config.embedding_size, config.vocab_size, True, tied=tied)
        else:
            self.lm_head = LMHead(config.embedding_size, config.vocab_size, tied=words)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        x = self.output_rows(self.electra(batch), batch.output_rows)
        if self.config.has_head:
            return self.generator_lm_head(self.generator_predictions(x))
        return self.lm_head(x[:, : self.config.embedding_size])

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from that are not the tensor of their name."""
        return embedding_sources(self.config, "electra.embeddings")
