"""OLMoE: q and k are normalised over all heads together, and every layer is a mixture."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import read_decoder, read_num_layers
from penstock.models.decoders.olmo2 import Olmo2Attention
from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig, read_mixture
from penstock.nn import Routing

__all__ = ["Config", "Network", "Olmo2Attention"]


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


class Network(ExpertsLM):
    """The language model."""

    def __init__(self, config: MixtureConfig) -> None:
        attentions = [Olmo2Attention(config.decoder, window) for window in config.decoder.windows]
        super().__init__(config, attentions, [Mixture(config) for _ in attentions])
