"""GLM-4-0414: GLM-4 with norms before and behind attention and feed-forward."""

from __future__ import annotations

from penstock.checkpoint.sources import Source
from penstock.models.decoder import CausalLM, DecoderConfig, DecoderLayer
from penstock.models.decoders.glm import Config, GlmAttention
from penstock.models.sources import fused_rows
from penstock.nn import Batch, Module, RMSNorm
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]


class Glm4Layer(DecoderLayer):
    """Attention and feed-forward, each between two norms."""

    def __init__(self, config: DecoderConfig, attention: Module) -> None:
        super().__init__(config, attention)
        self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + self.post_self_attn_layernorm(self.self_attn(self.input_layernorm(x), cos_sin, batch))
        return x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [GlmAttention(config, window) for window in config.windows], Glm4Layer)

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from that the checkpoint stores in fused tensors."""
        return fused_rows(self, "gate_up_proj", ("gate_proj", "up_proj"))
