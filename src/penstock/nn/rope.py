"""Rotary positions: the angles of a step, and the rotation of heads."""

from __future__ import annotations

import math

import numpy as np

from penstock.config import RopeConfig
from penstock.errors import UnsupportedError
from penstock.nn.base import Tensor, torch
from penstock.nn.module import Module
from penstock.ops.call import ops

__all__ = ["RotaryEmbedding", "apply_rope", "inverse_frequencies"]


class RotaryEmbedding(Module):
    """The cosines and sines of the positions of a step.

    ``inv_freq`` [rotary_dim / 2] is a constant of the network.  It has values even when the network is on meta tensors.
    """

    inv_freq: Tensor

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.rope = rope
        self.register_buffer("inv_freq", torch.from_numpy(inverse_frequencies(rope)), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the cosines, then the sines, of positions [T] int32: [T, rotary_dim]."""
        y: Tensor = ops.rotary_embedding(positions, self.inv_freq, scaling=self.rope.attention_factor)
        return y

    def extra_repr(self) -> str:
        """Return the type of scaling, for ``print``."""
        return f"type={self.rope.type}, theta={self.rope.theta:g}, rotary_dim={self.rope.rotary_dim}"


def apply_rope(x: Tensor, cos_sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate x [T, heads, head_dim] by cos_sin [T, rotary_dim]; the result has the same shape as x."""
    y: Tensor = ops.rope(x, cos_sin, interleaved=interleaved)
    return y


def inverse_frequencies(rope: RopeConfig) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the angle per position of each pair of dimensions, float32 [rotary_dim / 2].

    Computed in double precision without vector instructions, so that an export has the same bytes on every machine.
    Raises UnsupportedError for an unknown rope type.
    """
    plain = [rope.theta ** -(2 * i / rope.rotary_dim) for i in range(rope.rotary_dim // 2)]
    scalings = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
    scalings["proportional"] = _longrope
    if rope.type not in scalings:
        raise UnsupportedError(
            f"rope_type: expected one of {', '.join(scalings)}, got {rope.type!r}", param="rope_type"
        )
    return np.array(scalings[rope.type](plain, rope), dtype=np.float32)


def _default(plain: list[float], rope: RopeConfig) -> list[float]:
    return plain


def _linear(plain: list[float], rope: RopeConfig) -> list[float]:
    return [frequency / rope.factor for frequency in plain]


def _longrope(plain: list[float], rope: RopeConfig) -> list[float]:
    """LongRoPE (Ding et al., arXiv 2402.13753): every pair has its own divisor, infinite if it does not turn."""
    return [frequency / divisor for frequency, divisor in zip(plain, rope.divisors, strict=True)]


def _llama3(plain: list[float], rope: RopeConfig) -> list[float]:
    """Llama 3's scaling: low frequencies are interpolated, high ones are kept, those between are blended."""
    scaled = []
    for frequency in plain:
        turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        scaled.append((1 - blend) * frequency / rope.factor + blend * frequency)
    return scaled


def _yarn(plain: list[float], rope: RopeConfig) -> list[float]:
    """YaRN (Peng et al., arXiv 2309.00071): as llama3, but with a ramp over the index of the pair."""
    dim = rope.rotary_dim

    def pair_with(turns: float) -> float:
        wavelengths = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    scaled = []
    for index, frequency in enumerate(plain):
        ramp = min(max((index - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency / rope.factor * ramp + frequency * (1 - ramp))
    return scaled
