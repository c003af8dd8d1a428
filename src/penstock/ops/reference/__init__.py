"""The reference of every op in plain PyTorch: its specification, its fallback, and the oracle of its tests.

The function named ``x`` is the reference of op ``x``, with the arguments of its schema.  References compute in float64,
except where the contract (docs/explanation/numerics.md) makes float32 part of the op, and return float32.  They are
written for clarity, not for speed.
"""

from penstock.ops.pages import PREFIX_ELEMENTS, state_elements
from penstock.ops.reference import elementwise
from penstock.ops.reference.attention import (
    attention,
    disentangled_attention,
    kv_append,
    relative_attention,
    short_conv,
    sink_attention,
)
from penstock.ops.reference.collectives import (
    all_gather,
    all_gather_rounded,
    barrier,
    broadcast,
    context_attention,
    recv,
    send,
    sharded_embedding,
)
from penstock.ops.reference.elementwise import *  # noqa: F403 - a new op stands in that file only
from penstock.ops.reference.experts import combine, expert_linear, head_linear, route
from penstock.ops.reference.latent import latent_append, latent_attention
from penstock.ops.reference.linear import embedding, linear, round_rows
from penstock.ops.reference.norm import add_rms_norm, layer_norm, rms_norm
from penstock.ops.reference.packing import layout_of_tensor, shape_packed, unpack_weight
from penstock.ops.reference.prefix import prefix_lengths, prefix_positions
from penstock.ops.reference.recurrent import gated_delta, gated_delta_tiled, ssm_scan
from penstock.ops.reference.rope import rope, rotary_embedding

__all__ = [
    "PREFIX_ELEMENTS",
    "add_rms_norm",
    "all_gather",
    "all_gather_rounded",
    "attention",
    "barrier",
    "broadcast",
    "combine",
    "context_attention",
    "disentangled_attention",
    "embedding",
    "expert_linear",
    "gated_delta",
    "gated_delta_tiled",
    "head_linear",
    "kv_append",
    "latent_append",
    "latent_attention",
    "layer_norm",
    "layout_of_tensor",
    "linear",
    "prefix_lengths",
    "prefix_positions",
    "recv",
    "relative_attention",
    "rms_norm",
    "rope",
    "rotary_embedding",
    "round_rows",
    "route",
    "send",
    "shape_packed",
    "sharded_embedding",
    "short_conv",
    "sink_attention",
    "ssm_scan",
    "state_elements",
    "unpack_weight",
]
__all__ += elementwise.__all__
