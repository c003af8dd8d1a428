"""OLMo 1 (arXiv 2402.00838): Llama with layer norms that have neither weights nor biases.

With ``clip_qkv`` the numbers of q, k and v are cut to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, DecoderLayer, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import Module, clamp
from penstock.nn.base import Tensor, torch
from penstock.ops.call import ops

__all__ = ["Config", "Network", "read_clip"]

_EPS = 1e-5
"""The epsilon of every norm; no key of config.json changes it."""


_MIN_CLIP = 1e-6


@dataclass(frozen=True)
class OlmoConfig(DecoderConfig):
    """The sizes of the network; ``clip`` is the limit of q, k and v, 0 for none."""

    clip: float = 0.0


def read_clip(reader: ConfigReader) -> float:
    """Return the limit that the numbers of q, k and v are cut to, 0 for none."""
    return reader.float("clip_qkv", min=_MIN_CLIP) if reader.has("clip_qkv") else 0.0


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> OlmoConfig:
        """Read and check config.json; errors name the key."""
        config = read_decoder(reader, (0,) * read_num_layers(reader), context_len=2048)
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        return OlmoConfig(**values, clip=read_clip(reader))


class OlmoAttention(LlamaAttention):
    """Llama's attention with a limit of q, k and v."""

    def __init__(self, config: OlmoConfig, window: int) -> None:
        super().__init__(config, window)
        self.clip = config.clip

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of x, cut to the limit."""
        q, k, v = super().project(x)
        return clamp(q, self.clip), clamp(k, self.clip), clamp(v, self.clip)


class BareNorm(Module):
    """The norm (x - mean) / sqrt(variance + eps) over the last dimension of x [T, dim]."""

    ones: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.register_buffer("ones", torch.ones(dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [T, dim]; the result has the same shape."""
        y: Tensor = ops.layer_norm(x, self.ones, None, eps=_EPS)
        return y


class OlmoLayer(DecoderLayer):
    """Llama's layer with norms without weights."""

    def __init__(self, config: DecoderConfig, attention: Module) -> None:
        super().__init__(config, attention)
        self.input_layernorm = BareNorm(config.hidden_size)  # type: ignore[assignment]
        self.post_attention_layernorm = BareNorm(config.hidden_size)  # type: ignore[assignment]


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: OlmoConfig) -> None:
        super().__init__(config, [OlmoAttention(config, window) for window in config.windows], OlmoLayer)
        self.model.norm = BareNorm(config.hidden_size)  # type: ignore[assignment]
