"""Gemma 2 (arXiv 2408.00118): norms on both sides of each branch, soft caps, and windows in alternate layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader, RopeConfig
from penstock.models.decoder import CausalLM, DecoderConfig
from penstock.models.decoders.gemma import GeluGatedMLP, read_gemma
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.layer_windows import read_layer_windows
from penstock.models.sources import add_to_norms
from penstock.nn import Attention, Batch, Module, ModuleList, RMSNorm, RotaryEmbedding, scale, softcap
from penstock.nn.base import Tensor

__all__ = ["Config", "Gemma2Config", "Network", "read_caps"]


@dataclass(frozen=True)
class Gemma2Config:
    """The values of config.json.  A cap of 0 is none.  ``local_rope``: of windowed layers, None if all are equal.

    ``causal`` False: tokens attend to both sides, in windowed layers to ``window`` - 1 tokens of each.
    """

    decoder: DecoderConfig
    score_divisor: float
    score_cap: float
    logit_cap: float
    qk_norm: bool = False
    local_rope: RopeConfig | None = None
    causal: bool = True

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.decoder.vocab_size

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.decoder.context_len


def read_caps(reader: ConfigReader, scores: float, logits: float) -> tuple[float, float]:
    """Return the caps of scores and logits, 0 for null; the arguments are the family's defaults."""
    caps = []
    for key, default in (("attn_logit_softcapping", scores), ("final_logit_softcapping", logits)):
        is_null = key in reader.values and not reader.has(key)
        caps.append(
            0.0 if is_null or (default == 0.0 and not reader.has(key)) else reader.float(key, default, min=1e-6)
        )
    return caps[0], caps[1]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Gemma2Config:
        """Read and check config.json; errors name the key."""
        decoder = read_gemma(reader, read_layer_windows(reader, window=4096, period=2))
        divisor = reader.float("query_pre_attn_scalar", 256.0, min=1e-6)
        return Gemma2Config(decoder, divisor, *read_caps(reader, 50.0, 30.0))


class Gemma2Attention(LlamaAttention):
    """Llama's attention with a scale of its own, capped scores, and norms of q and k if the config says so."""

    def __init__(self, config: Gemma2Config, window: int) -> None:
        super().__init__(config.decoder, window)
        self.attention = Attention(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            window=window,
            scale=config.score_divisor**-0.5,
            softcap=config.score_cap,
            causal=config.causal,
        )
        self.q_norm = RMSNorm(self.head_dim, config.decoder.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.decoder.norm_eps) if config.qk_norm else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of x, with q and k normalised."""
        q, k, v = super().project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class Gemma2Layer(Module):
    """Attention and feed-forward, each between two norms and with a residual connection."""

    def __init__(self, config: Gemma2Config, window: int) -> None:
        super().__init__()
        hidden_size, eps = config.decoder.hidden_size, config.decoder.norm_eps
        self.is_local = window > 0
        self.self_attn = Gemma2Attention(config, window)
        self.mlp = GeluGatedMLP(hidden_size, config.decoder.intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden_size, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden_size, eps)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos_sin, batch))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: Gemma2Config) -> None:
        super().__init__(config.decoder, [])
        self.logit_cap = config.logit_cap
        self.model.layers = ModuleList(Gemma2Layer(config, window) for window in config.decoder.windows)
        self.local_rotary_emb = None if config.local_rope is None else RotaryEmbedding(config.local_rope)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        model = self.model
        x = scale(model.embed_tokens(batch.token_ids), math.sqrt(self.config.hidden_size))
        cos_sin = local = model.rotary_emb(batch.positions)
        if self.local_rotary_emb is not None:
            local = self.local_rotary_emb(batch.positions)
        for layer in model.layers:
            x = layer(x, local if layer.is_local else cos_sin, batch)
        return softcap(self.lm_head(model.norm(x), batch.output_rows), self.logit_cap)

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: norms, which the checkpoint stores less 1."""
        return add_to_norms(self)
