"""ERNIE 4.5 with experts: a softmax router with a correction, shared experts, and dense layers at the beginning."""

from __future__ import annotations

from dataclasses import replace

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader
from penstock.models.decoder import GatedMLP, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig, read_mixture
from penstock.nn import Module, Routing, route
from penstock.nn.base import Tensor, nn, torch

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> MixtureConfig:
        """Read and check config.json; errors name the key."""
        num_layers = read_num_layers(reader)
        decoder = read_decoder(reader, (0,) * num_layers, context_len=131072, norm_eps=1e-5, theta=500000.0, tied=True)
        has_bias = reader.bool("use_bias", False)
        decoder = replace(decoder, attention_bias=has_bias, mlp_bias=has_bias)
        reader.float("moe_norm_min", 1e-12, max=1e-9)  # a larger one would change weights, which route does not know
        start, step = reader.int("moe_layer_start_index", 1, min=0), reader.int("moe_layer_interval", 1)
        end = reader.int("moe_layer_end_index", -1, min=-1)
        end = num_layers - 1 if end == -1 else end
        sparse = tuple(start <= layer <= end and (layer + 1) % step == 0 for layer in range(num_layers))
        size = reader.int("moe_intermediate_size")
        return read_mixture(
            reader,
            decoder,
            Routing(reader.int("moe_k", 6), "softmax", renormalise=True),
            experts_key="moe_num_experts",
            sparse=sparse,
            shared_size=reader.int("moe_num_shared_experts", 2, min=0) * size,
        )


class _Correction(Module):
    """A bias that is added to the scores only to choose experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.e_score_correction_bias = nn.Parameter(torch.zeros(num_experts), requires_grad=False)


class _Mixture(Mixture):
    """The experts that a token chooses, and the shared ones as one layer, if there are any."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        sizes = config.decoder
        self.moe_statics = _Correction(config.num_experts)
        self.shared_experts = None
        if config.shared_size:
            self.shared_experts = GatedMLP(sizes.hidden_size, config.shared_size, sizes.mlp_bias)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the ids of the experts, each [T, k], of x [T, hidden]."""
        return route(self.gate(x), self.routing, self.moe_statics.e_score_correction_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        y = super().forward(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class Network(ExpertsLM):
    """The language model.  Layers for multi-token prediction are not read."""

    unread_tensors = ("model.mtp_*",)

    def __init__(self, config: MixtureConfig) -> None:
        attentions = [LlamaAttention(config.decoder, window, interleaved=True) for window in config.decoder.windows]
        super().__init__(config, attentions, [_Mixture(config) for _ in attentions])

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: the correction is stored as [1, experts]."""
        names = (name for name, _ in self.named_parameters())
        return {name: Source(name, index=0) for name in names if name.endswith("e_score_correction_bias")}
