"""An architecture of GGUF files (``general.architecture``), and the names that several have.

The names of tensors are those of llama.cpp's ``gguf-py/gguf/constants.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.weights import GgufSource

__all__ = [
    "BOTH_NORMS", "CAPS", "GRANITE_FACTORS", "LAYER_NAMES", "LAYER_NORM", "SHARED", "SIZES", "TOP_NAMES", "WINDOW",
    "WINDOW_PATTERN", "Architecture", "Factors", "PartSources", "Tensors", "Values", "expert_names", "shared_names",
    "with_dense",
]  # fmt: skip

TOP_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "cls.output": "score",
}
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BOTH_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GRANITE_FACTORS: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
SIZES: Final = ("expert_feed_forward_length",)
WINDOW: Final = "attention.sliding_window"
WINDOW_PATTERN: Final = "attention.sliding_window_pattern"
LAYER_NORM: Final = "attention.layer_norm_epsilon"
CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")
SHARED: Final = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}

Values = Mapping[str, Any]
Tensors = Mapping[str, StoredTensor]
Factors = Mapping[str, NDArray[np.float32]]
"""Divisors of the frequencies of rotary positions, by the name of their tensor."""
PartSources = Callable[[StoredTensor, str], dict[str, GgufSource] | None]
"""Returns the parameters of a layer that come from parts of a tensor, None for a tensor in the usual form.  The text is
the tensor's name without that of the layer."""


@dataclass(frozen=True)
class Architecture:
    """A value of general.architecture.

    ``has_pairs``: the file has the rows of q and k in adjacent pairs.  ``layer_names``: the module of a layer that each
    tensor of a layer is the weight of; "{}" stands for the number of an expert, of which the tensor has all.
    ``factors``: keys of numbers that the architecture must have, with their names in config.json.  ``keys``: further
    keys that it may have.  ``constants``: values of config.json that no key has.  ``num_experts``: the name of the
    number of experts in config.json, "" for none.  ``expert_size``: that of the width of an expert.  ``alternates``: a
    tensor of experts whose rows alternate with those of another.  ``is_own_form``: the file has the values of the
    network's parameters, where a checkpoint folder has another form.  ``norm_key``: that of the epsilon of norms.
    ``rotates_in_part``: rope.dimension_count may be less than a head.  ``has_no_rope``: the key has no meaning, because
    there are no rotary positions.  ``biases``: keys of config.json that say whether there are biases, with the linear
    that has one.  ``own_keys``: the family's names of the keys of config.json.
    ``scaling_constants``: values of rope_scaling that no key has.  ``top_names``: modules outside layers with names of
    their own.  ``layers``: the path of the layers.  ``names_beside``: names in layers beside a tensor that layer 0 has.
    ``head_parts``: linears of the pooling head, in their order.  ``read`` returns the values of config.json that only
    this architecture has, from the metadata, its name, the values of all and the tensors.  ``read_parts`` returns what
    finds the parameters that come from parts of a tensor.  ``has_extra_layers``: the last layers may predict further
    tokens and are not read.  ``has_attention_in_some``: layers without heads of keys and values are of another kind.
    ``has_own_heads``: the sizes and numbers of heads are those that ``read`` returns, and so are the experts with
    ``may_have_experts``.  ``read_rope`` returns the rotary positions, from the tensors of divisors too.
    ``layer_constants`` returns the parameters of layers that are values of keys, one for each layer.
    ``unit_head_rows``: an output head with so many rows has them divided by their lengths.
    """

    model_type: str
    has_pairs: bool = False
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    factors: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    num_experts: str = ""
    expert_size: str = "moe_intermediate_size"
    alternates: Mapping[str, str] = field(default_factory=dict)
    is_own_form: bool = False
    norm_key: str = "attention.layer_norm_rms_epsilon"
    rotates_in_part: bool = False
    has_no_rope: bool = False
    biases: Mapping[str, str] = field(default_factory=lambda: {"attention_bias": "attn_q"})
    own_keys: Mapping[str, str] = field(default_factory=dict)
    scaling_constants: Mapping[str, object] = field(default_factory=dict)
    top_names: dict[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    names_beside: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    head_parts: tuple[str, ...] = ()
    read: Callable[[Metadata, str, Values, Tensors], dict[str, Any]] | None = None
    read_parts: Callable[[Metadata, str], PartSources] | None = None
    has_extra_layers: bool = False
    has_attention_in_some: bool = False
    has_own_heads: bool = False
    read_rope: Callable[[Metadata, str, Values, Factors], dict[str, Any]] | None = None
    may_have_experts: bool = False
    layer_constants: Callable[[Metadata, str, int], dict[str, list[float]]] | None = None
    unit_head_rows: int = 0

    @property
    def rotary_dim_differs(self) -> bool:
        """True if rope.dimension_count may be another number than the length of a key."""
        return self.rotates_in_part or self.has_no_rope


def expert_names(path: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, str]:
    """Return the names of a layer whose mixture is the module ``path``; ``names`` are those of gate, up and down."""
    dense = {part: name for part, name in LAYER_NAMES.items() if not part.startswith("ffn_") or part == "ffn_norm"}
    parts = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    own = {part: f"{path}.experts.{{}}.{name}" for part, name in zip(parts, names, strict=True)}
    return {**dense, "ffn_gate_inp": f"{path}.gate", **own}


def with_dense(names: Mapping[str, str]) -> dict[str, str]:
    """Return such names with those of the feed-forward layers of dense layers."""
    return {**LAYER_NAMES, **names}


def shared_names(path: str) -> dict[str, str]:
    """Return the names of the shared experts, which are one feed-forward layer, the module ``path``."""
    return {f"ffn_{part}_shexp": f"{path}.{part}_proj" for part in ("gate", "up", "down")}
