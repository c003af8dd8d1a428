"""OLMo 2: norms behind attention and feed-forward, and q and k normalised over their full width."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, PostNormLayer, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.nn import RMSNorm
from penstock.nn.base import Tensor

__all__ = ["Config", "Network", "Olmo2Attention"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        return read_decoder(reader, (0,) * read_num_layers(reader), context_len=2048, norm_eps=1e-5)


class Olmo2Attention(LlamaAttention):
    """Llama's attention, with q and k normalised over all heads before the rotation."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__(config, window)
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of x, with q and k normalised."""
        q = self.q_norm(self.q_proj(x)).view(-1, self.num_heads, self.head_dim)
        k = self.k_norm(self.k_proj(x)).view(-1, self.num_kv_heads, self.head_dim)
        return q, k, self.v_proj(x)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [Olmo2Attention(config, window) for window in config.windows], PostNormLayer)
