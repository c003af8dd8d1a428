"""The parts of Qwen's hybrids: layers with the gated delta rule, and every few layers attention with an output gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.qwen3 import Qwen3Attention
from penstock.models.sources import add_to_norms, fused_rows, renamed
from penstock.nn import (
    Batch,
    ConvWeight,
    ExpertLinear,
    GatedDelta,
    Linear,
    Module,
    ModuleList,
    RMSNorm,
    sigmoid_mul,
    silu_mul,
)
from penstock.nn.base import Tensor, nn, torch

__all__ = ["DeltaConfig", "DeltaLM", "beside_images", "norms_and_gates", "read_delta", "text_section"]

_MAX_CONV_LEN = 32  # what the op gated_delta takes
_MAX_HEAD_DIM = 512
_MAX_HEADS = 4096


@dataclass(frozen=True)
class DeltaConfig:
    """The sizes of a hybrid in config.json.

    ``is_attention`` has one entry per layer; the others are delta layers.  ``tiled``: the rows of in_proj_z and the
    columns of out_proj have the first value head of every key head, then the second of every one, as in a GGUF file.
    """

    decoder: DecoderConfig
    is_attention: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_len: int
    tiled: bool

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.decoder.vocab_size

    @property
    def context_len(self) -> int:
        """The largest number of positions."""
        return self.decoder.context_len


def read_delta(reader: ConfigReader) -> DeltaConfig:
    """Read and check config.json; errors name the key."""
    num_layers = read_num_layers(reader)
    if not reader.bool("attn_output_gate", True):
        raise UnsupportedError(f"{reader.file}: attn_output_gate: expected true, got false", param="attn_output_gate")
    # Mixtures in every layer have no width of a dense layer.
    values = {"intermediate_size": reader.int("moe_intermediate_size", 1), **reader.values}
    for key in ("rope_parameters", "rope_scaling"):  # of text the three parts of a position are equal
        if isinstance(section := values.get(key), dict):
            values[key] = {name: value for name, value in section.items() if not name.startswith("mrope_")}
    decoder = read_decoder(
        ConfigReader(values, reader.file), (0,) * num_layers, context_len=32768, head_dim=256, rotary_share=0.25
    )
    key_heads = reader.int("linear_num_key_heads", 16, max=_MAX_HEADS)
    value_heads = reader.int("linear_num_value_heads", 32, max=_MAX_HEADS)
    if value_heads % key_heads:
        expected = f"a multiple of linear_num_key_heads ({key_heads})"
        raise reader.error("linear_num_value_heads", expected, value_heads)
    return DeltaConfig(
        decoder=decoder,
        is_attention=_read_layers(reader, num_layers),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=reader.int("linear_key_head_dim", 128, max=_MAX_HEAD_DIM),
        value_dim=reader.int("linear_value_head_dim", 128, max=_MAX_HEAD_DIM),
        conv_len=reader.int("linear_conv_kernel_dim", 4, max=_MAX_CONV_LEN),
        tiled=reader.bool("linear_value_heads_tiled", False),
    )


def text_section(reader: ConfigReader) -> ConfigReader:
    """Return the reader of text_config, in folders whose model reads images too; these say themselves what is tied."""
    section = reader.values.get("text_config")
    if not isinstance(section, dict):
        raise reader.error("text_config", "an object", section)
    tied = {key: reader.values[key] for key in ("tie_word_embeddings",) if reader.has(key)}
    return ConfigReader({**section, **tied}, f"{reader.file}: text_config")


def _read_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return which layers are attention, from layer_types or else from full_attention_interval."""
    kinds = reader.text_list("layer_types")
    if kinds is None:
        interval = reader.int("full_attention_interval", 4)
        return tuple((layer + 1) % interval == 0 for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise reader.error("layer_types", f"one entry for each of {num_layers} layers", len(kinds))
    for kind in kinds:
        if kind not in ("full_attention", "linear_attention"):
            raise reader.error("layer_types", "full_attention or linear_attention", kind)
    return tuple(kind == "full_attention" for kind in kinds)


class GatedAttention(Qwen3Attention):
    """Qwen 3's attention on part of each head's dimensions, times the sigmoid of a gate."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, 0)
        q_size = config.num_heads * config.head_dim
        self.gate_proj = Linear(config.hidden_size, q_size, config.attention_bias)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k, v = self.project(x)
        y = self.attention(self.rotate(q, cos_sin), self.rotate(k, cos_sin), v, batch)
        return self.o_proj(sigmoid_mul(self.gate_proj(x), y))


class DeltaNet(Module):
    """The gated delta rule over projections of x, its output normalised per head and gated with SiLU (z)."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        hidden, heads = config.decoder.hidden_size, config.value_heads
        self.values = heads * config.value_dim
        self.rule = GatedDelta(config.key_heads, heads, config.key_dim, config.value_dim, config.conv_len, config.tiled)
        self.in_proj_qkv = Linear(hidden, self.rule.channels)
        self.in_proj_z = Linear(hidden, self.values)
        self.in_proj_b = Linear(hidden, heads)
        self.in_proj_a = Linear(hidden, heads)
        self.conv1d = ConvWeight(self.rule.channels, config.conv_len)
        self.dt_bias = nn.Parameter(torch.zeros(heads), requires_grad=False)
        self.A_log = nn.Parameter(torch.zeros(heads), requires_grad=False)
        self.norm = RMSNorm(config.value_dim, config.decoder.norm_eps)
        self.out_proj = Linear(self.values, hidden)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        y = self.rule(
            self.in_proj_qkv(x),
            self.in_proj_a(x),
            self.in_proj_b(x),
            batch,
            conv=self.conv1d.weight,
            a_log=self.A_log,
            dt_bias=self.dt_bias,
        )
        return self.out_proj(silu_mul(self.in_proj_z(x), self.norm(y).view(-1, self.values)))


class DeltaLayer(Module):
    """Attention or the delta rule, then feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: DeltaConfig, is_attention: bool, mlp: Module) -> None:
        super().__init__()
        sizes = config.decoder
        self.is_attention = is_attention
        if is_attention:
            self.self_attn = GatedAttention(sizes)
        else:
            self.linear_attn = DeltaNet(config)
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, cos_sin, batch) if self.is_attention else self.linear_attn(normed, batch))
        return x + self.mlp(self.post_attention_layernorm(x))


class DeltaLM(CausalLM):
    """A hybrid language model.  ``make_mlp`` makes the feed-forward layer of the layer with a number."""

    unread_tensors: tuple[str, ...] = ("mtp.*",)  # a head that guesses further tokens

    def __init__(self, config: DeltaConfig, make_mlp: Callable[[int], Module]) -> None:
        super().__init__(config.decoder, [])
        layers = [DeltaLayer(config, kind, make_mlp(layer)) for layer, kind in enumerate(config.is_attention)]
        self.model.layers = ModuleList(layers)


def norms_and_gates(network: DeltaLM) -> dict[str, Source]:
    """Return the sources of norms, which are stored less 1 but for the delta layers' own, and of attention's gate.

    The rows of q_proj are for each head those of its queries, then those of its gate.
    """
    norms = {name: source for name, source in add_to_norms(network).items() if ".linear_attn." not in name}
    return norms | fused_rows(network, "q_proj", ("q_proj", "gate_proj"), network.config.num_heads)


def beside_images(network: DeltaLM) -> dict[str, Source]:
    """Return the sources of a network whose folder has it as ``model.language_model``, beside a model of images."""
    names = ("model.", "model.language_model.")
    table = renamed(network, norms_and_gates(network), [names])
    for path, module in network.named_modules():
        if isinstance(module, ExpertLinear):
            del table[f"{path}.weight"]
            table |= {part.name: Source(part.name.replace(*names, 1)) for part in module.weight_parts(path)}
    return table
