"""The scaling of rotary positions in a GGUF file: from keys, and from tensors of divisors of the frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.config import show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["ROPE_TENSORS", "rope_scaling"]

ROPE_FACTORS: Final = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS: Final = (ROPE_FACTORS, _LONG, _SHORT)
"""The divisors of the frequencies: always, and under longrope in long and in short contexts."""
_FACTOR_TOLERANCE: Final = 1e-5
_LLAMA3_CONTEXT: Final = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_YARN_ONLY: Final = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
"""Factors that must be 1, because no network here applies them."""


def rope_scaling(
    metadata: Metadata, name: str, values: Mapping[str, Any], factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of config.json, None for positions without a scaling.

    ``values``: the other values of config.json.  ``factors``: those of ROPE_TENSORS that the file has.  A factor
    without a type is linear, as llama.cpp has it.
    """
    kind = _kind(metadata, name)
    for tensor, own in factors.items():
        _check_factors(tensor, own, values, metadata.file)
    if kind == "longrope" or (kind == "none" and (_LONG in factors or _SHORT in factors)):
        return _longrope_scaling(metadata, name, factors)
    if kind == "none" and ROPE_FACTORS in factors:
        return _llama3_scaling(factors[ROPE_FACTORS], values, metadata.file)
    if factors or kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{metadata.file}: {name}.rope.scaling.type: expected none, linear, yarn or longrope"
            f"{', and none beside ' + next(iter(factors)) if factors else ''}, got {show(kind)}",
            param=f"{name}.rope.scaling.type",
        )
    for part in _YARN_ONLY:
        key = f"{name}.rope.scaling.{part}"
        if kind != "none" and metadata.number(key, 1.0) != 1.0:
            raise UnsupportedError(f"{metadata.file}: {key}: expected 1, got {metadata.number(key):g}", param=key)
    if kind == "none":
        return None
    factor = _factor(metadata, name)
    if factor <= 0:
        raise metadata.error(f"{name}.rope.scaling.factor", "a number above 0")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        key = f"{name}.rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = metadata.integer(key, min=1)
        for part in ("beta_fast", "beta_slow"):
            if f"{name}.rope.scaling.yarn_{part}" in metadata.values:
                scaling[part] = metadata.number(f"{name}.rope.scaling.yarn_{part}")
        key = f"{name}.rope.scaling.yarn_log_multiplier"
        if key in metadata.values:  # a tenth of the value in config.json
            scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * metadata.number(key), 6)
    return scaling


def _kind(metadata: Metadata, name: str) -> str:
    """Return the type of the scaling; without the key, linear if there is another factor than 1."""
    if f"{name}.rope.scaling.type" in metadata.values:
        return metadata.text(f"{name}.rope.scaling.type")
    return "none" if _factor(metadata, name) in (0.0, 1.0) else "linear"


def _factor(metadata: Metadata, name: str) -> float:
    """Return the factor of the scaling, 1 without one; ``rope.scale_linear`` is its older key."""
    key = f"{name}.rope.scaling.factor"
    return metadata.number(key if key in metadata.values else f"{name}.rope.scale_linear", 1.0)


def _longrope_scaling(metadata: Metadata, name: str, factors: Mapping[str, NDArray[np.float32]]) -> dict[str, Any]:
    """Return the scaling with a table for long contexts and one for short ones."""
    missing = next((tensor for tensor in (_LONG, _SHORT) if tensor not in factors), None)
    if missing is not None or ROPE_FACTORS in factors:
        actual = f"no {missing}" if missing is not None else f"{ROPE_FACTORS} too"
        raise InvalidFileError(
            f"{metadata.file}: expected tensors {_LONG} and {_SHORT} of longrope, got {actual}",
            param=missing or ROPE_FACTORS,
        )
    attention = f"{name}.rope.scaling.attn_factor"
    context_len = metadata.integer(f"{name}.context_length", min=1)
    original = metadata.integer(f"{name}.rope.scaling.original_context_length", context_len, min=1)
    return {
        "rope_type": "longrope",
        "long_factor": factors[_LONG].tolist(),
        "short_factor": factors[_SHORT].tolist(),
        "original_max_position_embeddings": original,
        **({"attention_factor": metadata.number(attention)} if attention in metadata.values else {}),
    }


def _check_factors(tensor: str, factors: NDArray[np.float32], values: Mapping[str, Any], file: str) -> None:
    """Refuse factors that are not one for each pair of dimensions that rotates, finite and above 0."""
    num_pairs = round(values["head_dim"] * values.get("partial_rotary_factor", 1.0)) // 2
    if len(factors) != num_pairs:
        raise InvalidFileError(
            f"{file}: tensor {tensor}: expected {num_pairs} numbers, one for each pair of dimensions, got "
            f"{len(factors)}",
            param=tensor,
        )
    wrong = factors[~(np.isfinite(factors) & (factors > 0))]
    if len(wrong):
        raise InvalidFileError(
            f"{file}: tensor {tensor}: expected finite numbers above 0, got {wrong[0]:g}", param=tensor
        )


def _llama3_scaling(factors: NDArray[np.float32], values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return Llama 3's scaling whose factors the file has.

    The file has only the result.  The largest factor is that of the scaling; the other parameters are those of every
    published Llama 3 model, and a file with factors of other parameters is refused.
    """
    num_pairs, factor = len(factors), float(factors.max(initial=1.0))
    turns = _LLAMA3_CONTEXT * values["rope_theta"] ** -(np.arange(num_pairs) / num_pairs) / (2 * np.pi)
    share = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    expected = 1 / ((1 - share) / factor + share)
    if not np.allclose(factors, expected, rtol=_FACTOR_TOLERANCE, atol=0):
        raise UnsupportedError(
            f"{file}: tensor {ROPE_FACTORS}: expected the factors of Llama 3 ({num_pairs} of them), got others",
            param=ROPE_FACTORS,
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
