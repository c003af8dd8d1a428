"""Gemma 4, text: two sizes of heads, keys and values shared by later layers, inputs by layer, experts."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader, RopeConfig
from penstock.errors import UnsupportedError
from penstock.models.decoders.gemma import GeluGatedMLP
from penstock.models.experts.mixture import MAX_EXPERTS
from penstock.models.shared_kv.parts import (
    FULL,
    LOCAL,
    InputLayer,
    LayeredLM,
    LayeredModel,
    LayerSizes,
    SharedKvAttention,
    SharedKvConfig,
    page_sources,
    read_kinds,
    read_layered,
    read_type_rope,
)
from penstock.models.sources import stacked_gates
from penstock.nn import (
    Batch,
    ExpertLinear,
    Module,
    RMSNorm,
    Router,
    Routing,
    combine,
    gelu,
    route,
    scale,
    scale_channels,
)
from penstock.nn.base import Tensor, nn, torch
from penstock.ops.call import ops

__all__ = ["Config", "Gemma4Config", "Network"]


@dataclass(frozen=True)
class Gemma4Config:
    """The sizes of the network; ``num_experts`` 0 has no mixtures."""

    base: SharedKvConfig
    num_experts: int = 0
    experts_per_token: int = 1
    expert_size: int = 0

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.base.vocab_size

    @property
    def context_len(self) -> int:
        """The largest number of positions."""
        return self.base.context_len


def _read_layers(reader: ConfigReader) -> list[LayerSizes]:
    """Return the sizes of each layer: full layers have heads of another size."""
    kinds = read_kinds(reader, 6)
    kinds[-1] = FULL  # as the reference has it, whatever the config says
    num_shared = reader.int("num_kv_shared_layers", 0, min=0, max=len(kinds))
    sources = page_sources(reader, kinds, num_shared)
    same, window = reader.bool("attention_k_eq_v", False), reader.int("sliding_window", 512)
    sizes = {LOCAL: (reader.int("head_dim", 256), reader.int("num_key_value_heads"))}
    full_heads = reader.optional_int("num_global_key_value_heads") if same else None
    sizes[FULL] = (reader.int("global_head_dim", 512), full_heads or sizes[LOCAL][1])
    own = reader.object("per_layer_config")  # what transformers 5 writes instead of the keys of full layers
    width, wide = reader.int("intermediate_size"), reader.bool("use_double_wide_mlp", False)
    layers = []
    for index, (kind, source) in enumerate(zip(kinds, sources, strict=True)):
        head_dim, kv_heads = sizes[kind] if own is None else _overridden(own, index, sizes[LOCAL])
        inner = width * 2 if wide and source is not None else width
        layers.append(
            LayerSizes(0 if kind == FULL else window, head_dim, kv_heads, inner, source, same and kind == FULL)
        )
    return layers


def _overridden(own: ConfigReader, index: int, sizes: tuple[int, int]) -> tuple[int, int]:
    """Return head_dim and num_key_value_heads of a layer, from ``own`` where it has them."""
    key = next((name for name in own.values if name.isdecimal() and int(name) == index), None)
    layer = None if key is None else own.object(key)
    if layer is None:
        return sizes
    for name in layer.values:
        if name not in ("head_dim", "num_key_value_heads"):
            raise UnsupportedError(f"{layer.file}: the key {name!r:.80} is not supported", param=name)
    return layer.int("head_dim", sizes[0]), layer.int("num_key_value_heads", sizes[1])


def _head_dim(reader: ConfigReader, layers: list[LayerSizes], *, is_local: bool) -> int:
    """Return the common size of heads of one kind of layers."""
    head_dims = {sizes.head_dim for sizes in layers if (sizes.window > 0) == is_local}
    if len(head_dims) > 1:
        raise reader.error(
            "head_dim", f"one size in all layers with{'' if is_local else 'out'} a window", sorted(head_dims)
        )
    return head_dims.pop() if head_dims else layers[0].head_dim


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Gemma4Config:
        """Read and check config.json; errors name the key."""
        if reader.has("use_bidirectional_attention"):  # "vision" changes nothing for text
            reader.one_of("use_bidirectional_attention", ("vision",))
        layers = _read_layers(reader)
        ropes: tuple[RopeConfig, RopeConfig] = (
            read_type_rope(reader, FULL, _head_dim(reader, layers, is_local=False), theta=1e6, share=0.25),
            read_type_rope(reader, LOCAL, _head_dim(reader, layers, is_local=True), theta=1e4),
        )
        base = read_layered(reader, layers, ropes, context_len=131072, logit_cap=0.0)
        if not reader.bool("enable_moe_block", False):
            return Gemma4Config(base)
        num_experts = reader.int("num_experts", max=MAX_EXPERTS)
        k = reader.int("top_k_experts", max=num_experts)
        return Gemma4Config(base, num_experts, k, reader.int("moe_intermediate_size"))


class ChannelRouter(Module):
    """The router: a norm whose weights are ``scale``, a linear, and a factor for each expert."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        hidden = config.base.hidden_size
        self.hidden_size, self.eps = hidden, config.base.norm_eps
        self.routing = Routing(config.experts_per_token, renormalise=True)
        self.scale = nn.Parameter(torch.ones(hidden), requires_grad=False)
        self.proj = Router(hidden, config.num_experts)
        self.per_expert_scale = ExpertLinear(config.num_experts, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the ids of the experts, each [T, k], of x [T, hidden]."""
        normed = scale(ops.rms_norm(x, self.scale, eps=self.eps), self.hidden_size**-0.5)
        weights, ids = route(self.proj(normed), self.routing)
        k = self.routing.k
        return self.per_expert_scale(weights.view(-1, k, 1), ids).view(-1, k), ids


class GeluExperts(Module):
    """The experts of a layer: a gated feed-forward layer each, with a gate of GELU."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        hidden, size, count = config.base.hidden_size, config.expert_size, config.num_experts
        self._k, self._size = config.experts_per_token, size
        self.gate_proj = ExpertLinear(count, hidden, size)
        self.up_proj = ExpertLinear(count, hidden, size)
        self.down_proj = ExpertLinear(count, size, hidden)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the weighted sum [T, hidden] of what the experts ids [T, k] make of x [T, hidden]."""
        width = self._k * self._size
        gate = gelu(self.gate_proj(x, ids).view(-1, width), "tanh")
        rows = gate * self.up_proj(x, ids).view(-1, width)
        return combine(self.down_proj(rows.view(-1, self._k, self._size), ids), weights)


class Gemma4Layer(InputLayer):
    """Attention and feed-forward, each between two norms, experts beside the latter, then the layer's own input."""

    def __init__(self, config: Gemma4Config, sizes: LayerSizes, owner: SharedKvAttention | None) -> None:
        base = config.base
        super().__init__(base)
        hidden, eps = base.hidden_size, base.norm_eps
        self.self_attn = SharedKvAttention(base, sizes, owner)
        self.mlp = GeluGatedMLP(hidden, sizes.intermediate_size)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)
        self.has_experts = config.num_experts > 0
        if self.has_experts:
            self.router, self.experts = ChannelRouter(config), GeluExperts(config)
            self.post_feedforward_layernorm_1 = RMSNorm(hidden, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(hidden, eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, cos_sin: Tensor, own: Tensor | None, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden] and its own input [T, layer_input_dim]."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos_sin, batch))
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.has_experts:
            mixed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(mixed)
        x = x + self.post_feedforward_layernorm(y)
        if own is not None:
            x = x + self.gated_input(x, own)
        return scale_channels(x, self.layer_scalar)


class Network(LayeredLM):
    """The language model."""

    def __init__(self, config: Gemma4Config) -> None:
        layers: list[Gemma4Layer] = []
        for sizes in config.base.layers:
            owner = None if sizes.source is None else layers[sizes.source].self_attn
            layers.append(Gemma4Layer(config, sizes, owner))
        super().__init__(config.base, LayeredModel(config.base, layers))

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        model = self.model
        x = model.embed(batch)
        inputs = zip(model.layers, model.rotary(batch), model.layer_inputs(x, batch), strict=True)
        for layer, cos_sin, own in inputs:
            x = layer(x, cos_sin, own, batch)
        return self.logits(x, batch)

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from: experts of a layer are stacked, and so are their factors."""
        table = super().tensor_sources()
        for path, module in self.named_modules():
            if isinstance(module, GeluExperts):
                table |= stacked_gates(self, path, (f"{path}.gate_up_proj", f"{path}.down_proj"))
            elif isinstance(module, ChannelRouter):
                parts = module.per_expert_scale.weight_parts(f"{path}.per_expert_scale")
                for index, part in enumerate(parts):
                    table[part.name] = Source(f"{path}.per_expert_scale", ((index, index + 1),), column=True)
        return table
