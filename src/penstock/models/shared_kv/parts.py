"""The parts of Gemma 3n and 4: sizes by layer, attention over the pages of an earlier layer, inputs for each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader, RopeConfig
from penstock.models.decoder import read_num_layers
from penstock.models.sources import renamed
from penstock.nn import (
    Attention,
    BareRMSNorm,
    Batch,
    Embedding,
    ExpertLinear,
    Linear,
    LMHead,
    Module,
    RMSNorm,
    RotaryEmbedding,
    apply_rope,
    gelu,
    scale,
    softcap,
)
from penstock.nn.base import Tensor, nn

__all__ = [
    "FULL", "LOCAL", "OTHER_INPUTS", "InputLayer", "LayerSizes", "LayeredLM", "LayeredModel", "SharedKvAttention",
    "SharedKvConfig", "beside_images", "page_sources", "read_kinds", "read_layered", "read_type_rope", "text_section",
]  # fmt: skip

FULL, LOCAL = "full_attention", "sliding_attention"
OTHER_INPUTS: Final = ("*vision_tower.*", "*audio_tower.*", "*embed_vision.*", "*embed_audio.*")
"""Patterns of the names of tensors that only images and audio need."""


@dataclass(frozen=True)
class LayerSizes:
    """A layer's sizes.  ``source`` is the layer whose keys and values it reads, None if it has its own.

    ``window`` 0 attends to every position.  ``keys_are_values``: one projection makes both.
    """

    window: int
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    source: int | None = None
    keys_are_values: bool = False


@dataclass(frozen=True)
class SharedKvConfig:
    """The sizes of the network.  ``local_rope`` is that of layers with a window.

    ``layer_input_dim`` is the width of the inputs that each layer has for itself, 0 for none, and ``layer_input_rows``
    the number of tokens in their table.  A ``logit_cap`` of 0 is none.
    """

    vocab_size: int
    hidden_size: int
    context_len: int
    num_heads: int
    norm_eps: float
    tied: bool
    attention_bias: bool
    rope: RopeConfig
    local_rope: RopeConfig
    layers: tuple[LayerSizes, ...]
    layer_input_dim: int
    layer_input_rows: int
    logit_cap: float


def read_kinds(reader: ConfigReader, period: int) -> list[str]:
    """Return the kind of each layer; without layer_types every ``period``-th is full."""
    num_layers = read_num_layers(reader)
    kinds = reader.text_list("layer_types")
    if kinds is None:
        return [LOCAL if (index + 1) % period else FULL for index in range(num_layers)]
    if len(kinds) != num_layers:
        raise reader.error("layer_types", f"one entry for each of {num_layers} layers", len(kinds))
    for kind in kinds:
        if kind not in (FULL, LOCAL):
            raise reader.error("layer_types", f"{FULL} or {LOCAL}", kind)
    return kinds


def page_sources(reader: ConfigReader, kinds: Sequence[str], num_shared: int) -> list[int | None]:
    """Return the layer whose keys and values each layer reads, None where it has its own.

    The last ``num_shared`` layers read those of the last layer of their kind before them.
    """
    own = len(kinds) - num_shared
    last = {kind: index for index, kind in enumerate(kinds[: max(own, 0)])}
    missing = sorted(set(kinds) - last.keys())
    if missing:
        expected = f"{len(kinds)} layers with one of {missing[0]} before the shared ones"
        raise reader.error("num_kv_shared_layers", expected, num_shared)
    return [None if index < own else last[kind] for index, kind in enumerate(kinds)]


def read_type_rope(reader: ConfigReader, kind: str, head_dim: int, *, theta: float, share: float = 1.0) -> RopeConfig:
    """Return the rotary positions of one kind of layers, from rope_parameters with an object for each kind.

    ``theta`` is the family's default; a ``share`` below 1 is that of proportional positions, if the object is missing.
    """
    section = reader.object("rope_parameters")
    values = {} if section is None else section.values
    for name in values:
        if name not in (FULL, LOCAL):
            raise ConfigReader(values, f"{reader.file}: rope_parameters").error(
                name, f"{FULL} and {LOCAL}", values[name]
            )
    default = {"rope_type": "proportional", "partial_rotary_factor": share} if share < 1 else {}
    own = ConfigReader({"own": values.get(kind, default)}, reader.file).object("own")
    own = ConfigReader({} if own is None else own.values, f"{reader.file}: rope_parameters: {kind}")
    if own.values.get("rope_type") != "proportional":
        return ConfigReader({"rope_parameters": own.values}, own.file).rope(head_dim, theta=theta)
    for name in own.values:
        if name not in ("rope_type", "rope_theta", "partial_rotary_factor", "factor"):
            raise own.error(name, "no such key of proportional positions", own.values[name])
    turning = int(own.float("partial_rotary_factor", 1.0, max=1.0) * head_dim // 2)
    factor = own.float("factor", 1.0, min=1e-6)
    plain = ConfigReader({"rope_theta": own.float("rope_theta", theta, min=1.0)}, own.file).rope(head_dim)
    divisors = tuple(factor if pair < turning else math.inf for pair in range(head_dim // 2))
    return replace(plain, type="proportional", divisors=divisors)


def read_layered(
    reader: ConfigReader,
    layers: Sequence[LayerSizes],
    ropes: tuple[RopeConfig, RopeConfig],
    *,
    context_len: int,
    logit_cap: float,
) -> SharedKvConfig:
    """Read and check what both families have; errors name the key.

    ``ropes``: of full layers and of those with a window.  ``context_len`` and ``logit_cap`` are the family's defaults.
    """
    reader.one_of("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    num_heads = reader.int("num_attention_heads")
    for layer in layers:
        if num_heads % layer.num_kv_heads:
            expected = f"a divisor of num_attention_heads ({num_heads})"
            raise reader.error("num_key_value_heads", expected, layer.num_kv_heads)
    key = "final_logit_softcapping"
    is_null = key in reader.values and not reader.has(key)
    has_cap = reader.has(key) or (logit_cap > 0 and not is_null)
    vocab_size = reader.int("vocab_size")
    return SharedKvConfig(
        vocab_size=vocab_size,
        hidden_size=reader.int("hidden_size"),
        context_len=reader.int("max_position_embeddings", context_len),
        num_heads=num_heads,
        norm_eps=reader.float("rms_norm_eps", 1e-6),
        tied=reader.bool("tie_word_embeddings", True),
        attention_bias=reader.bool("attention_bias", False),
        rope=ropes[0],
        local_rope=ropes[1],
        layers=tuple(layers),
        layer_input_dim=reader.int("hidden_size_per_layer_input", 256, min=0),
        layer_input_rows=reader.int("vocab_size_per_layer_input", 262144),
        logit_cap=reader.float(key, logit_cap, min=1e-6) if has_cap else 0.0,
    )


class SharedKvAttention(Module):
    """Attention with norms of q, k and v and rotary positions, over its own pages or over those of ``owner``."""

    def __init__(self, config: SharedKvConfig, sizes: LayerSizes, owner: SharedKvAttention | None) -> None:
        super().__init__()
        hidden, bias, eps, head_dim = config.hidden_size, config.attention_bias, config.norm_eps, sizes.head_dim
        q_size, kv_size = config.num_heads * head_dim, sizes.num_kv_heads * head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, sizes.num_kv_heads, head_dim
        self.q_proj = Linear(hidden, q_size, bias)
        self.q_norm = RMSNorm(head_dim, eps)
        self.o_proj = Linear(q_size, hidden, bias)
        self.attention: Attention
        self._owner: tuple[Attention, ...] = ()  # a tuple, because the layer is a part of another module
        if owner is not None:
            self._owner = (owner.attention,)
            return
        self.k_proj = Linear(hidden, kv_size, bias)
        self.v_proj = None if sizes.keys_are_values else Linear(hidden, kv_size, bias)
        self.k_norm, self.v_norm = RMSNorm(head_dim, eps), BareRMSNorm(head_dim, eps)
        self.attention = Attention(config.num_heads, sizes.num_kv_heads, head_dim, window=sizes.window, scale=1.0)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q = apply_rope(self.q_norm(self.q_proj(x).view(-1, self.num_heads, self.head_dim)), cos_sin)
        if self._owner:
            return self.o_proj(self._owner[0].attend(q, batch))
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        v = k if self.v_proj is None else self.v_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        return self.o_proj(self.attention(q, apply_rope(self.k_norm(k), cos_sin), self.v_norm(v), batch))


class InputLayer(Module):
    """A layer with an input of its own, beside the hidden rows; without one if ``layer_input_dim`` is 0."""

    def __init__(self, config: SharedKvConfig) -> None:
        super().__init__()
        if config.layer_input_dim:
            self.per_layer_input_gate = Linear(config.hidden_size, config.layer_input_dim)
            self.per_layer_projection = Linear(config.layer_input_dim, config.hidden_size)
            self.post_per_layer_input_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def gated_input(self, x: Tensor, own: Tensor) -> Tensor:
        """Return what the layer makes of its own input [T, layer_input_dim], gated by x [T, hidden]: [T, hidden]."""
        gate = gelu(self.per_layer_input_gate(x), "tanh")
        y: Tensor = self.post_per_layer_input_norm(self.per_layer_projection(gate * own))
        return y


class LayeredModel(Module):
    """The decoder without its output head; ``layers`` are called by the network."""

    def __init__(self, config: SharedKvConfig, layers: Sequence[Module]) -> None:
        super().__init__()
        self.config = config
        hidden, dim, num_layers = config.hidden_size, config.layer_input_dim, len(layers)
        self.embed_tokens = Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden, config.norm_eps)
        self.rotary_emb, self.local_rotary_emb = RotaryEmbedding(config.rope), RotaryEmbedding(config.local_rope)
        if dim:
            # A row for each token id; see tensor_sources.
            self.embed_tokens_per_layer = Embedding(max(config.layer_input_rows, config.vocab_size), num_layers * dim)
            self.per_layer_model_projection = Linear(hidden, num_layers * dim)
            self.per_layer_projection_norm = RMSNorm(dim, config.norm_eps)

    def embed(self, batch: Batch) -> Tensor:
        """Return the scaled embeddings of a step, [T, hidden]."""
        return scale(self.embed_tokens(batch.token_ids), math.sqrt(self.config.hidden_size))

    def layer_inputs(self, x: Tensor, batch: Batch) -> list[Tensor | None]:
        """Return the input of each layer, [T, layer_input_dim], for embeddings x [T, hidden]; None without them."""
        dim, num_layers = self.config.layer_input_dim, len(self.layers)
        if not dim:
            return [None] * num_layers
        projected = scale(self.per_layer_model_projection(x), self.config.hidden_size**-0.5)
        projected = self.per_layer_projection_norm(projected.view(-1, num_layers, dim)).view(-1, num_layers * dim)
        table = scale(self.embed_tokens_per_layer(batch.token_ids), math.sqrt(dim))
        inputs = scale(projected + table, 2.0**-0.5)
        return [inputs[:, index * dim : (index + 1) * dim] for index in range(num_layers)]

    def rotary(self, batch: Batch) -> list[Tensor]:
        """Return the cosines and sines for each layer, [T, rotary_dim]."""
        full, local = self.rotary_emb(batch.positions), self.local_rotary_emb(batch.positions)
        return [local if sizes.window else full for sizes in self.config.layers]


class LayeredLM(Module):
    """The output head behind such a decoder, and the tensors of its checkpoint."""

    bare_prefix = "model."
    unread_tensors: tuple[str, ...] = ()

    def __init__(self, config: SharedKvConfig, model: LayeredModel) -> None:
        super().__init__()
        self.config, self.model = config, model
        tied = model.embed_tokens if config.tied else None
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=tied)
        # Checkpoints may have what layers without pages of their own do not compute.
        self.unread_tensors = tuple(
            f"*layers.{index}.self_attn.{name}.*"
            for index, sizes in enumerate(config.layers)
            if sizes.source is not None
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        )

    def logits(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab], of hidden rows x [T, hidden]."""
        return softcap(self.lm_head(self.model.norm(x), batch.output_rows), self.config.logit_cap)

    def tensor_sources(self) -> dict[str, Source]:
        """Return the sources of the parameters.  A token beyond the table of layer inputs has the row of token 0."""
        config = self.config
        missing = config.vocab_size - config.layer_input_rows
        if not config.layer_input_dim or missing <= 0:
            return {}
        name = "model.embed_tokens_per_layer.weight"
        return {name: Source(name, ((0, config.layer_input_rows), *(((0, 1),) * missing)))}


def text_section(reader: ConfigReader) -> ConfigReader:
    """Return the reader of text_config, in folders whose model reads images and audio too."""
    section = reader.values.get("text_config")
    if not isinstance(section, dict):
        raise reader.error("text_config", "an object", section)
    tied = {key: reader.values[key] for key in ("tie_word_embeddings",) if reader.has(key)}
    return ConfigReader({**section, **tied}, f"{reader.file}: text_config")


def beside_images(network: LayeredLM, table: Mapping[str, Source]) -> dict[str, Source]:
    """Return ``table`` for a folder that has the network as ``model.language_model``, beside models of other inputs."""
    names = ("model.", "model.language_model.")
    result = renamed(network, table, [names])
    for path, module in network.named_modules():
        if isinstance(module, ExpertLinear):
            del result[f"{path}.weight"]
            for part in module.weight_parts(path):
                source = table[part.name]
                result[part.name] = replace(source, tensor=source.tensor.replace(*names, 1))
    return result
