"""Granite's hybrids in GGUF files (``granitehybrid``): sizes of Mamba-2, and where its parameters come from.

The forms are those of llama.cpp's converter (conversion/granite.py and mamba.py).  ``ssm_in`` has the rows of z, of the
channels and of the steps one below another.  ``ssm_a`` is -exp(A_log).  ``ssm_a``, ``ssm_d`` and ``ssm_norm`` are
matrices in the file.  Layers without heads of keys and values have Mamba-2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.checkpoint.gguf.architectures.architecture import PartSources, Tensors, Values
from penstock.checkpoint.gguf.architectures.values import kv_heads
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.weights import Source
from penstock.errors import InvalidFileError

__all__ = ["MAMBA_KEYS", "MambaSizes", "mamba_parts", "mamba_values"]

MAMBA_KEYS: Final = ("ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
_MAX_HEADS: Final = 4096


@dataclass(frozen=True)
class MambaSizes:
    """The heads of a Mamba-2 layer and their sizes; ``width`` is the number of channels of all heads."""

    heads: int
    width: int
    groups: int
    state_dim: int

    @classmethod
    def read(cls, metadata: Metadata, name: str) -> MambaSizes:
        """Read the sizes of architecture ``name``; InvalidFileError names a key."""
        heads = metadata.integer(f"{name}.ssm.time_step_rank", min=1, max=_MAX_HEADS)
        width = metadata.integer(f"{name}.ssm.inner_size", min=1)
        hidden_size = metadata.integer(f"{name}.embedding_length", min=1)
        if width % heads or width % hidden_size:
            raise metadata.error(f"{name}.ssm.inner_size", f"a multiple of {heads} heads and of {hidden_size}")
        return cls(
            heads=heads,
            width=width,
            groups=metadata.integer(f"{name}.ssm.group_count", min=1, max=_MAX_HEADS),
            state_dim=metadata.integer(f"{name}.ssm.state_size", min=1),
        )

    @property
    def channels(self) -> int:
        """The inputs of the convolution: those of the heads, and two rows of the state for each group."""
        return self.width + 2 * self.groups * self.state_dim


def mamba_values(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the values of config.json that only these architectures have."""
    counts = kv_heads(metadata, name, some_without=True)
    sizes, num_layers = MambaSizes.read(metadata, name), metadata.integer(f"{name}.block_count", min=1)
    if len(counts) != num_layers:
        raise metadata.error(f"{name}.attention.head_count_kv", f"an array of {num_layers} integers")
    first = counts.index(0) if 0 in counts else 0
    shared = next(
        (tensors[part] for part in ("blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate.weight") if part in tensors), None
    )
    if shared is None or len(shared.shape) != 2:
        raise InvalidFileError(
            f"{metadata.file}: expected a matrix blk.0.ffn_gate.weight or blk.0.ffn_gate_shexp.weight"
        )
    return {
        "layer_types": ["attention" if count else "mamba" for count in counts],
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.width // sizes.heads,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_dim,
        "mamba_d_conv": metadata.integer(f"{name}.ssm.conv_kernel", min=1),
        "mamba_expand": sizes.width // metadata.integer(f"{name}.embedding_length", min=1),
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in tensors,
        "shared_intermediate_size": shared.shape[0],
        "position_embedding_type": "rope" if metadata.flag(f"{name}.rope.scaling.finetuned", True) else "nope",
    }


def mamba_parts(metadata: Metadata, name: str) -> PartSources:
    """Return what finds the parameters that come from parts of a tensor."""
    sizes = MambaSizes.read(metadata, name)
    return lambda tensor, part: _sources(sizes, tensor, part, metadata.file)


def _sources(sizes: MambaSizes, tensor: StoredTensor, part: str, file: str) -> dict[str, Source] | None:
    """Return the parameters of a layer that come from parts of a tensor; None for a tensor in the usual form.

    ``part`` is its name without that of the layer.  Raises InvalidFileError for a tensor without all rows.
    """
    ends = (0, sizes.width, sizes.width + sizes.channels, sizes.width + sizes.channels + sizes.heads)
    table = {
        "ssm_in.weight": {
            f"mamba.in_proj_{own}.weight": Source("", rows=((start, stop),))
            for own, start, stop in zip(("z", "x", "dt"), ends, ends[1:], strict=False)
        },
        "ssm_dt.bias": {"mamba.dt_bias": Source("")},
        "ssm_a": {"mamba.A_log": Source("", is_log=True, is_flat=True)},
        "ssm_d": {"mamba.D": Source("", is_flat=True)},
        "ssm_norm.weight": {"mamba.norm.weight": Source("", is_flat=True)},
    }.get(part)
    if table is None:
        return None
    if part == "ssm_in.weight" and (len(tensor.shape) != 2 or tensor.shape[0] != ends[-1]):
        raise InvalidFileError(
            f"{file}: tensor {tensor.name}: expected {ends[-1]} rows, found the shape {list(tensor.shape)}"
        )
    return {name: replace(source, name=tensor.name) for name, source in table.items()}
