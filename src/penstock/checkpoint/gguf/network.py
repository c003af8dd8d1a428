"""The values of config.json and the names of the tensors, from a GGUF file of an architecture that Penstock runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.architectures.architecture import TOP_NAMES, WINDOW, Architecture
from penstock.checkpoint.gguf.architectures.encoder import ENCODERS, encoder_sources, encoder_values
from penstock.checkpoint.gguf.architectures.t5 import T5_ARCHITECTURES, t5_sources, t5_values
from penstock.checkpoint.gguf.architectures.table import find_architecture
from penstock.checkpoint.gguf.architectures.values import kv_heads
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.pooling import pooling_values
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.rope import ROPE_TENSORS, rope_scaling
from penstock.checkpoint.gguf.weights import GgufSource
from penstock.config import OWN_NAMES
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["config_values", "constant_sources", "tensor_sources"]

_BARE_PARTS: Final = ("altup_correct_scale", "attn_sinks", "exp_probs_b", "ffn_gate_inp_s", "layer_output_scale")
"""Tensors whose names in a checkpoint end in neither ".weight" nor ".bias"."""
_FUSED_PART: Final = "attn_qkv"
"""The rows of q, k and v one below another, which are apart in networks without a module of this name."""
_ROW_PARTS: Final = ("ffn_gate_inp_shexp",)
"""Matrices of one row, which a file has as vectors."""
_FLAT_PARTS: Final = ("exp_probs_b",)
"""Vectors, which a file may have as matrices of one row."""
_FUSED_EXPERTS: Final = "ffn_gate_up_exps"
"""The rows of an expert's gate and up one below another."""
_EXPERT_SIZES: Final = {
    "ffn_gate_exps": ("ffn_gate_exps", 1, "expert_feed_forward_length"),
    _FUSED_EXPERTS: ("ffn_gate_exps", 2, "expert_feed_forward_length"),
    "ffn_up_exps": ("ffn_gate_exps", 1, "expert_feed_forward_length"),
    "ffn_gate_shexp": ("ffn_gate_shexp", 1, "expert_shared_feed_forward_length"),
    "ffn_up_shexp": ("ffn_gate_shexp", 1, "expert_shared_feed_forward_length"),
}
"""Tensors whose rows are the width of an expert, once or twice, and the keys that may have the width too.  The first of
them that a file has is taken; some experts have no gate."""
_EXTRA_LAYERS: Final = "nextn_predict_layers"
_MAX_LAYERS: Final = 1 << 16
_TENSOR: Final = re.compile(r"(?:blk\.(0|[1-9]\d{0,4})\.)?([a-z0-9_]+(?:\.[a-z_]+)?)\.(weight|bias|scale)")
_BLOCK: Final = re.compile(r"blk\.(0|[1-9]\d{0,4})\.")

_KNOWN_KEYS: Final = frozenset((
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "block_count", "context_length", "embedding_length", "expert_count",
    "expert_used_count", "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor", "tensor_data_layout",
    "vocab_size",
))  # fmt: skip
"""Keys of an architecture that are read.  Others may change the computation, so they are refused.

Three of them say nothing that is computed: ``rope.scaling.finetuned``, ``tensor_data_layout``, which older files have,
and ``vocab_size``, for which the rows of the embedding stand.
"""


