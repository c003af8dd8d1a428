"""Command R (Cohere): layer norms without bias, attention and feed-forward in parallel, scaled logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import DecoderConfig, GatedMLP, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import (
    Batch,
    LayerNorm,
    LMHead,
    Module,
    RotaryEmbedding,
    VocabParallelEmbedding,
    apply_rope,
    scale,
)

__all__ = ["CohereConfig", "Config", "Network", "read_cohere"]


@dataclass(frozen=True)
class CohereConfig:
    """The values of config.json.  ``rotates``: whether the heads of each layer have rotary positions."""

    decoder: DecoderConfig
    rotates: tuple[bool, ...]
    logit_scale: float

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.decoder.vocab_size

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.decoder.context_len


def read_cohere(reader: ConfigReader, windows: Sequence[int], rotates: Sequence[bool], theta: float) -> CohereConfig:
    """Read and check config.json; errors name the key.  ``theta`` is the family's default of rope_theta."""
    if reader.bool("use_qk_norm", False):
        raise UnsupportedError(
            f"{reader.file}: use_qk_norm: expected false, found true; norms with weights per head are not supported",
            param="use_qk_norm",
        )
    decoder = read_decoder(reader, tuple(windows), context_len=8192)
    decoder = replace(
        decoder,
        norm_eps=reader.float("layer_norm_eps", 1e-5),
        rope=reader.rope(decoder.head_dim, theta=theta),
        tied=reader.bool("tie_word_embeddings", True),
    )
    return CohereConfig(decoder, tuple(rotates), reader.float("logit_scale", 0.0625))


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> CohereConfig:
        """Read and check config.json; errors name the key."""
        num_layers = read_num_layers(reader)
        return read_cohere(reader, (0,) * num_layers, (True,) * num_layers, 500000.0)


class CohereAttention(LlamaAttention):
    """Attention whose heads turn by adjacent pairs, or not at all."""

    def __init__(self, config: DecoderConfig, window: int, rotates: bool) -> None:
        super().__init__(config, window)
        self.rotates = rotates

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k, v = self.project(x)
        if self.rotates:
            q, k = apply_rope(q, cos_sin, interleaved=True), apply_rope(k, cos_sin, interleaved=True)
        return self.o_proj(self.attention(q, k, v, batch))


class CohereLayer(Module):
    """Attention and feed-forward of the same normalised rows, with one residual connection."""

    def __init__(self, config: DecoderConfig, attention: Module) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(config.hidden_size, config.norm_eps, bias=False)
        self.self_attn = attention
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        y = self.input_layernorm(x)
        return (x + self.self_attn(y, cos_sin, batch)) + self.mlp(y)


class CohereDecoder(Module):
    """The decoder without its output head: token ids to hidden rows."""

    def __init__(self, config: CohereConfig) -> None:
        super().__init__()
        decoder = config.decoder
        self.embed_tokens = VocabParallelEmbedding(decoder.vocab_size, decoder.hidden_size)
        self.layers = nn.ModuleList(
            CohereLayer(decoder, CohereAttention(decoder, window, rotates))
            for window, rotates in zip(decoder.windows, config.rotates, strict=True)
        )
        self.norm = LayerNorm(decoder.hidden_size, decoder.norm_eps, bias=False)
        self.rotary_emb = RotaryEmbedding(decoder.rope)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embed_tokens(batch.token_ids)
        cos_sin = self.rotary_emb(batch.positions)
        for layer in self.layers:
            x = layer(x, cos_sin, batch)
        return self.norm(x)


class Network(Module):
    """The language model."""

    def __init__(self, config: CohereConfig) -> None:
        super().__init__()
        self.logit_scale = config.logit_scale
        self.model = CohereDecoder(config)
        tied = self.model.embed_tokens if config.decoder.tied else None
        self.lm_head = LMHead(config.decoder.hidden_size, config.decoder.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return scale(self.lm_head(self.model(batch), batch.output_rows), self.logit_scale)
