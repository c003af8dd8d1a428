"""The number of values in a page: keys and values, recurrent states, and the lengths of prefixes."""

from __future__ import annotations

from typing import Final

from penstock.core.layouts import PAGE_TOKENS
from penstock.errors import UnsupportedError

__all__ = ["PREFIX_ELEMENTS", "page_elements", "state_elements"]

_SCALE_BYTES: Final = 4 * PAGE_TOKENS

PREFIX_ELEMENTS: Final = 16
"""The float32 numbers of a page: the length of the prefix, or 0 before it ends; as the last one the tokens seen."""


def page_elements(dtype: object, num_kv_heads: int, head_dim: int, latent_dim: int = 0) -> int:
    """Return the number of elements of one page; ``dtype`` is PyTorch's, or its name.

    For each head a page holds the keys and the values of 32 tokens, in int8 each followed by 32 f32 scales.  Keys are
    [head_dim][32] and values [32][head_dim]; in bfloat16 they are [head_dim / 2][32][2] and [16][head_dim][2], and an
    odd last dimension of the keys is padded with a zero.  With ``latent_dim`` a page has keys only, whose first
    ``latent_dim`` dimensions are the values too.  uint8 is int4: bytes of two dimensions, keys [head_dim / 2][32] and
    values [32][head_dim / 2], both rounded up, with scales as int8.  UnsupportedError for latents of int4.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "uint8":
        if latent_dim:
            raise UnsupportedError(
                "kv_layout: expected f32, bf16 or int8 for a model with latents (MLA), got int4", param="kv_layout"
            )
        return 2 * num_kv_heads * (PAGE_TOKENS * -(-head_dim // 2) + _SCALE_BYTES)
    parts = 1 if latent_dim else 2
    scales = parts * _SCALE_BYTES if name == "int8" else 0
    pad = head_dim % 2 if name == "bfloat16" else 0
    return num_kv_heads * (PAGE_TOKENS * (parts * head_dim + pad) + scales)


def state_elements(head_dim: int, values: int, window: int) -> int:
    """Return the float32 numbers that a key head has in a recurrent state; ``values``: channels of its value heads.

    They are the matrices [heads, head_dim, value_dim] of its value heads, the last ``window`` - 1 inputs of the
    convolution, oldest first, padding to a multiple of 16, and as the last one the number of tokens seen.  For ssm_scan
    a block of heads is a key head, and ``head_dim`` is state_dim.
    """
    return -(-(head_dim * values + (window - 1) * (2 * head_dim + values) + 1) // 16) * 16