def config_values(
    metadata: Metadata, tensors: Mapping[str, StoredTensor], rope_factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any]:
    """Return the values of config.json.  ``rope_factors``: those of ROPE_TENSORS that the file has.

    Raises UnsupportedError for an architecture or a key that Penstock does not know, InvalidFileError for a value.
    """
    name, architecture = find_architecture(metadata)
    if name in ENCODERS:
        pooling_values(metadata, name)
        return encoder_values(metadata, name, tensors)
    if name in T5_ARCHITECTURES:
        return t5_values(metadata, name, tensors)
    _check_keys(metadata, name, architecture)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        message = f"{metadata.file}: expected a matrix token_embd.weight, got none"
        raise InvalidFileError(message, param="token_embd.weight")
    hidden_size = metadata.integer(f"{name}.embedding_length", min=1)
    num_heads = metadata.integer(f"{name}.attention.head_count", min=1)
    head_dim = metadata.integer(f"{name}.attention.key_length", hidden_size // num_heads, min=1)
    _check_head_dims(metadata, name, architecture, head_dim)
    values: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(metadata, name),
        "num_hidden_layers": _num_layers(metadata, name, architecture),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(metadata, name, architecture),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{name}.context_length", min=1),
        "rms_norm_eps": metadata.number(f"{name}.{architecture.norm_key}"),
        "rope_theta": metadata.number(f"{name}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        **architecture.constants,
    }
    for own, part in architecture.biases.items():
        parts = (part, "attn_q") if part == _FUSED_PART else (part,)
        values[own] = any(f"blk.0.{name_of_part}.bias" in tensors for name_of_part in parts)
    if architecture.rotates_in_part:
        rotary_dim = metadata.integer(f"{name}.rope.dimension_count", head_dim, min=2, max=head_dim)
        values["partial_rotary_factor"] = rotary_dim / head_dim
    values |= {own: metadata.number(f"{name}.{key}") for key, own in architecture.factors.items()}
    if architecture.num_experts:
        values |= _expert_values(metadata, name, architecture, tensors)
    if architecture.is_own_form:
        values[OWN_NAMES] = True
    if window := metadata.integer(f"{name}.{WINDOW}", 0):
        values["sliding_window"] = window
    if architecture.read is not None:
        values |= architecture.read(metadata, name, values, tensors)
    values |= pooling_values(metadata, name)
    if architecture.read_rope is not None:
        values |= architecture.read_rope(metadata, name, values, rope_factors)
    elif (scaling := rope_scaling(metadata, name, values, rope_factors)) is not None:
        values["rope_scaling"] = scaling | dict(architecture.scaling_constants)
    return {architecture.own_keys.get(key, key): value for key, value in values.items()}


def _check_head_dims(metadata: Metadata, name: str, architecture: Architecture, head_dim: int) -> None:
    same = ("attention.value_length", "rope.dimension_count")[: 1 if architecture.rotary_dim_differs else 2]
    for key in () if architecture.has_own_heads else same:
        if metadata.integer(f"{name}.{key}", head_dim) != head_dim:
            raise metadata.error(f"{name}.{key}", f"{head_dim}, the length of a key")


def _num_layers(metadata: Metadata, name: str, architecture: Architecture) -> int:
    """Return the number of layers that are read."""
    stored = metadata.integer(f"{name}.block_count", min=1, max=_MAX_LAYERS)
    if not architecture.has_extra_layers:
        return stored
    return stored - metadata.integer(f"{name}.{_EXTRA_LAYERS}", 0, max=stored - 1)


def _num_kv_heads(metadata: Metadata, name: str, architecture: Architecture) -> int:
    """Return the number of heads of keys and values, the same in all layers that have attention."""
    if architecture.has_own_heads and isinstance(metadata.values.get(f"{name}.attention.head_count_kv"), np.ndarray):
        return 1  # the architecture reads those of each layer
    return max(kv_heads(metadata, name, some_without=architecture.has_attention_in_some))


def constant_sources(metadata: Metadata) -> dict[str, GgufSource]:
    """Return the parameters whose values are those of keys, by their names in a checkpoint folder."""
    name, architecture = find_architecture(metadata)
    if architecture.layer_constants is None:
        return {}
    num_layers = _num_layers(metadata, name, architecture)
    return {
        f"{architecture.layers}.{layer}.{parameter}": GgufSource("", values=(values[layer],))
        for parameter, values in architecture.layer_constants(metadata, name, num_layers).items()
        for layer in range(num_layers)
    }


def _intermediate_size(metadata: Metadata, name: str) -> int:
    """Return the width of a dense layer; files with experts in every layer may have only that of an expert."""
    key, of_expert = f"{name}.feed_forward_length", f"{name}.expert_feed_forward_length"
    if isinstance(metadata.values.get(key), np.ndarray):
        widths = metadata.integers(key, metadata.integer(f"{name}.block_count", min=1)) or []
        return max(1, *widths)
    return metadata.integer(key if key in metadata.values or of_expert not in metadata.values else of_expert, min=1)


def _check_keys(metadata: Metadata, name: str, architecture: Architecture) -> None:
    """Refuse a key of the architecture that is not read, and experts where it has none."""
    known = _KNOWN_KEYS.union(architecture.factors, architecture.keys, (architecture.norm_key,))
    if architecture.has_extra_layers:
        known |= {_EXTRA_LAYERS}
    for key in metadata.values:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in known:
            raise UnsupportedError(f"{metadata.file}: {ascii(key)[1:-1]} is not supported", param=key)
    count = metadata.integer(f"{name}.expert_count", 0)
    if count and not (architecture.num_experts or architecture.may_have_experts):
        raise UnsupportedError(
            f"{metadata.file}: {name}.expert_count: expected 0 for architecture {name}, got {count}",
            param=f"{name}.expert_count",
        )


def _expert_values(
    metadata: Metadata, name: str, architecture: Architecture, tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """Return the numbers and the widths of experts; the widths are those of the tensors."""
    widths = {}
    for stored_part, (part, share, size_key) in _EXPERT_SIZES.items():
        end = f".{stored_part}.weight"
        tensor = next((tensor for stored, tensor in tensors.items() if stored.endswith(end)), None)
        if tensor is None or len(tensor.shape) < 2 or part in widths:
            continue
        widths[part], key = tensor.shape[-2] // share, f"{name}.{size_key}"
        if metadata.integer(key, widths[part]) != widths[part]:
            raise metadata.error(key, f"{widths[part]}, the rows of {tensor.name}")
    if "ffn_gate_exps" not in widths:
        raise UnsupportedError(
            f"{metadata.file}: expected the experts of a layer in one tensor blk.0.ffn_gate_exps.weight, got none",
            param="blk.0.ffn_gate_exps.weight",
        )
    values: dict[str, Any] = {
        architecture.num_experts: metadata.integer(f"{name}.expert_count", min=1),
        "num_experts_per_tok": metadata.integer(f"{name}.expert_used_count", min=1),
        architecture.expert_size: widths["ffn_gate_exps"],
    }
    if "ffn_gate_shexp" in widths:
        values["shared_expert_intermediate_size"] = widths["ffn_gate_shexp"]
    return values


def tensor_sources(metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> dict[str, GgufSource]:
    """Return the source of each tensor by its name in a checkpoint folder.

    A tensor with an unknown name keeps it, so that the network refuses it by this name.
    """
    name, architecture = find_architecture(metadata)
    if name in ENCODERS:
        return encoder_sources(name, tensors.values())
    if name in T5_ARCHITECTURES:
        return t5_sources(tensors.values())
    num_heads = metadata.integer(f"{name}.attention.head_count", min=1)
    num_kv_heads = _num_kv_heads(metadata, name, architecture)
    apart = architecture.read_parts and architecture.read_parts(metadata, name)
    num_layers = _num_layers(metadata, name, architecture)
    naming = _Naming(architecture, tensors, num_heads, num_kv_heads, metadata.file)
    sources: dict[str, GgufSource] = {}
    for tensor in tensors.values():
        if tensor.name in ROPE_TENSORS:
            continue
        place = _BLOCK.match(tensor.name)
        if place and architecture.has_extra_layers and int(place[1]) >= num_layers:
            continue  # predicts further tokens
        if place and apart and (own := apart(tensor, tensor.name[place.end() :])) is not None:
            path = f"{architecture.layers}.{place[1]}"
            sources |= {f"{path}.{parameter}": source for parameter, source in own.items()}
            continue
        sources |= naming.sources(tensor)
    return sources


class _Naming:
    """The names in a checkpoint folder of the tensors of a file."""

    def __init__(
        self,
        architecture: Architecture,
        tensors: Mapping[str, StoredTensor],
        num_heads: int,
        num_kv_heads: int,
        file: str,
    ) -> None:
        self._architecture, self._file = architecture, file
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        self._shares = (num_heads, num_kv_heads, num_kv_heads)
        self._layer_names = dict(architecture.layer_names)
        for part, names in architecture.names_beside.items():
            if f"blk.0.{part}.weight" in tensors:
                self._layer_names |= names

    def sources(self, tensor: StoredTensor) -> dict[str, GgufSource]:
        """Return the parameters that come from a tensor; {} for one of the pooling head or of another's source."""
        architecture, match = self._architecture, _TENSOR.fullmatch(tensor.name)
        layer, part, kind = match.groups() if match else (None, "", "")
        if kind == "scale":
            part = f"{part}_s"
        if part in (architecture.head_parts if layer is None else architecture.alternates.values()):
            return {}
        prefix = "" if layer is None else f"{architecture.layers}.{layer}."
        if layer is not None and part == _FUSED_PART and part not in self._layer_names:
            return {f"{prefix}{own}.{kind}": source for own, source in self._apart(tensor).items()}
        if layer is not None and part == _FUSED_EXPERTS and part not in self._layer_names:
            return self._experts_apart(prefix, tensor, kind)
        pair_heads = self._heads.get(part, 0) if architecture.has_pairs and layer is not None else 0
        if pair_heads and tensor.shape[0] % (2 * pair_heads):
            raise InvalidFileError(
                f"{self._file}: tensor {tensor.name}: expected rows of {pair_heads} heads with an even length, "
                f"got {tensor.shape[0]}",
                param=tensor.name,
            )
        own_name = (TOP_NAMES | architecture.top_names if layer is None else self._layer_names).get(part)
        if own_name is None:
            return {tensor.name: GgufSource(tensor.name)}
        other = architecture.alternates.get(part)
        if part == "output" and layer is None and tensor.shape[0] == architecture.unit_head_rows:
            return {f"{own_name}.{kind}": GgufSource(tensor.name, is_unit=True)}
        source = GgufSource(
            tensor.name,
            pair_heads,
            alternate="" if other is None else f"blk.{layer}.{other}.{kind}",
            is_row=part in _ROW_PARTS,
            is_flat=part in _FLAT_PARTS,
        )
        return _named(f"{prefix}{own_name}", "" if part in _BARE_PARTS else f".{kind}", tensor, source)

    def _apart(self, tensor: StoredTensor) -> dict[str, GgufSource]:
        """Return the sources of q, k and v, whose rows a tensor has one below another."""
        total = sum(self._shares)
        if tensor.shape[0] % total:
            raise InvalidFileError(
                f"{self._file}: tensor {tensor.name}: expected rows of {total} heads of q, k and v, got "
                f"{tensor.shape[0]}",
                param=tensor.name,
            )
        ends = [0, *(end * (tensor.shape[0] // total) for end in accumulate(self._shares))]
        names = [self._layer_names[part] for part in ("attn_q", "attn_k", "attn_v")]
        return {name: GgufSource(tensor.name, rows=(rows,)) for name, rows in zip(names, pairwise(ends), strict=True)}

    def _experts_apart(self, prefix: str, tensor: StoredTensor, kind: str) -> dict[str, GgufSource]:
        """Return the sources of gate and up of the experts, whose rows a tensor has one below another."""
        if len(tensor.shape) != 3 or tensor.shape[1] % 2:
            raise InvalidFileError(
                f"{self._file}: tensor {tensor.name}: expected matrices with an even number of rows, got the shape "
                f"{list(tensor.shape)}",
                param=tensor.name,
            )
        half = tensor.shape[1] // 2
        result: dict[str, GgufSource] = {}
        for part, rows in (("ffn_gate_exps", (0, half)), ("ffn_up_exps", (half, 2 * half))):
            source = GgufSource(tensor.name, rows=(rows,))
            result |= _named(f"{prefix}{self._layer_names[part]}", f".{kind}", tensor, source)
        return result


def _named(name: str, end: str, tensor: StoredTensor, source: GgufSource) -> dict[str, GgufSource]:
    """Return a tensor by its name in a checkpoint folder, or the matrices of experts by theirs."""
    if "{}" not in name:
        return {f"{name}{end}": source}
    if len(tensor.shape) != 3:
        return {f"{name.replace('{}.', '')}{end}": source}
    return {f"{name.format(index)}{end}": replace(source, index=index) for index in range(tensor.shape[0])}
