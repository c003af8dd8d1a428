"""The Mamba-2 layer that hybrids share, and the readers of its keys in config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.checkpoint.sources import Source
from penstock.config import INFINITY, ConfigReader, is_number, show
from penstock.errors import UnsupportedError
from penstock.models.decoder import MAX_LAYERS
from penstock.models.sources import fused_rows
from penstock.nn import Batch, ConvWeight, Linear, Module, RMSNorm, SsmScan, silu_mul
from penstock.nn.base import Tensor, nn, torch

__all__ = [
    "MAMBA_KEYS",
    "MambaConfig",
    "MambaMixer",
    "expect_value",
    "mamba_rows",
    "read_kinds",
    "read_mamba",
    "read_step_limits",
]

MAMBA_KEYS: Final = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state_dim": "mamba_d_state",
    "conv_len": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
}
"""The keys of granitemoehybrid and falcon_h1, for ``read_mamba``."""

_MAX_CONV_LEN: Final = 32  # what the op ssm_scan takes
_MAX_STATE_DIM: Final = 512
_MAX_HEADS: Final = 4096
_MAX_HEAD_DIM: Final = 4096
_LARGEST: Final = (2 - 2.0**-23) * 2.0**127  # of float32


@dataclass(frozen=True)
class MambaConfig:
    """The sizes of a Mamba-2 layer in config.json.  ``step_limits`` bound the step of a token, the softplus of dt.

    ``bias``: of the projection to the channels; ``out_bias``: of that from them.
    """

    hidden_size: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_len: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    norm_eps: float
    step_limits: tuple[float, float]

    @property
    def width(self) -> int:
        """The number of channels of all heads."""
        return self.heads * self.head_dim


def read_mamba(
    reader: ConfigReader,
    *,
    norm_eps: float,
    bias: bool,
    keys: Mapping[str, str],
    width: int | None = None,
    out_bias: bool | None = None,
) -> MambaConfig:
    """Read and check the sizes of the Mamba-2 layers; errors name the key.

    ``keys`` maps "heads", "head_dim", "groups", "state_dim", "conv_len" and "conv_bias" to the family's names.
    ``width``: the channels of all heads, where the config says them too.  ``out_bias`` None: as ``bias``.
    """
    hidden_size = reader.int("hidden_size")
    heads = reader.int(keys["heads"], 128, max=_MAX_HEADS)
    key = keys["head_dim"]
    if width is not None and reader.values.get(key) in (None, "auto"):
        if width % heads:
            raise reader.error(keys["heads"], f"a divisor of {width} channels", heads)
        head_dim = width // heads
    else:
        head_dim = reader.int(key, 64, max=_MAX_HEAD_DIM)
    if width is not None and heads * head_dim != width:
        raise reader.error(key, f"{width} channels divided by {heads} heads", head_dim)
    groups = reader.int(keys["groups"], 1, max=_MAX_HEADS)
    if heads % groups:
        raise reader.error(keys["groups"], f"a divisor of {keys['heads']} ({heads})", groups)
    return MambaConfig(
        hidden_size=hidden_size,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=reader.int(keys["state_dim"], 256, max=_MAX_STATE_DIM),
        conv_len=reader.int(keys["conv_len"], 4, max=_MAX_CONV_LEN),
        conv_bias=reader.bool(keys["conv_bias"], True),
        bias=bias,
        out_bias=bias if out_bias is None else out_bias,
        norm_eps=norm_eps,
        step_limits=read_step_limits(reader, "time_step_limit"),
    )


def read_step_limits(reader: ConfigReader, key: str) -> tuple[float, float]:
    """Return the bounds of the step of a token; infinity, and no upper bound, is the largest float32."""
    value = reader.values.get(key)
    if value is None:
        return 0.0, _LARGEST
    limits = [math.inf if limit == INFINITY else limit for limit in value] if isinstance(value, list) else []
    if len(limits) != 2 or not all(is_number(limit, 0.0, math.inf) for limit in limits) or limits[0] > limits[1]:
        raise reader.error(key, "two numbers from 0 in ascending order", value)
    return min(float(limits[0]), _LARGEST), min(float(limits[1]), _LARGEST)


def read_kinds(reader: ConfigReader, key: str, names: Mapping[str, str], num_layers: int | None) -> tuple[str, ...]:
    """Return the kind of each layer from a list of names, or a string of one letter each; ``names`` maps them to kinds.

    ``num_layers`` None: as many as the list has, at least 1.
    """
    value = reader.values.get(key)
    listed = reader.text_list(key, max_items=MAX_LAYERS) if isinstance(value, list) else None
    kinds = list(reader.str(key, max_len=MAX_LAYERS)) if listed is None else listed
    if len(kinds) != (num_layers or max(len(kinds), 1)):
        raise reader.error(key, f"one entry for each of {num_layers or 1} layers", len(kinds))
    for kind in kinds:
        if kind not in names:
            raise UnsupportedError(
                f"{reader.file}: {key}: expected one of {', '.join(names)}, got {show(kind)}", param=key
            )
    return tuple(names[kind] for kind in kinds)


def expect_value(reader: ConfigReader, key: str, expected: object) -> None:
    """Raise UnsupportedError, which names the key, unless its value is ``expected`` or it is missing."""
    actual = reader.values.get(key)
    if actual is not None and actual != expected:
        raise UnsupportedError(f"{reader.file}: {key}: expected {show(expected)}, got {show(actual)}", param=key)


class MambaMixer(Module):
    """The selective state space over projections of x, gated with SiLU (z) and normalised by groups.

    ``has_norm`` False leaves the norm out, ``gate_first`` False gates what is normalised.  Of the checkpoint's in_proj
    the rows are those of z, of the channels and of the steps.
    """

    def __init__(self, config: MambaConfig, *, has_norm: bool = True, gate_first: bool = True) -> None:
        super().__init__()
        hidden, self.width, self.gate_first = config.hidden_size, config.width, gate_first
        self.scan = SsmScan(
            config.heads, config.head_dim, config.groups, config.state_dim, config.conv_len, config.step_limits
        )
        self.in_proj_z = Linear(hidden, config.width, config.bias)
        self.in_proj_x = Linear(hidden, self.scan.channels, config.bias)
        self.in_proj_dt = Linear(hidden, config.heads, config.bias)
        self.conv1d = ConvWeight(self.scan.channels, config.conv_len, config.conv_bias)
        self.dt_bias = nn.Parameter(torch.zeros(config.heads), requires_grad=False)
        self.A_log = nn.Parameter(torch.zeros(config.heads), requires_grad=False)
        self.D = nn.Parameter(torch.ones(config.heads), requires_grad=False)
        self.norm = RMSNorm(config.width, config.norm_eps, config.groups) if has_norm else None
        self.out_proj = Linear(config.width, hidden, config.out_bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z [T, width], the channels [T, channels] and the steps [T, heads] of x [T, hidden]."""
        return self.in_proj_z(x), self.in_proj_x(x), self.in_proj_dt(x)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        z, channels, dt = self.project(x)
        y = self.scan(channels, dt, batch, self.conv1d, a_log=self.A_log, dt_bias=self.dt_bias, d=self.D)
        y = y.view(-1, self.width)
        if self.norm is None:
            y = silu_mul(z, y)
        elif self.gate_first:
            y = self.norm(silu_mul(z, y))
        else:
            y = silu_mul(z, self.norm(y))
        return self.out_proj(y)


def mamba_rows(network: nn.Module) -> dict[str, Source]:
    """Return the sources of the parts of in_proj in the Mamba-2 layers of a network."""
    return fused_rows(network, "in_proj", ("in_proj_z", "in_proj_x", "in_proj_dt"))
