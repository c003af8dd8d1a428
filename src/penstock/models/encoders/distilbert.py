"""DistilBERT (Sanh et al., arXiv 1910.01108): BERT without token types, with its own names of tensors and keys."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import MAX_LAYERS
from penstock.models.encoders.bert import BertConfig, BertEmbeddings, check_architecture
from penstock.nn import Attention, Batch, LayerNorm, Linear, LMHead, Module, OutputRows, gelu
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "Network"]

_NORM_EPS = 1e-12  # no key sets it


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> BertConfig:
        """Read and check config.json; errors name the key."""
        has_head = check_architecture(reader, "DistilBert")
        reader.one_of("activation", ("gelu",), "gelu")
        hidden_size, num_heads = reader.int("dim", 768), reader.int("n_heads", 12)
        if hidden_size % num_heads:
            raise reader.error("dim", f"a multiple of n_heads ({num_heads})", hidden_size)
        return BertConfig(
            vocab_size=reader.int("vocab_size", 30522),
            hidden_size=hidden_size,
            intermediate_size=reader.int("hidden_dim", 3072),
            num_layers=reader.int("n_layers", 6, max=MAX_LAYERS),
            num_heads=num_heads,
            context_len=reader.int("max_position_embeddings", 512),
            norm_eps=_NORM_EPS,
            tied=reader.bool("tie_word_embeddings", True),
            has_head=has_head,
        )


class DistilBertSelfAttention(Module):
    """Attention over all tokens of a request."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.q_lin = Linear(size, size, True)
        self.k_lin = Linear(size, size, True)
        self.v_lin = Linear(size, size, True)
        self.attention = Attention(heads, heads, size // heads, causal=False)
        self.out_lin = Linear(size, size, True)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        rows: Tensor = self.attention(self.q_lin(x), self.k_lin(x), self.v_lin(x), batch)
        return self.out_lin(rows)


class DistilBertFeedForward(Module):
    """Two linears with gelu between them."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.lin1 = Linear(config.hidden_size, config.intermediate_size, True)
        self.lin2 = Linear(config.intermediate_size, config.hidden_size, True)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        return self.lin2(gelu(self.lin1(x)))


class DistilBertLayer(Module):
    """Attention and feed-forward, each followed by the norm of its sum with the residual stream."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = DistilBertSelfAttention(config)
        self.sa_layer_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.ffn = DistilBertFeedForward(config)
        self.output_layer_norm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = self.sa_layer_norm(self.attention(x, batch) + x)
        return self.output_layer_norm(self.ffn(x) + x)


class Encoder(Module):
    """The network without its head: token ids to hidden rows."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.transformer = nn.ModuleDict(
            {"layer": nn.ModuleList(DistilBertLayer(config) for _ in range(config.num_layers))}
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embeddings(batch)
        for layer in self.transformer["layer"].children():
            x = layer(x, batch)
        return x


class Network(Module):
    """The encoder with its masked-language head.

    Without one, the table of tokens takes its place, and only the hidden rows mean something.
    """

    tensor_prefix = "distilbert."
    unread_tensors = ("embeddings.position_ids", "distilbert.embeddings.position_ids", "vocab_projector.weight")

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.distilbert = Encoder(config)
        self.output_rows = OutputRows()
        size, words = config.hidden_size, self.distilbert.embeddings.word_embeddings
        if config.has_head:
            self.vocab_transform = Linear(size, size, True)
            self.vocab_layer_norm = LayerNorm(size, config.norm_eps)
            self.vocab_projector = LMHead(size, config.vocab_size, True, tied=words if config.tied else None)
        else:
            self.lm_head = LMHead(size, config.vocab_size, tied=words)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        x = self.output_rows(self.distilbert(batch), batch.output_rows)
        if not self.config.has_head:
            return self.lm_head(x)
        return self.vocab_projector(self.vocab_layer_norm(gelu(self.vocab_transform(x))))
