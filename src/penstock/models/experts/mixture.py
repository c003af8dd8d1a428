"""The parts that mixtures of experts share: the sizes, the feed-forward layers, and the decoder that has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, GatedMLP
from penstock.nn import Batch, ExpertLinear, Module, RMSNorm, Router, Routing, combine, route, silu_mul
from penstock.nn.base import Tensor, nn, torch

__all__ = [
    "CorrectedMixture",
    "CorrectedRouter",
    "Experts",
    "ExpertsLM",
    "Mixture",
    "MixtureConfig",
    "SharedMixture",
    "extra_layers",
    "read_mixture",
    "read_sparse_layers",
]

MAX_EXPERTS = 4096
"""A limit against damaged configs."""


@dataclass(frozen=True)
class MixtureConfig:
    """The sizes of a decoder with experts.

    ``shared_size`` is the width of the expert that every token goes to, 0 for none.  ``sparse`` tells for each layer
    whether its feed-forward layer is a mixture.  ``qk_norm``: q and k are normalised per head, where that is optional.
    ``unread`` are patterns of names of tensors that the network does not use.
    """

    decoder: DecoderConfig
    num_experts: int
    expert_size: int
    routing: Routing
    sparse: tuple[bool, ...]
    shared_size: int = 0
    qk_norm: bool = False
    unread: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.decoder.vocab_size

    @property
    def context_len(self) -> int:
        """The largest number of positions."""
        return self.decoder.context_len


def read_mixture(
    reader: ConfigReader,
    decoder: DecoderConfig,
    routing: Routing,
    *,
    experts_key: str,
    size_key: str = "moe_intermediate_size",
    sparse: tuple[bool, ...] | None = None,
    shared_size: int = 0,
) -> MixtureConfig:
    """Read and check the sizes of the experts; errors name the key.

    ``sparse`` None is a mixture in every layer.
    """
    num_experts = reader.int(experts_key, max=MAX_EXPERTS)
    if routing.k > num_experts:
        raise reader.error(experts_key, f"at least {routing.k}, the number of experts per token", num_experts)
    if num_experts % routing.groups:
        raise reader.error(experts_key, f"a multiple of {routing.groups}, the number of groups", num_experts)
    if routing.kept_groups > routing.groups or routing.k > num_experts // routing.groups * routing.kept_groups:
        raise reader.error("topk_group", f"1 to {routing.groups}, with {routing.k} experts in all", routing.kept_groups)
    layers = sparse or (True,) * len(decoder.windows)
    return MixtureConfig(decoder, num_experts, reader.int(size_key), routing, layers, shared_size)


def read_sparse_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return which layers are mixtures by Qwen's keys: every ``decoder_sparse_step``-th, but no ``mlp_only_layers``."""
    step, dense = reader.int("decoder_sparse_step", 1), reader.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise reader.error("mlp_only_layers", "a list of layer numbers", dense)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def extra_layers(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Return patterns of the tensors of the layers behind the last, which predict further tokens and are not used."""
    count = reader.int("num_nextn_predict_layers", 0, min=0, max=64)
    return tuple(f"model.layers.{num_layers + index}.*" for index in range(count))


class Experts(Module):
    """The experts of a layer: a gated feed-forward layer each.  ``names`` are those of gate, up and down."""

    def __init__(self, config: MixtureConfig, names: tuple[str, str, str]) -> None:
        super().__init__()
        hidden, size, count = config.decoder.hidden_size, config.expert_size, config.num_experts
        self._names, self._k, self._size = names, config.routing.k, size
        for name, sizes in zip(names, ((hidden, size), (hidden, size), (size, hidden)), strict=True):
            self.add_module(name, ExpertLinear(count, *sizes))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the weighted sum [T, hidden] of what the experts ids [T, k] make of x [T, hidden]."""
        gate, up, down = (self.get_submodule(name) for name in self._names)
        width = self._k * self._size
        rows = silu_mul(gate(x, ids).view(-1, width), up(x, ids).view(-1, width))
        return combine(down(rows.view(-1, self._k, self._size), ids), weights)


class CorrectedRouter(Router):
    """A router with a bias that is added to the scores only to choose experts."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__(hidden_size, num_experts)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(num_experts), requires_grad=False)


class Mixture(Module):
    """A feed-forward layer of experts, with the router ``gate``."""

    def __init__(
        self, config: MixtureConfig, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> None:
        super().__init__()
        self.routing = config.routing
        self.gate = self.make_gate(config)
        self.experts = Experts(config, names)

    def make_gate(self, config: MixtureConfig) -> Module:
        """Return the router."""
        return Router(config.decoder.hidden_size, config.num_experts)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the ids of the experts, each [T, k], of x [T, hidden]."""
        return route(self.gate(x), self.routing, getattr(self.gate, "e_score_correction_bias", None))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        weights, ids = self.choose(x)
        return self.experts(x, weights, ids)


class SharedMixture(Mixture):
    """The experts that a token chooses, and the shared ones as one layer."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.shared_experts = GatedMLP(config.decoder.hidden_size, config.shared_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return super().forward(x) + self.shared_experts(x)


class CorrectedMixture(SharedMixture):
    """Such a layer whose router has a correction."""

    def make_gate(self, config: MixtureConfig) -> Module:
        """Return the router."""
        return CorrectedRouter(config.decoder.hidden_size, config.num_experts)


class _Layer(Module):
    """Attention and feed-forward, each after a norm and with a residual connection; the latter is called ``name``."""

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: Module, name: str) -> None:
        super().__init__()
        self._name = name
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.add_module(name, mlp)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, batch)
        mlp: Module = self.get_submodule(self._name)  # type: ignore[assignment]
        return x + mlp(self.post_attention_layernorm(x))


class ExpertsLM(CausalLM):
    """A language model with a mixture in its sparse layers.  ``name`` is the feed-forward layers' in the checkpoint."""

    def __init__(
        self, config: MixtureConfig, attentions: Sequence[Module], mixtures: Sequence[Module], name: str = "mlp"
    ) -> None:
        super().__init__(config.decoder, attentions)
        sizes = config.decoder
        for index, (attention, mixture) in enumerate(zip(attentions, mixtures, strict=True)):
            dense = GatedMLP(sizes.hidden_size, sizes.intermediate_size, sizes.mlp_bias)
            mlp = mixture if config.sparse[index] else dense
            self.model.layers[index] = _Layer(sizes, attention, mlp, name)
