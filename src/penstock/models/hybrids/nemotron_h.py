"""Nemotron-H and Nemotron 3 Nano (NVIDIA, arXiv 2504.03624): one mixer per layer, Mamba-2, attention or feed-forward.

Attention has no positions.  Layers that predict further tokens (mtp) are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.decoder import DecoderConfig, read_decoder
from penstock.models.experts.mixture import CorrectedRouter, MixtureConfig, read_mixture
from penstock.models.hybrids.mamba import MambaConfig, MambaMixer, expect_value, mamba_rows, read_kinds, read_mamba
from penstock.nn import (
    Attention,
    Batch,
    Embedding,
    ExpertLinear,
    Linear,
    LMHead,
    Module,
    RMSNorm,
    Routing,
    combine,
    relu_squared,
    route,
)
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "NemotronHConfig", "Network"]

_KINDS = {"linear_attention": "mamba", "mamba": "mamba", "full_attention": "attention", "attention": "attention"}
_KINDS |= {"mlp": "mlp", "moe": "moe"}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KEYS = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "groups": "n_groups",
    "state_dim": "ssm_state_size",
    "conv_len": "conv_kernel",
    "conv_bias": "use_conv_bias",
}
_DEFAULTS = {"n_groups": 8, "ssm_state_size": 128, "intermediate_size": 21504, "num_key_value_heads": 8}


@dataclass(frozen=True)
class NemotronHConfig:
    """The values of config.json.  ``kinds`` has one entry per layer.

    ``mixture`` is None without layers of experts; ``latent_size`` is the width of their rows.
    """

    decoder: DecoderConfig
    mamba: MambaConfig
    mixture: MixtureConfig | None
    latent_size: int
    kinds: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.decoder.vocab_size

    @property
    def context_len(self) -> int:
        """The largest number of positions."""
        return self.decoder.context_len


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> NemotronHConfig:
        """Read and check config.json; errors name the key."""
        reader.one_of("mlp_hidden_act", ("relu2",), "relu2")
        reader.one_of("mamba_hidden_act", ("silu",), "silu")
        for key, value in (("attention_bias", False), ("mamba_proj_bias", False), ("n_shared_experts", 1)):
            expect_value(reader, key, value)
        kinds = _read_kinds(reader)
        eps = reader.float("layer_norm_epsilon", 1e-5)
        own = ConfigReader(_DEFAULTS | reader.values | {"rms_norm_eps": eps, "hidden_act": "silu"}, reader.file)
        decoder = read_decoder(own, (0,) * len(kinds), context_len=4096, head_dim=128)
        mamba = read_mamba(own, norm_eps=eps, bias=reader.bool("use_bias", False), keys=_KEYS)
        mixture = _read_mixture(own, decoder) if "moe" in kinds else None
        latent_size = reader.int("moe_latent_size", decoder.hidden_size)
        return NemotronHConfig(decoder, mamba, mixture, latent_size, kinds)


def _read_kinds(reader: ConfigReader) -> tuple[str, ...]:
    """Return the kind of each layer, from a list of names or else from the pattern of letters."""
    for key in ("layers_block_type", "layer_types"):
        if reader.has(key):
            return read_kinds(reader, key, _KINDS, None)
    num_layers = reader.optional_int("num_hidden_layers")
    return read_kinds(reader, "hybrid_override_pattern", _LETTERS, num_layers)


def _read_mixture(reader: ConfigReader, decoder: DecoderConfig) -> MixtureConfig:
    routing = Routing(
        reader.int("num_experts_per_tok", 2),
        "sigmoid",
        renormalise=reader.bool("norm_topk_prob", True),
        factor=reader.float("routed_scaling_factor", 1.0),
        groups=reader.int("n_group", 1),
        kept_groups=reader.int("topk_group", 1),
        group_rule="best_two",
    )
    shared_size = reader.int("moe_shared_expert_intermediate_size", 7688)
    sizes = {"n_routed_experts": 8, "moe_intermediate_size": 7688} | reader.values
    own = ConfigReader(sizes, reader.file)
    return read_mixture(own, decoder, routing, experts_key="n_routed_experts", shared_size=shared_size)


class _Attention(Module):
    """Grouped-query attention without positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(q_size, config.hidden_size)
        self.attention = Attention(config.num_heads, config.num_kv_heads, config.head_dim)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        return self.o_proj(self.attention(self.q_proj(x), self.k_proj(x), self.v_proj(x), batch))


