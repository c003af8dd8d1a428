"""Granite 3 with experts: Granite's four factors, and experts that the best logits choose."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader
from penstock.models.decoders import granite
from penstock.models.experts.mixture import Mixture, MixtureConfig, read_mixture
from penstock.models.sources import renamed, stacked_gates
from penstock.nn import Batch, Module, ModuleList, RMSNorm, Routing, scale
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]


@dataclass(frozen=True)
class Config:
    """The values of config.json."""

    granite: granite.Config
    mixture: MixtureConfig

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.granite.vocab_size

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.granite.context_len

    @staticmethod
    def read(reader: ConfigReader) -> Config:
        """Read and check config.json; errors name the key."""
        own = granite.Config.read(reader)
        routing = Routing(reader.int("num_experts_per_tok", 2), "softmax_of_chosen")
        key = "num_local_experts"
        mixture = read_mixture(reader, own.decoder, routing, experts_key=key, size_key="intermediate_size")
        return Config(own, mixture)


class _Layer(Module):
    """Attention and experts, each after a norm, with a factor on what it adds to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        sizes = config.granite.decoder
        self.factor = config.granite.residual_multiplier
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.self_attn = granite.GraniteAttention(config.granite)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.block_sparse_moe = Mixture(config.mixture)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + scale(self.self_attn(self.input_layernorm(x), cos_sin, batch), self.factor)
        return x + scale(self.block_sparse_moe(self.post_attention_layernorm(x)), self.factor)


class Network(granite.Network):
    """The language model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.granite)
        self.model.layers = ModuleList(_Layer(config) for _ in config.granite.decoder.windows)

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: the experts of a layer are stacked in two tensors."""
        experts: dict[str, Source] = {}
        for index in range(len(self.model.layers)):
            path = f"model.layers.{index}.block_sparse_moe"
            stacks = (f"{path}.input_linear.weight", f"{path}.output_linear.weight")
            experts |= stacked_gates(self, f"{path}.experts", stacks)
        names = renamed(self, {}, [("block_sparse_moe.gate.", "block_sparse_moe.router.layer.")])
        return {name: source for name, source in names.items() if ".experts." not in name} | experts
