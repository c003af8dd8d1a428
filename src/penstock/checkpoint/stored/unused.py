"""The stored tensors that change nothing: writers add them, and no network needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import FLOATS, to_float32
from penstock.checkpoint.tensor_file import TensorInfo

__all__ = ["unused_tensors", "zero_biases"]

_BUFFERS: Final = (
    "*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached", "*.rotary_pos_emb.inv_freq",
    "*.position_ids", "*.masked_bias", "*._extra_state",
)  # fmt: skip
"""Buffers that a layer computes from the configuration, or keeps for training."""

_CACHE_SCALES: Final = (
    "*.k_scale", "*.v_scale", "*.kv_scale", "*.q_scale", "*.prob_scale", "*.k_zero_point", "*.v_zero_point",
    "*.k_proj.output_scale", "*.v_proj.output_scale", "*.q_proj.output_scale", "*.qkv_proj.output_scale",
    "*.k_proj.output_zero_point", "*.v_proj.output_zero_point", "*.prob_output_scale",
)  # fmt: skip
"""The scales of keys and values in 8-bit floats, as vLLM names them: keys and values have scales of their own here."""

_VALUE_HEADS: Final = ("v_head.*", "value_head.*")
"""The head that estimates rewards while a language model is trained."""


def unused_tensors(names: Iterable[str]) -> set[str]:
    """Return those of ``names`` that change nothing, whatever their values are."""
    patterns = (*_BUFFERS, *_CACHE_SCALES, *_VALUE_HEADS)
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def zero_biases(
    tensors: Mapping[str, TensorInfo], unread: Iterable[str], read: Callable[[str], NDArray[Any]]
) -> set[str]:
    """Return those of the tensors ``unread`` that are biases of zeros, which AutoGPTQ adds to every layer."""
    return {
        name
        for name in unread
        if name.endswith(".bias")
        and (info := tensors.get(name)) is not None
        and len(info.shape) == 1
        and info.dtype in FLOATS
        and not np.any(to_float32(read(name), info.dtype))
    }
