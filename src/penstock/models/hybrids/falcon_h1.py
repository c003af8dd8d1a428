"""Falcon H1 (TII): each layer adds Mamba-2 and attention over the same rows, with factors on every branch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader, is_number
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.hybrids.mamba import MAMBA_KEYS, MambaConfig, MambaMixer, mamba_rows, read_mamba
from penstock.models.sources import renamed
from penstock.nn import Batch, Linear, Module, ModuleList, RMSNorm, scale, silu_mul
from penstock.nn.base import Tensor

__all__ = ["Config", "FalconH1Config", "Network"]

_LARGEST_FACTOR = 1e6


@dataclass(frozen=True)
class Factors:
    """The dimensionless factors of config.json.  ``ssm``: of z, the heads' channels, B, C and the steps."""

    embedding: float
    logits: float
    attention_in: float
    attention_out: float
    key: float
    ssm_in: float
    ssm_out: float
    gate: float
    down: float
    ssm: tuple[float, ...]


@dataclass(frozen=True)
class FalconH1Config:
    """The values of config.json.  ``has_norm``: Mamba's output is normalised, before its gate with ``norm_first``."""

    decoder: DecoderConfig
    mamba: MambaConfig
    factors: Factors
    has_norm: bool
    norm_first: bool

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
    def read(reader: ConfigReader) -> FalconH1Config:
        """Read and check config.json; errors name the key."""
        windows = (0,) * read_num_layers(reader)
        sizes = ConfigReader({"num_key_value_heads": 8} | reader.values, reader.file)
        decoder = read_decoder(sizes, windows, context_len=8192, norm_eps=1e-5)
        own = reader.values.get("mamba_d_ssm", 1024)
        width = reader.int("mamba_expand", 2) * decoder.hidden_size if own is None else reader.int("mamba_d_ssm", 1024)
        mamba = read_mamba(
            reader,
            norm_eps=decoder.norm_eps,
            bias=reader.bool("mamba_proj_bias", False),
            keys=MAMBA_KEYS,
            width=width,
            out_bias=reader.bool("projectors_bias", False),
        )
        return FalconH1Config(
            decoder,
            mamba,
            _read_factors(reader),
            has_norm=reader.bool("mamba_rms_norm", False),
            norm_first=reader.bool("mamba_norm_before_gate", True),
        )


def _read_factors(reader: ConfigReader) -> Factors:
    gate, down = _read_list(reader, "mlp_multipliers", 2)

    def factor(key: str) -> float:
        return reader.float(key, 1.0, max=_LARGEST_FACTOR)

    return Factors(
        embedding=factor("embedding_multiplier"),
        logits=factor("lm_head_multiplier"),
        attention_in=factor("attention_in_multiplier"),
        attention_out=factor("attention_out_multiplier"),
        key=factor("key_multiplier"),
        ssm_in=factor("ssm_in_multiplier"),
        ssm_out=factor("ssm_out_multiplier"),
        gate=gate,
        down=down,
        ssm=_read_list(reader, "ssm_multipliers", 5),
    )


def _read_list(reader: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """Return ``count`` factors; each is 1 when the key is missing or null."""
    values = reader.values.get(key)
    if values is None:
        return (1.0,) * count
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(is_number(v, 0, _LARGEST_FACTOR) for v in values)
    ):
        raise reader.error(key, f"{count} numbers from 0 to {_LARGEST_FACTOR:g}", values)
    return tuple(float(value) for value in values)


class _Attention(LlamaAttention):
    """Llama's attention with a factor on the keys."""

    def __init__(self, config: FalconH1Config) -> None:
        super().__init__(config.decoder, 0)
        self.factor = config.factors.key

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k times its factor, and v of x."""
        q, k, v = super().project(x)
        return q, scale(k, self.factor), v


class _Mixer(MambaMixer):
    """Mamba-2 with factors on its input, the gate and the steps.  Those of its channels are in the convolution."""

    def __init__(self, config: FalconH1Config) -> None:
        super().__init__(config.mamba, has_norm=config.has_norm, gate_first=not config.norm_first)
        self.factors = config.factors

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z, the channels and the steps of x [T, hidden]."""
        z, channels, dt = super().project(scale(x, self.factors.ssm_in))
        return scale(z, self.factors.ssm[0]), channels, scale(dt, self.factors.ssm[4])


class _MLP(Module):
    """The gated feed-forward layer, with factors on its gate and its output."""

    def __init__(self, config: FalconH1Config) -> None:
        super().__init__()
        sizes = config.decoder
        self.factors = config.factors
        self.gate_proj = Linear(sizes.hidden_size, sizes.intermediate_size, sizes.mlp_bias)
        self.up_proj = Linear(sizes.hidden_size, sizes.intermediate_size, sizes.mlp_bias)
        self.down_proj = Linear(sizes.intermediate_size, sizes.hidden_size, sizes.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        y = silu_mul(scale(self.gate_proj(x), self.factors.gate), self.up_proj(x))
        return scale(self.down_proj(y), self.factors.down)


class _Layer(Module):
    """Mamba-2 and attention side by side, then feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: FalconH1Config) -> None:
        super().__init__()
        sizes = config.decoder
        self.factors = config.factors
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.mamba = _Mixer(config)
        self.self_attn = _Attention(config)
        self.pre_ff_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.feed_forward = _MLP(config)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        normed = self.input_layernorm(x)
        recurrent = scale(self.mamba(normed, batch), self.factors.ssm_out)
        attended = self.self_attn(scale(normed, self.factors.attention_in), cos_sin, batch)
        x = x + (recurrent + scale(attended, self.factors.attention_out))
        return x + self.feed_forward(self.pre_ff_layernorm(x))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: FalconH1Config) -> None:
        super().__init__(config.decoder, [])
        self.model.layers = ModuleList(_Layer(config) for _ in config.decoder.windows)
        self.mamba, self.factors = config.mamba, config.factors

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: projections from in_proj, convolutions times the channels' factors."""
        table: dict[str, Source | tuple[Source, ...]] = {}
        table |= renamed(self, mamba_rows(self), [("model.norm.", "model.final_layernorm.")])
        mamba, factors = self.mamba, self.factors.ssm[1:4]
        if factors == (1.0, 1.0, 1.0):
            return table
        inner = mamba.groups * mamba.state_dim
        ends = (0, mamba.width, mamba.width + inner, mamba.width + 2 * inner)
        for index in range(len(self.model.layers)):
            name = f"model.layers.{index}.mamba.conv1d.weight"
            rows = zip(pairwise(ends), factors, strict=True)
            table[name] = tuple(Source(name, (part,), times=factor) for part, factor in rows)
        return table

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        x = scale(self.model.embed_tokens(batch.token_ids), self.factors.embedding)
        cos_sin = self.model.rotary_emb(batch.positions)
        for layer in self.model.layers:
            x = layer(x, cos_sin, batch)
        logits: Tensor = self.lm_head(self.model.norm(x), batch.output_rows)
        return scale(logits, self.factors.logits)
