"""OLMoE: q and k are normalised over all heads together, and every layer is a mixture."""

from __future__ import annotations

from torch import Tensor

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig, read_mixture
from penstock.nn import RMSNorm, Routing

__all__ = ["Config", "FullNormAttention", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> MixtureConfig:
        """Read and check config.json; errors name the key."""
        if reader.has("clip_qkv"):
            raise UnsupportedError(
                f"{reader.file}: clip_qkv: expected null, because no limit on q, k and v is implemented",
                param="clip_qkv",
            )
        decoder = read_decoder(reader, (0,) * read_num_layers(reader), context_len=4096, norm_eps=1e-5)
        routing = Routing(reader.int("num_experts_per_tok", 8), renormalise=reader.bool("norm_topk_prob", False))
        key = "num_experts" if reader.has("num_experts") else "num_local_experts"
        return read_mixture(reader, decoder, routing, experts_key=key, size_key="intermediate_size")


class FullNormAttention(LlamaAttention):
    """Llama's attention, with all heads of q and all of k normalised together before the rotation."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__(config, window)
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of x, with q and k normalised."""
        q = self.q_norm(self.q_proj(x)).view(-1, self.num_heads, self.head_dim)
        k = self.k_norm(self.k_proj(x)).view(-1, self.num_kv_heads, self.head_dim)
        return q, k, self.v_proj(x)


class Network(ExpertsLM):
    """The language model."""

    def __init__(self, config: MixtureConfig) -> None:
        attentions = [FullNormAttention(config.decoder, window) for window in config.decoder.windows]
        super().__init__(config, attentions, [Mixture(config) for _ in attentions])
