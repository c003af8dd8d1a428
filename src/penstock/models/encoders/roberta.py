"""RoBERTa (Liu et al., arXiv 1907.11692): BERT whose positions count from pad_token_id + 1, with a head of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader
from penstock.models.encoders.bert import BertConfig, BertEncoder, embedding_sources, read_bert, unread
from penstock.nn import Batch, Embedding, LayerNorm, Linear, LMHead, Module, OutputRows, gelu
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]

_CLASSES = {"camembert": "Camembert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> BertConfig:
        """Read and check config.json; errors name the key."""
        kind = reader.one_of("model_type", _CLASSES, "roberta")
        return read_bert(reader, _CLASSES[kind], skips_padding=True)


class RobertaHead(Module):
    """The masked-language head."""

    def __init__(self, config: BertConfig, tied: Embedding | None) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, True)
        self.layer_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.decoder = LMHead(config.hidden_size, config.vocab_size, True, tied=tied)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [R, vocab] of x [R, hidden]."""
        return self.decoder(self.layer_norm(gelu(self.dense(x))))


class Network(Module):
    """The encoder with its masked-language head.

    Without one, the table of tokens takes its place, and only the hidden rows mean something.
    """

    tensor_prefix = "roberta."
    unread_tensors = (*unread("roberta."), "lm_head.bias", "lm_head.decoder.*")
    tied_tensors: ClassVar[Mapping[str, str]] = {"lm_head.decoder.bias": "lm_head.bias"}

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.roberta = BertEncoder(config)
        self.output_rows = OutputRows()
        words = self.roberta.embeddings.word_embeddings
        if config.has_head:
            self.lm_head: Module = RobertaHead(config, words if config.tied else None)
        else:
            self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=words)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        logits: Tensor = self.lm_head(self.output_rows(self.roberta(batch), batch.output_rows))
        return logits

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from that are not the tensor of their name."""
        table = embedding_sources(self.config, "roberta.embeddings")
        if self.config.has_head and self.config.tied:  # otherwise transformers adds the decoder's own bias
            table["lm_head.decoder.bias"] = Source("lm_head.bias")
        return table
