"""Gemma 3n, text: several rows per token of which one is computed (AltUp), low-rank residuals (LAuReL), sparse gates.

AltUp: Baykal et al., arXiv 2301.13310.  LAuReL: Menghani et al., arXiv 2411.07501.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader, is_number
from penstock.models.decoders.gemma import GeluGatedMLP
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
from penstock.nn import (
    Batch,
    Linear,
    Module,
    ModuleList,
    RMSNorm,
    combine,
    gaussian_topk,
    gelu,
    match_rms,
    scale,
    scale_channels,
    softcap,
)
from penstock.nn.base import Tensor, nn, torch

__all__ = ["Config", "Gemma3nConfig", "Network"]

_MAX_INPUTS: Final = 16  # rows per token; a limit against damaged configs
_FLOOR: Final = 1e-5  # the least mean square by which a row is divided
_HALF: Final = 2.0**-0.5


@dataclass(frozen=True)
class Gemma3nConfig:
    """The sizes of the network: ``num_inputs`` rows per token, of which the layers compute row ``active``.

    ``sparsity`` has for each layer the share of gates that are 0.
    """

    base: SharedKvConfig
    num_inputs: int
    active: int
    scales_output: bool
    laurel_rank: int
    sparsity: tuple[float, ...]

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.base.vocab_size

    @property
    def context_len(self) -> int:
        """The largest number of positions."""
        return self.base.context_len


def _read_sparsity(reader: ConfigReader, num_layers: int) -> tuple[float, ...]:
    """Return the share of gates that are 0 by layer; without the key 0.95 in the first ten of more than ten layers."""
    key = "activation_sparsity_pattern"
    values = reader.values.get(key)
    if values is None:
        sparse = 10 if num_layers > 10 else 0
        return (0.95,) * sparse + (0.0,) * (num_layers - sparse)
    is_list = isinstance(values, list) and len(values) == num_layers
    if not is_list or not all(is_number(value, 0.0, 0.9999) for value in values):
        raise reader.error(key, f"{num_layers} numbers from 0 to 0.9999, one for each layer", values)
    return tuple(float(value) for value in values)


def _read_layers(reader: ConfigReader) -> list[LayerSizes]:
    """Return the sizes of each layer."""
    kinds = read_kinds(reader, 5)
    num_shared = reader.int("num_kv_shared_layers", 15, min=0, max=len(kinds) - 1)
    sources = page_sources(reader, kinds, num_shared)
    widths = reader.int_or_list("intermediate_size", min=1) or (16384,)
    widths = widths * len(kinds) if len(widths) == 1 else widths
    if len(widths) != len(kinds):
        raise reader.error("intermediate_size", f"one number, or one for each of {len(kinds)} layers", len(widths))
    head_dim, kv_heads = reader.int("head_dim", 256), reader.int("num_key_value_heads", 2)
    window = reader.int("sliding_window", 512)
    return [
        LayerSizes(0 if kind == FULL else window, head_dim, kv_heads, width, source)
        for kind, width, source in zip(kinds, widths, sources, strict=True)
    ]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Gemma3nConfig:
        """Read and check config.json; errors name the key."""
        layers = _read_layers(reader)
        head_dim = layers[0].head_dim
        local_theta = reader.float("rope_local_base_freq", 1e4, min=1.0)
        full = read_type_rope(reader, FULL, head_dim, theta=reader.float("rope_theta", 1e6, min=1.0))
        ropes = (full, read_type_rope(reader, LOCAL, head_dim, theta=local_theta))
        num_inputs = reader.int("altup_num_inputs", 4, max=_MAX_INPUTS)
        base = read_layered(reader, layers, ropes, context_len=32768, logit_cap=30.0)
        if not base.layer_input_dim:
            raise reader.error("hidden_size_per_layer_input", "at least 1", 0)
        return Gemma3nConfig(
            base=base,
            num_inputs=num_inputs,
            active=reader.int("altup_active_idx", 0, min=0, max=num_inputs - 1),
            scales_output=reader.bool("altup_correct_scale", True),
            laurel_rank=reader.int("laurel_rank", 64),
            sparsity=_read_sparsity(reader, len(layers)),
        )


class SparseMLP(GeluGatedMLP):
    """The feed-forward layer, whose gates below a cutoff are 0; ``sparsity`` is their share."""

    def __init__(self, hidden_size: int, intermediate_size: int, sparsity: float) -> None:
        super().__init__(hidden_size, intermediate_size)
        self.deviations = NormalDist().inv_cdf(sparsity) if sparsity else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        gate = self.gate_proj(x)
        if self.deviations is not None:
            gate = gaussian_topk(gate, self.deviations)
        y: Tensor = self.down_proj(gelu(gate, "tanh") * self.up_proj(x))
        return y


class AltUp(Module):
    """Predicts the rows of a token before a layer, and corrects them by what the layer makes of the active one."""

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__()
        hidden, count = config.base.hidden_size, config.num_inputs
        self.hidden_size, self.count, self.active = hidden, count, config.active
        self.correct_output_scale = nn.Parameter(torch.zeros(hidden), requires_grad=False)
        self.correction_coefs = Linear(count, count)
        self.prediction_coefs = Linear(count, count * count)
        self.modality_router = Linear(hidden, count)
        self.router_norm = RMSNorm(hidden, config.base.norm_eps)

    def modalities(self, x: Tensor) -> Tensor:
        """Return tanh of the router's results, [T, count], of x [T, hidden]."""
        return softcap(self.modality_router(scale(self.router_norm(x), 1.0 / self.hidden_size)), 1.0)

    def predict(self, rows: list[Tensor]) -> list[Tensor]:
        """Return each row plus a weighted sum of all rows; they are [T, hidden]."""
        weights = self.prediction_coefs(self.modalities(rows[self.active]))
        return [self._add_weighted(row, rows, weights, index * self.count) for index, row in enumerate(rows)]

    def correct(self, rows: list[Tensor], computed: Tensor) -> list[Tensor]:
        """Return the rows plus what the layer added to the active one, each with a weight plus 1 for it."""
        weights = self.correction_coefs(self.modalities(computed))
        added = computed + scale(rows[self.active], -1.0)
        return [self._add_weighted(row + added, [added], weights, index) for index, row in enumerate(rows)]

    def _add_weighted(self, x: Tensor, rows: list[Tensor], weights: Tensor, first: int) -> Tensor:
        """Return x plus rows times the columns of ``weights`` from ``first`` on."""
        for column, row in enumerate(rows, first):
            x = x + combine(row.view(-1, 1, self.hidden_size), weights[:, column : column + 1])
        return x


