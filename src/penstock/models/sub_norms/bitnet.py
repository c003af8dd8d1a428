"""BitNet b1.58 (arXiv 2504.12285): ternary weights, norms before ``o_proj`` and ``down_proj``, and a squared ReLU."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, DecoderLayer, GatedMLP, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import Batch, Module, RMSNorm, relu_squared
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        reader.one_of("hidden_act", ("relu2",), "relu2")
        own = ConfigReader({**reader.values, "hidden_act": "silu"}, reader.file)  # which read_decoder checks
        windows = (0,) * read_num_layers(reader)
        return read_decoder(own, windows, context_len=2048, norm_eps=1e-5, theta=500000.0)


class BitNetAttention(LlamaAttention):
    """Llama's attention with a norm before the output projection."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__(config, window)
        self.attn_sub_norm = RMSNorm(config.num_heads * config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k, v = self.project(x)
        y = self.attention(self.rotate(q, cos_sin), self.rotate(k, cos_sin), v, batch)
        return self.o_proj(self.attn_sub_norm(y))


class BitNetMLP(GatedMLP):
    """The gated feed-forward layer with a squared ReLU and a norm before the last projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.ffn_sub_norm = RMSNorm(config.intermediate_size, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return self.down_proj(self.ffn_sub_norm(relu_squared(self.gate_proj(x)) * self.up_proj(x)))


class BitNetLayer(DecoderLayer):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: DecoderConfig, attention: Module) -> None:
        super().__init__(config, attention)
        self.mlp = BitNetMLP(config)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [BitNetAttention(config, window) for window in config.windows], BitNetLayer)
