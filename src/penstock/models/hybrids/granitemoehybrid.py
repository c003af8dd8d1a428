"""Granite 4 (IBM): Granite's factors over layers of Mamba-2 and of attention, with a shared expert and chosen ones."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader
from penstock.models.decoder import GatedMLP
from penstock.models.decoders import granite
from penstock.models.experts.mixture import Mixture, MixtureConfig, read_mixture
from penstock.models.hybrids.mamba import (
    MAMBA_KEYS,
    MambaConfig,
    MambaMixer,
    expect_value,
    mamba_rows,
    read_kinds,
    read_mamba,
)
from penstock.models.sources import fused_rows, renamed, stacked_gates
from penstock.nn import Batch, Module, ModuleList, RMSNorm, Routing, scale
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]

_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


@dataclass(frozen=True)
class Config:
    """The values of config.json.  ``kinds`` has one entry per layer; ``mixture`` is None without chosen experts."""

    granite: granite.Config
    mamba: MambaConfig
    mixture: MixtureConfig | None
    kinds: tuple[str, ...]
    shared_size: int
    rope: bool

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
        expect_value(reader, "normalization_function", "rmsnorm")
        mixture = None
        if reader.int("num_local_experts", 8, min=0):
            values = {"num_local_experts": 8, **reader.values}
            routing = Routing(reader.int("num_experts_per_tok", 2), "softmax_of_chosen")
            key, size_key = "num_local_experts", "intermediate_size"
            checked = ConfigReader(values, reader.file)
            mixture = read_mixture(checked, own.decoder, routing, experts_key=key, size_key=size_key)
        num_layers = len(own.decoder.windows)
        listed = reader.has("layer_types") or not reader.has("layers_block_type")
        kinds_key = "layer_types" if listed else "layers_block_type"
        kinds = ("mamba",) * num_layers
        if reader.has(kinds_key):
            kinds = read_kinds(reader, kinds_key, _KINDS, num_layers)
        mamba = read_mamba(
            reader,
            norm_eps=own.decoder.norm_eps,
            bias=reader.bool("mamba_proj_bias", False),
            keys=MAMBA_KEYS,
            width=reader.int("mamba_expand", 2) * own.decoder.hidden_size,
        )
        position = reader.one_of("position_embedding_type", ("rope", "nope"), "nope")
        shared_size = reader.int("shared_intermediate_size", 1024)
        return Config(own, mamba, mixture, kinds, shared_size, position == "rope")


class _Layer(Module):
    """Mamba-2 or attention, then experts, each after a norm, with a factor on what it adds to the residual stream."""

    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        sizes = config.granite.decoder
        self.factor, self.kind = config.granite.residual_multiplier, kind
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        if kind == "mamba":
            self.mamba = MambaMixer(config.mamba)
        else:
            self.self_attn = granite.GraniteAttention(config.granite, rope=config.rope)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.block_sparse_moe = Mixture(config.mixture) if config.mixture else None
        self.shared_mlp = GatedMLP(sizes.hidden_size, config.shared_size)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        normed = self.input_layernorm(x)
        y = self.mamba(normed, batch) if self.kind == "mamba" else self.self_attn(normed, cos_sin, batch)
        x = x + scale(y, self.factor)
        normed = self.post_attention_layernorm(x)
        y = self.shared_mlp(normed)
        if self.block_sparse_moe is not None:
            y = self.block_sparse_moe(normed) + y
        return x + scale(y, self.factor)


class Network(granite.Network):
    """The language model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.granite)
        self.model.layers = ModuleList(_Layer(config, kind) for kind in config.kinds)
        self.has_experts = config.mixture is not None

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: projections and experts are rows of larger tensors."""
        experts: dict[str, Source] = {}
        for index in range(len(self.model.layers)) if self.has_experts else ():
            path = f"model.layers.{index}.block_sparse_moe"
            stacks = (f"{path}.input_linear.weight", f"{path}.output_linear.weight")
            experts |= stacked_gates(self, f"{path}.experts", stacks)
        table = mamba_rows(self) | fused_rows(self, "input_linear", ("gate_proj", "up_proj"))
        names = [
            ("block_sparse_moe.gate.", "block_sparse_moe.router.layer."),
            ("shared_mlp.down_proj", "shared_mlp.output_linear"),
        ]
        own = renamed(self, table, names)
        return {name: source for name, source in own.items() if ".experts." not in name} | experts
