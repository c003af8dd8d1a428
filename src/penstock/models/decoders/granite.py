"""Granite 3 (IBM): Llama with four constant factors, of the embedding, the residuals, the scores and the logits."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, DecoderLayer, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import Attention, Batch, ModuleList, scale
from penstock.nn.base import Tensor

__all__ = ["Config", "GraniteAttention", "Network"]


@dataclass(frozen=True)
class Config:
    """The values of config.json.  The factors are dimensionless; logits are divided by ``logits_scaling``."""

    decoder: DecoderConfig
    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_scaling: float

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.decoder.vocab_size

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.decoder.context_len

    @staticmethod
    def read(reader: ConfigReader) -> Config:
        """Read and check config.json; errors name the key."""
        return Config(
            read_decoder(reader, (0,) * read_num_layers(reader), context_len=2048),
            embedding_multiplier=reader.float("embedding_multiplier", 1.0),
            residual_multiplier=reader.float("residual_multiplier", 1.0),
            attention_multiplier=reader.float("attention_multiplier", 1.0),
            logits_scaling=reader.float("logits_scaling", 1.0, min=1e-6),
        )


class GraniteAttention(LlamaAttention):
    """Llama's attention with the factor of the config on its scores; ``rope`` False leaves out rotary positions."""

    def __init__(self, config: Config, *, rope: bool = True) -> None:
        super().__init__(config.decoder, 0, rope=rope)
        self.attention = Attention(self.num_heads, self.num_kv_heads, self.head_dim, scale=config.attention_multiplier)


class GraniteLayer(DecoderLayer):
    """Llama's layer, with a factor on what it adds to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.decoder, GraniteAttention(config))
        self.factor = config.residual_multiplier

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + scale(self.self_attn(self.input_layernorm(x), cos_sin, batch), self.factor)
        return x + scale(self.mlp(self.post_attention_layernorm(x)), self.factor)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: Config) -> None:
        num_layers = len(config.decoder.windows)
        super().__init__(config.decoder, [])
        self.model.layers = ModuleList(GraniteLayer(config) for _ in range(num_layers))
        self.factors = config

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        model = self.model
        x = scale(model.embed_tokens(batch.token_ids), self.factors.embedding_multiplier)
        cos_sin = model.rotary_emb(batch.positions)
        for layer in model.layers:
            x = layer(x, cos_sin, batch)
        return scale(self.lm_head(model.norm(x), batch.output_rows), 1.0 / self.factors.logits_scaling)
