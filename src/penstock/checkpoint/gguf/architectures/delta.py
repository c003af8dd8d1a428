"""Qwen's hybrids in GGUF files (``qwen3next``, ``qwen35``, ``qwen35moe``): sizes, and where the parameters come from.

The forms are those of llama.cpp's converter (conversion/qwen.py).  ``attn_qkv`` has queries, keys and values one above
another, ``attn_gate`` the gates z, and ``ssm_in``, of older files, both per key head, as the checkpoint.  ``ssm_ba``
has b and a of the value heads of a key head together.  ``ssm_a`` is -exp(A_log).  In ``qwen35`` and ``qwen35moe`` the
value heads are in tiled order: the first of every key head, then the second of every one.  Rows get the
checkpoint's order.  The columns of ``ssm_out`` keep theirs, as a block has those of several heads: the gated delta rule
writes its result in tiled order, and the rows of ``attn_gate`` keep it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np

from penstock.checkpoint.gguf.architectures.architecture import PartSources, Tensors, Values
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.weights import GgufSource
from penstock.errors import InvalidFileError

__all__ = ["DELTA_KEYS", "DELTA_NAMES", "DeltaSizes", "delta_parts", "delta_values"]

DELTA_KEYS: Final = (
    "attention.recurrent_layers", "full_attention_interval", "rope.dimension_sections",
    "ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank",
)  # fmt: skip
"""Keys that these architectures have beside those of others.  The sections divide a position in three parts, which are
equal for text."""
DELTA_NAMES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_norm": "linear_attn.norm",
}
"""Modules of a layer, in addition to those of ``delta_parts``."""
_MAX_LAYERS: Final = 1 << 16
_MAX_HEADS: Final = 4096
"""Limit on the numbers of heads, for each of which the sources have a range of rows."""
_TILED: Final = ("qwen35", "qwen35moe")
_Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DeltaSizes:
    """The heads of a delta layer and their sizes.  ``tiled``: the file has the value heads in tiled order."""

    num_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool

    @classmethod
    def read(cls, metadata: Metadata, name: str) -> DeltaSizes:
        """Read the sizes of architecture ``name``; InvalidFileError names a key."""
        num_heads = metadata.integer(f"{name}.attention.head_count", min=1, max=_MAX_HEADS)
        key_heads = metadata.integer(f"{name}.ssm.group_count", min=1, max=_MAX_HEADS)
        value_heads = metadata.integer(f"{name}.ssm.time_step_rank", min=1, max=_MAX_HEADS)
        inner = metadata.integer(f"{name}.ssm.inner_size", min=1)
        if value_heads % key_heads:
            raise metadata.error(f"{name}.ssm.time_step_rank", f"a multiple of {key_heads}, the number of key heads")
        if inner % value_heads:
            raise metadata.error(f"{name}.ssm.inner_size", f"a multiple of {value_heads}, the number of value heads")
        return cls(
            num_heads=num_heads,
            head_dim=metadata.integer(f"{name}.attention.key_length", min=1),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=metadata.integer(f"{name}.ssm.state_size", min=1),
            value_dim=inner // value_heads,
            tiled=name in _TILED and value_heads > key_heads,
        )

    def values(self, start: int, size: int) -> _Ranges:
        """Return where the value heads are in the checkpoint's order, ``size`` rows each from ``start`` on."""
        if not self.tiled:
            return ((start, start + self.value_heads * size),)
        shared = self.value_heads // self.key_heads
        places = [which * self.key_heads + key for key in range(self.key_heads) for which in range(shared)]
        return tuple((start + place * size, start + (place + 1) * size) for place in places)

    def groups(self, sizes: tuple[int, ...]) -> list[_Ranges]:
        """Return the rows of each part of a tensor that has, for each key head, ``sizes`` rows of its parts."""
        return [
            tuple((key * sum(sizes) + start, key * sum(sizes) + start + size) for key in range(self.key_heads))
            for start, size in zip((sum(sizes[:part]) for part in range(len(sizes))), sizes, strict=True)
        ]


