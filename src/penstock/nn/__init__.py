"""The layers that networks are written with.  Every layer uses only ops of the table, so that it can be captured.

It knows no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.nn.activation import (
    clamp,
    clamped_swiglu,
    elu,
    gaussian_topk,
    gelu,
    match_rms,
    relu,
    relu_squared,
    scale,
    scale_channels,
    sigmoid_mul,
    silu_mul,
    softcap,
)
from penstock.nn.attention import Attention, PagedLayer, PageGroup, allocate_states, assign_page_groups, paged_layers
from penstock.nn.base import nn
from penstock.nn.batch import Batch, gather_rows
from penstock.nn.conv import ShortConv
from penstock.nn.embedding import Embedding, LMHead, OutputRows, VocabParallelEmbedding
from penstock.nn.experts import ExpertLinear, Router, Routing, combine, route, sigmoid_gate
from penstock.nn.latent import HeadLinear, LatentAttention
from penstock.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear
from penstock.nn.module import Module
from penstock.nn.norm import BareRMSNorm, LayerNorm, RMSNorm
from penstock.nn.recurrent import ConvWeight, GatedDelta, SsmScan
from penstock.nn.relative import (
    DisentangledAttention,
    DistanceBias,
    PrefixLengths,
    RelativeAttention,
    TokenShift,
    prefix_positions,
)
from penstock.nn.rope import RotaryEmbedding, apply_rope
from penstock.nn.training import make_trainable, training_batch

if TYPE_CHECKING:
    from penstock.nn.packing import SharedMatrix, load_weights, pack_network, shared_matrices

__all__ = [
    "Attention",
    "BareRMSNorm",
    "Batch",
    "ColumnParallelLinear",
    "ConvWeight",
    "DisentangledAttention",
    "DistanceBias",
    "Embedding",
    "ExpertLinear",
    "GatedDelta",
    "HeadLinear",
    "LMHead",
    "LatentAttention",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "OutputRows",
    "PageGroup",
    "PagedLayer",
    "PrefixLengths",
    "RMSNorm",
    "RelativeAttention",
    "RotaryEmbedding",
    "Router",
    "Routing",
    "RowParallelLinear",
    "SharedMatrix",
    "ShortConv",
    "SsmScan",
    "TokenShift",
    "VocabParallelEmbedding",
    "allocate_states",
    "apply_rope",
    "assign_page_groups",
    "clamp",
    "clamped_swiglu",
    "combine",
    "elu",
    "gather_rows",
    "gaussian_topk",
    "gelu",
    "load_weights",
    "make_trainable",
    "match_rms",
    "pack_network",
    "paged_layers",
    "prefix_positions",
    "relu",
    "relu_squared",
    "route",
    "scale",
    "scale_channels",
    "shared_matrices",
    "sigmoid_gate",
    "sigmoid_mul",
    "silu_mul",
    "softcap",
    "training_batch",
]

ModuleList = nn.ModuleList
_PACKING = ("SharedMatrix", "load_weights", "pack_network", "shared_matrices")


def __getattr__(name: str) -> Any:
    if name in _PACKING:  # of eager mode: it imports PyTorch
        try:
            from penstock.nn import packing
        except ModuleNotFoundError as error:
            from penstock.extras import without_torch

            raise without_torch(f"penstock.nn.{name}", error) from None

        return getattr(packing, name)
    raise AttributeError(f"module 'penstock.nn' has no attribute {name!r:.60}")
