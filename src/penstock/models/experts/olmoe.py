"""OLMoE: q and k are normalised over all heads together, and every layer is a mixture."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.config import ConfigReader
from penstock.models.decoder import read_decoder, read_num_layers
from penstock.models.decoders.olmo2 import Olmo2Attention
from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig, read_mixture
from penstock.models.layer_norm.olmo import read_clip
from penstock.nn import Routing, clamp
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]


@dataclass(frozen=True)
class OlmoeConfig(MixtureConfig):
    """The sizes of the network; ``clip`` is the limit of q, k and v, 0 for none."""

    clip: float = 0.0


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> OlmoeConfig:
        """Read and check config.json; errors name the key."""
        decoder = read_decoder(reader, (0,) * read_num_layers(reader), context_len=4096, norm_eps=1e-5)
        routing = Routing(reader.int("num_experts_per_tok", 8), renormalise=reader.bool("norm_topk_prob", False))
        key = "num_experts" if reader.has("num_experts") else "num_local_experts"
        config = read_mixture(reader, decoder, routing, experts_key=key, size_key="intermediate_size")
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        return OlmoeConfig(**values, clip=read_clip(reader))


class OlmoeAttention(Olmo2Attention):
    """OLMo 2's attention with a limit of q, k and v."""

    def __init__(self, config: OlmoeConfig, window: int) -> None:
        super().__init__(config.decoder, window)
        self.clip = config.clip

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of x, cut to the limit."""
        q, k, v = super().project(x)
        return clamp(q, self.clip), clamp(k, self.clip), clamp(v, self.clip)


class Network(ExpertsLM):
    """The language model."""

    def __init__(self, config: OlmoeConfig) -> None:
        attentions = [OlmoeAttention(config, window) for window in config.decoder.windows]
        super().__init__(config, attentions, [Mixture(config) for _ in attentions])
