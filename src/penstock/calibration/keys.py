"""Smoothing of keys for KV pages of int8 (SmoothAttention of QServe, Lin et al., arXiv 2405.04532).

A key has one scale for all its dimensions.  The pairs of dimensions that rotary embedding turns are divided by the
root of their largest length, and those of the queries of the same KV head are multiplied by it: the rows, and the
biases, of ``k`` and ``q``.  Factors are powers of two, so scores keep their bits.  A pair keeps its length when it is
turned, which makes the keys before rotary embedding enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.calibration.collect import CalibrationProgram, LinearNode
from penstock.calibration.smooth import Smoothing, centred_exponents
from penstock.checkpoint.float_types import to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import UnsupportedError

__all__ = ["FAMILIES", "check_family", "smooth_keys"]

FAMILIES: Final = ("llama", "mistral", "qwen2")
"""Families whose queries and keys have rows of their own, no norm, and pairs (i, i + half) over the whole head."""


def check_family(checkpoint: Checkpoint) -> None:
    """Refuse a family whose keys cannot be smoothed by rows; UnsupportedError (``smooth_keys``)."""
    family = checkpoint.config.values.get("model_type")
    if family not in FAMILIES or checkpoint.config.values.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedError(
            f"smooth_keys: expected a model of {', '.join(FAMILIES)} with rotary embedding of whole heads, got "
            f"{family!r:.60}",
            param="smooth_keys",
        )


@dataclass(frozen=True)
class _Keys:
    """The rows that make the keys of a layer: ``prefix`` is the name of its attention."""

    prefix: str
    linear: LinearNode
    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    lengths: NDArray[np.float32]


def smooth_keys(
    checkpoint: Checkpoint, program: CalibrationProgram, smoothing: Smoothing, on_step: Callable[[int], None]
) -> Smoothing:
    """Return ``smoothing`` with the factors of queries and keys, from the keys of the calibration inputs."""
    config = checkpoint.config
    heads = config.int("num_attention_heads", min=1)
    kv_heads = config.int("num_key_value_heads", heads, min=1)
    layers = _layers(checkpoint, program, kv_heads)
    for inputs in program.inputs([own.linear for own in layers], on_step):
        for own in layers:
            keys = inputs[own.linear] @ own.weight.T
            keys = keys if own.bias is None else keys + own.bias
            pairs = keys.reshape(len(keys), kv_heads, 2, -1)
            np.maximum(own.lengths, np.hypot(pairs[:, :, 0], pairs[:, :, 1]).max(axis=0), out=own.lengths)
    rows = dict(smoothing.rows)
    for own in layers:
        exponents = np.stack([_exponents(lengths) for lengths in own.lengths])
        of_keys = np.repeat(exponents[:, None], 2, axis=1).reshape(kv_heads, -1)
        of_queries = np.repeat(-of_keys, heads // kv_heads, axis=0)
        for layer, factors in (("k_proj", of_keys), ("q_proj", of_queries)):
            for part in ("weight", "bias"):
                if (name := f"{own.prefix}{layer}.{part}") in checkpoint.tensors:
                    rows[name] = np.ascontiguousarray(factors.reshape(-1), np.int32)
    return Smoothing(smoothing.columns, rows)


def _layers(checkpoint: Checkpoint, program: CalibrationProgram, kv_heads: int) -> list[_Keys]:
    found = []
    for linear in program.linears:
        name = next((name for name in linear.names if name.endswith("self_attn.k_proj.weight")), None)
        if name is not None:
            bias = name.removesuffix("weight") + "bias"
            weight = _floats(checkpoint, name)
            lengths = np.zeros((kv_heads, len(weight) // kv_heads // 2), np.float32)
            own_bias = _floats(checkpoint, bias) if bias in checkpoint.tensors else None
            found.append(_Keys(name.removesuffix("k_proj.weight"), linear, weight, own_bias, lengths))
    return found


def _floats(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    values = np.array(to_float32(checkpoint.read(name), checkpoint.tensors[name].dtype))
    checkpoint.release(name)
    return values


def _exponents(lengths: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return the exponents of the factors of the pairs of a head; zeros for one without keys."""
    is_used = (lengths > 0) & np.isfinite(lengths)
    if not is_used.any():
        return np.zeros(len(lengths), np.int32)
    return centred_exponents(np.log2(np.where(is_used, lengths, 1)) / 2, is_used)