class Laurel(Module):
    """A learned residual of low rank, added to its input."""

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__()
        hidden = config.base.hidden_size
        self.linear_left = Linear(hidden, config.laurel_rank)
        self.linear_right = Linear(config.laurel_rank, hidden)
        self.post_laurel_norm = RMSNorm(hidden, config.base.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        y: Tensor = x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return y


class Gemma3nLayer(InputLayer):
    """Attention beside LAuReL, then feed-forward, on the active row; the others follow by AltUp."""

    def __init__(self, config: Gemma3nConfig, index: int, owner: SharedKvAttention | None) -> None:
        base = config.base
        super().__init__(base)
        sizes, hidden, eps = base.layers[index], base.hidden_size, base.norm_eps
        self.active, self.scales_output = config.active, config.scales_output
        self.self_attn = SharedKvAttention(base, sizes, owner)
        self.mlp = SparseMLP(hidden, sizes.intermediate_size, config.sparsity[index])
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.altup, self.laurel = AltUp(config), Laurel(config)

    def forward(self, rows: list[Tensor], cos_sin: Tensor, own: Tensor, batch: Batch) -> list[Tensor]:
        """Return the rows of the tokens, each [T, hidden], behind the layer; ``own`` is [T, layer_input_dim]."""
        rows = self.altup.predict(rows)
        active = rows[self.active]
        normed = self.input_layernorm(active)
        attended = active + self.post_attention_layernorm(self.self_attn(normed, cos_sin, batch))
        x = scale(attended + self.laurel(normed), _HALF)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        rows = self.altup.correct(rows, x)
        first = rows[self.active]
        if self.scales_output:
            first = scale_channels(first, self.altup.correct_output_scale)
        added = self.gated_input(first, own)
        return [rows[0], *(row + added for row in rows[1:])]


class AltUpModel(LayeredModel):
    """The decoder, with the projections that make the rows of a token and join them again."""

    def __init__(self, config: Gemma3nConfig, layers: list[Gemma3nLayer]) -> None:
        super().__init__(config.base, layers)
        hidden, others = config.base.hidden_size, config.num_inputs - 1
        self.altup_projections = ModuleList(Linear(hidden, hidden) for _ in range(others))
        self.altup_unembed_projections = ModuleList(Linear(hidden, hidden) for _ in range(others))

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step before the last norm, [T, hidden]."""
        x = self.embed(batch)
        rows = [x, *(match_rms(project(x), x, _FLOOR) for project in self.altup_projections)]
        inputs = zip(self.layers, self.rotary(batch), self.layer_inputs(x, batch), strict=True)
        for layer, cos_sin, own in inputs:
            rows = layer(rows, cos_sin, own, batch)
        total = rows[0]
        for row, project in zip(rows[1:], self.altup_unembed_projections, strict=True):
            total = total + match_rms(project(row), rows[0], _FLOOR)
        return scale(total, 1.0 / len(rows))


class Network(LayeredLM):
    """The language model."""

    def __init__(self, config: Gemma3nConfig) -> None:
        layers: list[Gemma3nLayer] = []
        for index, sizes in enumerate(config.base.layers):
            owner = None if sizes.source is None else layers[sizes.source].self_attn
            layers.append(Gemma3nLayer(config, index, owner))
        super().__init__(config.base, AltUpModel(config, layers))

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        return self.logits(self.model(batch), batch)

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from: the table of layer inputs may lack tokens."""
        return super().tensor_sources()
