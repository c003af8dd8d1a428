"""Apertus (arXiv 2509.14233): q and k are normalised per head, and the feed-forward layer has no gate.

Its activation xIELU (arXiv 2411.13010) is a parabola above 0 and exponential below, with parameters of each layer.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.qwen3 import Qwen3Attention
from penstock.nn import Batch, Linear, Module, RMSNorm, elu, relu_squared, scale, scale_channels
from penstock.nn.base import Tensor, nn, torch

__all__ = ["Config", "Network"]

_ROPE: Final[dict[str, Any]] = {"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "low_freq_factor": 1.0}
_DEFAULT_ROPE: Final = _ROPE | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_THETA: Final = 12000000.0


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        reader.one_of("hidden_act", ("xielu",), "xielu")
        for key, expected in (("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
            if reader.bool(key, expected) is not expected:
                raise reader.error(key, "true" if expected else "false", not expected)
        values = {**reader.values, "hidden_act": "silu"}  # which read_decoder checks
        if not reader.has("rope_scaling") and not reader.has("rope_parameters"):
            values["rope_parameters"] = _DEFAULT_ROPE
        own = ConfigReader(values, reader.file)
        windows = (0,) * read_num_layers(reader)
        return read_decoder(own, windows, context_len=65536, norm_eps=1e-5, theta=_THETA)


class XIELU(Module):
    """The activation beta * elu(x) + alpha_n * (elu(x) - x) + alpha_p * max(x, 0)^2.

    Below 0 this is alpha_n * (exp(x) - 1 - x) + beta * (exp(x) - 1), as published with alpha_n + beta as one factor.
    transformers takes exp(-1e-6) for x between -1e-6 and 0.  A checkpoint stores alpha_p and alpha_n such that their
    softplus is what this layer has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.ones(1), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.ones(1), requires_grad=False)
        self.beta = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of x [T, dim]."""
        y = elu(x)
        below = scale_channels(y, self.beta) + scale_channels(y + scale(x, -1.0), self.alpha_n)
        return below + scale_channels(relu_squared(x), self.alpha_p)


class ApertusMLP(Module):
    """The feed-forward layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = XIELU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return self.down_proj(self.act_fn(self.up_proj(x)))


class ApertusLayer(Module):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: DecoderConfig, attention: Module) -> None:
        super().__init__()
        self.attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = attention
        self.feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = ApertusMLP(config)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + self.self_attn(self.attention_layernorm(x), cos_sin, batch)
        return x + self.mlp(self.feedforward_layernorm(x))


class Network(CausalLM):
    """The language model."""

    unread_tensors = ("*.mlp.act_fn.eps",)

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [Qwen3Attention(config, window) for window in config.windows], ApertusLayer)

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters of the activation come from: softplus of what is stored, and a scalar."""
        table = {}
        for name, _ in self.named_parameters():
            if name.endswith((".act_fn.alpha_p", ".act_fn.alpha_n")):
                table[name] = Source(name, softplus=True)
            elif name.endswith(".act_fn.beta"):
                table[name] = Source(name, flat=True)
        return table
