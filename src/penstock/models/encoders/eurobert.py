"""EuroBERT (arXiv 2503.05500): Llama's network with attention to both sides, and an output head for masked tokens."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.encoders.bert import check_architecture
from penstock.nn import Attention, LMHead

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        check_architecture(reader, "EuroBert")
        windows = (0,) * read_num_layers(reader)
        return read_decoder(reader, windows, context_len=8192, norm_eps=1e-5)


class EuroBertAttention(LlamaAttention):
    """Llama's attention over all tokens of a request."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, 0)
        self.attention = Attention(self.num_heads, self.num_kv_heads, self.head_dim, causal=False)


class Network(CausalLM):
    """The encoder with its masked-language head.

    Without one, the table of tokens takes its place, and only the hidden rows mean something.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [EuroBertAttention(config) for _ in config.windows])
        if config.mlp_bias:  # the head has one with those of the feed-forward layers
            tied = self.model.embed_tokens if config.tied else None
            self.lm_head = LMHead(config.hidden_size, config.vocab_size, True, tied=tied)