def delta_values(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the values of config.json that only these architectures have."""
    sizes = DeltaSizes.read(metadata, name)
    stored_layers = metadata.integer(f"{name}.block_count", min=1, max=_MAX_LAYERS)
    num_layers = values["num_hidden_layers"]
    return {
        **_layer_kinds(metadata, f"{name}.attention.recurrent_layers", stored_layers, num_layers),
        "full_attention_interval": metadata.integer(f"{name}.full_attention_interval", 4, min=1),
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": metadata.integer(f"{name}.ssm.conv_kernel", min=1),
        **({"linear_value_heads_tiled": True} if sizes.tiled else {}),
    }


def _layer_kinds(metadata: Metadata, key: str, stored_layers: int, num_layers: int) -> dict[str, Any]:
    """Return the kind of each layer that is read, from an array with a boolean for each stored one; {} without it."""
    recurrent = metadata.values.get(key)
    if recurrent is None:
        return {}
    if not isinstance(recurrent, np.ndarray) or recurrent.dtype.kind != "b" or len(recurrent) != stored_layers:
        raise metadata.error(key, f"an array of {stored_layers} booleans")
    kinds = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent.tolist()]
    return {"layer_types": kinds[:num_layers]}


def delta_parts(metadata: Metadata, name: str) -> PartSources:
    """Return what finds the parameters that come from parts of a tensor."""
    sizes = DeltaSizes.read(metadata, name)
    return lambda tensor, part: _sources(sizes, tensor, part, metadata.file)


def _sources(sizes: DeltaSizes, tensor: StoredTensor, part: str, file: str) -> dict[str, GgufSource] | None:
    """Return the parameters of a layer that come from parts of a tensor; None for a tensor in the usual form.

    ``part`` is its name without that of the layer.  Raises InvalidFileError for a tensor without the rows of all heads.
    """
    table = _tables(sizes).get(part)
    if table is None:
        return None
    for source in table.values():
        if source.rows and (not tensor.shape or tensor.shape[0] != _num_rows(sizes, part)):
            raise InvalidFileError(
                f"{file}: tensor {tensor.name}: expected {_num_rows(sizes, part)} rows, "
                f"got the shape {list(tensor.shape)}",
                param=tensor.name,
            )
    return {name: replace(source, name=tensor.name) for name, source in table.items()}


def _num_rows(sizes: DeltaSizes, part: str) -> int:
    """Return the number of rows that the parameters of ``part`` have together."""
    return sum(stop - start for source in _tables(sizes)[part].values() for start, stop in source.rows)


@cache
def _tables(sizes: DeltaSizes) -> Mapping[str, dict[str, GgufSource]]:
    """Return the sources by part, without the name of the tensor."""
    keys, dim = sizes.key_heads * sizes.key_dim, sizes.head_dim
    channels = ((0, 2 * keys), *sizes.values(2 * keys, sizes.value_dim))
    queries = tuple((head * 2 * dim, head * 2 * dim + dim) for head in range(sizes.num_heads))
    gates = tuple((stop, stop + dim) for _, stop in queries)
    shared = sizes.value_heads // sizes.key_heads
    q, k, v, z = sizes.groups((sizes.key_dim, sizes.key_dim, shared * sizes.value_dim, shared * sizes.value_dim))
    b, a = sizes.groups((shared, shared))
    heads = sizes.values(0, 1)
    layer = "linear_attn"
    return {
        "attn_q.weight": {
            "self_attn.q_proj.weight": GgufSource("", rows=queries),
            "self_attn.gate_proj.weight": GgufSource("", rows=gates),
        },
        "attn_qkv.weight": {f"{layer}.in_proj_qkv.weight": GgufSource("", rows=channels)},
        "attn_gate.weight": {f"{layer}.in_proj_z.weight": GgufSource("")},
        "ssm_in.weight": {
            f"{layer}.in_proj_qkv.weight": GgufSource("", rows=q + k + v),
            f"{layer}.in_proj_z.weight": GgufSource("", rows=z),
        },
        "ssm_ba.weight": {
            f"{layer}.in_proj_b.weight": GgufSource("", rows=b),
            f"{layer}.in_proj_a.weight": GgufSource("", rows=a),
        },
        "ssm_beta.weight": {f"{layer}.in_proj_b.weight": GgufSource("", rows=heads)},
        "ssm_alpha.weight": {f"{layer}.in_proj_a.weight": GgufSource("", rows=heads)},
        "ssm_conv1d.weight": {f"{layer}.conv1d.weight": GgufSource("", rows=channels)},
        "ssm_dt.bias": {f"{layer}.dt_bias": GgufSource("", rows=heads)},
        "ssm_a": {f"{layer}.A_log": GgufSource("", rows=heads, is_log=True)},
        "ssm_out.weight": {f"{layer}.out_proj.weight": GgufSource("")},
    }
