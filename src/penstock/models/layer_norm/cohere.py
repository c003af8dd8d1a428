"""Command R (Cohere): layer norms without bias, attention and feed-forward in parallel, scaled logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.decoder import DecoderConfig, GatedMLP, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import (
    Batch,
    Embedding,
    LayerNorm,
    LMHead,
    Module,
    RotaryEmbedding,
    apply_rope,
    scale,
    scale_channels,
)
from penstock.nn.base import Tensor, nn, torch
from penstock.ops.call import ops

__all__ = ["CohereConfig", "CohereLM", "Config", "Network", "read_cohere"]


@dataclass(frozen=True)
class CohereConfig:
    """The values of config.json.  ``rotates``: whether the heads of each layer have rotary positions.

    ``qk_norm``: q and k are normalised per head, each head with weights of its own.
    """

    decoder: DecoderConfig
    rotates: tuple[bool, ...]
    logit_scale: float
    qk_norm: bool = False

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
        config = read_cohere(reader, (0,) * num_layers, (True,) * num_layers, 500000.0)
        return replace(config, qk_norm=reader.bool("use_qk_norm", False))


class HeadNorms(Module):
    """A layer norm of each head, with weights for each: ``weight`` [heads * head_dim]."""

    ones: Tensor

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.eps = num_heads, head_dim, eps
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim), requires_grad=False)
        with torch.device("cpu"):
            self.register_buffer("ones", torch.ones(head_dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [T, heads, head_dim]; the result has the same shape."""
        y = ops.layer_norm(x, self.ones, None, eps=self.eps).view(-1, self.num_heads * self.head_dim)
        return scale_channels(y, self.weight).view(-1, self.num_heads, self.head_dim)


class CohereAttention(LlamaAttention):
    """Attention whose heads turn by adjacent pairs, or not at all; q and k are normalised with ``qk_norm``."""

    def __init__(self, config: DecoderConfig, window: int, rotates: bool, qk_norm: bool) -> None:
        super().__init__(config, window)
        self.rotates = rotates
        self.q_norm = HeadNorms(config.num_heads, config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = HeadNorms(config.num_kv_heads, config.head_dim, config.norm_eps) if qk_norm else None

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k, v = self.project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
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
        self.embed_tokens = Embedding(decoder.vocab_size, decoder.hidden_size)
        self.layers = nn.ModuleList(
            CohereLayer(decoder, CohereAttention(decoder, window, rotates, config.qk_norm))
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


class CohereLM(Module):
    """The language model, whose parameters are the tensors of the checkpoint."""

    def __init__(self, config: CohereConfig) -> None:
        super().__init__()
        self.logit_scale = config.logit_scale
        self.model = CohereDecoder(config)
        tied = self.model.embed_tokens if config.decoder.tied else None
        self.lm_head = LMHead(config.decoder.hidden_size, config.decoder.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return scale(self.lm_head(self.model(batch), batch.output_rows), self.logit_scale)


class Network(CohereLM):
    """The language model, also with norms of heads."""

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from: the weights of norms of heads, which are matrices."""
        norms = [path for path, module in self.named_modules() if isinstance(module, HeadNorms)]
        return {f"{path}.weight": Source(f"{path}.weight", flat=True) for path in norms}
