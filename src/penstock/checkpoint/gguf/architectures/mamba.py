"""Mamba-2 in GGUF files: its sizes, and where its parameters come from.

The forms are those of llama.cpp's converter (conversion/granite.py, falcon_h1.py, nemotron.py and mamba.py).
``ssm_in`` has the rows of z, of the channels and of the steps one below another.  ``ssm_a`` is -exp(A_log).  ``ssm_a``,
``ssm_d`` and ``ssm_norm`` are matrices in the file.  In ``granitehybrid`` layers without heads of keys and values have
Mamba-2; in ``nemotron_h`` they have Mamba-2 or a feed-forward layer.  The factors of ``falcon-h1`` are in its matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.checkpoint.gguf.architectures.architecture import PartSources, Tensors, Values
from penstock.checkpoint.gguf.architectures.routing import SIGMOID, check_gating, routing_values
from penstock.checkpoint.gguf.architectures.values import kv_heads
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.weights import GgufSource
from penstock.errors import InvalidFileError

__all__ = [
    "MAMBA_KEYS", "MambaSizes", "bamba_values", "falcon_parts", "falcon_values", "mamba_parts", "mamba_values",
    "nemotron_moe_values", "nemotron_parts", "nemotron_values",
]  # fmt: skip

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
        if width % heads:
            raise metadata.error(f"{name}.ssm.inner_size", f"a multiple of {heads} heads")
        return cls(
            heads=heads,
            width=width,
            groups=metadata.integer(f"{name}.ssm.group_count", min=1, max=_MAX_HEADS),
            state_dim=metadata.integer(f"{name}.ssm.state_size", min=1),
        )

    @property
    def channels(self) -> int:
        """The number of channels of the convolution: x of all heads, and B and C of each group."""
        return self.width + 2 * self.groups * self.state_dim


def mamba_values(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the values of config.json that only these architectures have."""
    counts = kv_heads(metadata, name, some_without=True)
    sizes, num_layers = MambaSizes.read(metadata, name), metadata.integer(f"{name}.block_count", min=1)
    if len(counts) != num_layers:
        raise metadata.error(f"{name}.attention.head_count_kv", f"an array of {num_layers} integers")
    if sizes.width % values["hidden_size"]:
        raise metadata.error(
            f"{name}.ssm.inner_size", f"a multiple of {sizes.heads} heads and of {values['hidden_size']}"
        )
    first = counts.index(0) if 0 in counts else 0
    shared = next(
        (tensors[part] for part in ("blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate.weight") if part in tensors), None
    )
    if shared is None or len(shared.shape) != 2:
        raise InvalidFileError(
            f"{metadata.file}: expected a matrix blk.0.ffn_gate.weight or blk.0.ffn_gate_shexp.weight",
            param="blk.0.ffn_gate.weight",
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


def bamba_values(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the values of Bamba, whose files have the architecture of Granite's hybrids."""
    own = mamba_values(metadata, name, values, tensors)
    kinds = own.pop("layer_types")
    return own | {"attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind == "attention"]}


def falcon_values(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the values of Falcon H1, whose factors are 1 because the matrices have them."""
    sizes = MambaSizes.read(metadata, name)
    return {
        "mamba_d_ssm": sizes.width,
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.width // sizes.heads,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_dim,
        "mamba_d_conv": metadata.integer(f"{name}.ssm.conv_kernel", min=1),
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
        "mamba_norm_before_gate": False,
    }


def nemotron_values(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the values of Nemotron H: the kinds of layers, and the sizes of Mamba-2."""
    sizes, num_layers = MambaSizes.read(metadata, name), metadata.integer(f"{name}.block_count", min=1)
    counts = metadata.integers(f"{name}.attention.head_count_kv", num_layers)
    widths = metadata.integers(f"{name}.feed_forward_length", num_layers)
    if counts is None or widths is None:
        key = f"{name}.{'attention.head_count_kv' if counts is None else 'feed_forward_length'}"
        raise metadata.error(key, f"an array of {num_layers} integers")
    rest = "moe" if "expert_count" in {key.removeprefix(f"{name}.") for key in metadata.values} else "mlp"
    kinds = ["attention" if count else rest if width else "mamba" for count, width in zip(counts, widths, strict=True)][
        : values["num_hidden_layers"]
    ]
    eps = f"{name}.attention.layer_norm_rms_epsilon"
    return {
        **({"rms_norm_eps": metadata.number(eps)} if eps in metadata.values else {}),
        "layers_block_type": kinds,
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.width // sizes.heads,
        "n_groups": sizes.groups,
        "ssm_state_size": sizes.state_dim,
        "conv_kernel": metadata.integer(f"{name}.ssm.conv_kernel", min=1),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
        "mlp_bias": any(name.endswith(("ffn_up.bias", "ffn_up_shexp.bias")) for name in tensors),
    }


def nemotron_moe_values(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the same with those of experts."""
    check_gating(metadata, name, SIGMOID)
    shared = {**values, "moe_intermediate_size": values["shared_expert_intermediate_size"]}
    routing = routing_values(metadata, name, shared)
    latent, key = values["hidden_size"], f"{name}.moe_latent_size"
    return {
        **routing,
        **nemotron_values(metadata, name, values, tensors),
        "moe_latent_size": metadata.integer(key, latent, min=1),
    }


def mamba_parts(metadata: Metadata, name: str) -> PartSources:
    """Return what finds the parameters that come from parts of a tensor."""
    sizes = MambaSizes.read(metadata, name)
    return lambda tensor, part: _sources(sizes, tensor, part, metadata.file)


def falcon_parts(metadata: Metadata, name: str) -> PartSources:
    """Return the same, with the name that the norm of the feed-forward layer has without an end."""
    mamba = mamba_parts(metadata, name)

    def sources(tensor: StoredTensor, part: str) -> dict[str, GgufSource] | None:
        if part in ("ffn_norm", "ffn_norm.weight"):
            return {"pre_ff_layernorm.weight": GgufSource(tensor.name)}
        return mamba(tensor, part)

    return sources


def nemotron_parts(metadata: Metadata, name: str) -> PartSources:
    """Return the same for a layer whose Mamba-2 is called mixer."""
    mamba = mamba_parts(metadata, name)

    def sources(tensor: StoredTensor, part: str) -> dict[str, GgufSource] | None:
        mixer = mamba(tensor, part)
        return mixer and {f"mixer.{own.removeprefix('mamba.')}": source for own, source in mixer.items()}

    return sources


def _sources(sizes: MambaSizes, tensor: StoredTensor, part: str, file: str) -> dict[str, GgufSource] | None:
    """Return the parameters of a layer that come from parts of a tensor; None for a tensor in the usual form.

    ``part`` is its name without that of the layer.  Raises InvalidFileError for a tensor without all rows.
    """
    ends = (0, sizes.width, sizes.width + sizes.channels, sizes.width + sizes.channels + sizes.heads)
    table = {
        "ssm_in.weight": {
            f"mamba.in_proj_{own}.weight": GgufSource("", rows=((start, stop),))
            for own, start, stop in zip(("z", "x", "dt"), ends, ends[1:], strict=False)
        },
        "ssm_dt.bias": {"mamba.dt_bias": GgufSource("")},
        "ssm_a": {"mamba.A_log": GgufSource("", is_log=True, is_flat=True)},
        "ssm_d": {"mamba.D": GgufSource("", is_flat=True)},
        "ssm_norm.weight": {"mamba.norm.weight": GgufSource("", is_flat=True)},
    }.get(part)
    if table is None:
        return None
    if part == "ssm_in.weight" and (len(tensor.shape) != 2 or tensor.shape[0] != ends[-1]):
        raise InvalidFileError(
            f"{file}: tensor {tensor.name}: expected {ends[-1]} rows, got the shape {list(tensor.shape)}",
            param=tensor.name,
        )
    return {name: replace(source, name=tensor.name) for name, source in table.items()}
