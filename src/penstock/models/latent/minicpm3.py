"""MiniCPM3: latent attention, and constant factors of the embedding, the residuals and the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, DecoderLayer
from penstock.models.latent.attention import LatentConfig, LatentHeads, latent_sources, read_latent, read_latent_decoder
from penstock.models.long_rope import read_with_longrope
from penstock.nn import Batch, Module, ModuleList, scale
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]


@dataclass(frozen=True)
class Config:
    """The values of config.json.  The factors are dimensionless."""

    decoder: DecoderConfig
    latent: LatentConfig
    embedding_factor: float
    residual_factor: float
    logits_factor: float

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
        hidden_size = reader.int("hidden_size")
        latent = read_latent(
            reader,
            query_rank=768,
            latent_dim=256,
            nope_dim=64,
            rope_dim=32,
            value_dim=hidden_size // reader.int("num_attention_heads"),
            interleaved=False,
        )

        def read(plain: ConfigReader) -> DecoderConfig:
            return read_latent_decoder(plain, latent.rope_dim, context_len=32768, norm_eps=1e-5, tied=True)

        decoder = read_with_longrope(reader, read)
        depth = math.sqrt(len(decoder.windows))
        return Config(
            decoder,
            latent,
            embedding_factor=reader.float("scale_emb", 12.0),
            residual_factor=_or_none(reader, "scale_depth", 1.4, depth) / depth,
            logits_factor=_or_none(reader, "dim_model_base", 256.0, float(hidden_size)) / hidden_size,
        )


def _or_none(reader: ConfigReader, key: str, missing: float, null: float) -> float:
    """Return a number of the config: ``missing`` when it lacks the key, and ``null`` when it says null."""
    is_null = key in reader.values and not reader.has(key)
    return null if is_null else reader.float(key, missing, min=1e-6)


class MiniCPM3Layer(DecoderLayer):
    """Llama's layer, with a factor on what it adds to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.decoder, LatentHeads(config.decoder, config.latent))
        self.factor = config.residual_factor

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + scale(self.self_attn(self.input_layernorm(x), cos_sin, batch), self.factor)
        return x + scale(self.mlp(self.post_attention_layernorm(x)), self.factor)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.decoder, [])
        layers: list[Module] = [MiniCPM3Layer(config) for _ in config.decoder.windows]
        self.model.layers = ModuleList(layers)
        self.factors = config

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        model = self.model
        x = scale(model.embed_tokens(batch.token_ids), self.factors.embedding_factor)
        cos_sin = model.rotary_emb(batch.positions)
        for layer in model.layers:
            x = layer(x, cos_sin, batch)
        return scale(self.lm_head(model.norm(x), batch.output_rows), self.factors.logits_factor)

    def tensor_sources(self) -> dict[str, Source | tuple[Source, ...]]:
        """Return where the parameters come from that the checkpoint stores in fused tensors."""
        return latent_sources(self)