class _MLP(Module):
    """The feed-forward layer with the square of ReLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return self.down_proj(relu_squared(self.up_proj(x)))


class _Experts(Module):
    """The experts of a layer: such a feed-forward layer each."""

    def __init__(self, config: MixtureConfig, width: int) -> None:
        super().__init__()
        self.k, self.size = config.routing.k, config.expert_size
        self.up_proj = ExpertLinear(config.num_experts, width, config.expert_size)
        self.down_proj = ExpertLinear(config.num_experts, config.expert_size, width)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the weighted sum [T, width] of what the experts ids [T, k] make of x [T, width]."""
        rows = relu_squared(self.up_proj(x, ids).view(-1, self.k * self.size))
        return combine(self.down_proj(rows.view(-1, self.k, self.size), ids), weights)


class _Mixture(Module):
    """The experts that a token chooses, between linears to and from a narrower row, and the shared one."""

    def __init__(self, config: NemotronHConfig, mixture: MixtureConfig) -> None:
        super().__init__()
        hidden, width, bias = config.decoder.hidden_size, config.latent_size, config.decoder.mlp_bias
        self.routing = mixture.routing
        self.gate = CorrectedRouter(hidden, mixture.num_experts)
        self.experts = _Experts(mixture, width)
        self.shared_experts = _MLP(hidden, mixture.shared_size, bias)
        narrow = width != hidden
        self.fc1_latent_proj = Linear(hidden, width, bias) if narrow else None
        self.fc2_latent_proj = Linear(width, hidden, bias) if narrow else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        weights, ids = route(self.gate(x), self.routing, self.gate.e_score_correction_bias)
        rows = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        y = self.experts(rows, weights, ids)
        return (y if self.fc2_latent_proj is None else self.fc2_latent_proj(y)) + self.shared_experts(x)


class _Layer(Module):
    """One mixer after a norm, with a residual connection."""

    def __init__(self, config: NemotronHConfig, kind: str) -> None:
        super().__init__()
        sizes = config.decoder
        self.kind = kind
        self.norm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        if kind == "mamba":
            self.mixer: Module = MambaMixer(config.mamba)
        elif kind == "attention":
            self.mixer = _Attention(sizes)
        elif kind == "moe" and config.mixture is not None:
            self.mixer = _Mixture(config, config.mixture)
        else:
            self.mixer = _MLP(sizes.hidden_size, sizes.intermediate_size, sizes.mlp_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        normed = self.norm(x)
        return x + (self.mixer(normed, batch) if self.kind in ("mamba", "attention") else self.mixer(normed))


class _Backbone(Module):
    """The layers: token ids to hidden rows."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        sizes = config.decoder
        self.embeddings = Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, kind) for kind in config.kinds)
        self.norm_f = RMSNorm(sizes.hidden_size, sizes.norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = self.embeddings(batch.token_ids)
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm_f(x)


class Network(Module):
    """The language model."""

    unread_tensors: tuple[str, ...] = ("mtp.*",)

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = _Backbone(config)
        sizes = config.decoder
        tied = self.backbone.embeddings if sizes.tied else None
        self.lm_head = LMHead(sizes.hidden_size, sizes.vocab_size, tied=tied)

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from that are rows of in_proj."""
        return mamba_rows(self)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return self.lm_head(self.backbone(batch), batch.output_rows)
