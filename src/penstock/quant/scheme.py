"""The table of schemes: how linear layers store their weights and round their activations.

A bundle has one scheme.  ``docs/guides/quantization.md`` describes each scheme, and
``docs/explanation/numerics.md`` its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from penstock.config import check_choice
from penstock.core import layouts
from penstock.core.layouts import GROUP_LEN
from penstock.errors import InvalidArgumentError
from penstock.validation import refusal

__all__ = [
    "GROUP_LEN", "ROTATED_SUFFIX", "SCHEMES", "Scheme", "default_scheme", "find_scheme", "quantizing_scheme",
    "rounds_to_int8",
]  # fmt: skip


ROTATED_SUFFIX: Final = "_h32"


@dataclass(frozen=True)
class Scheme:
    """A row of the table.

    ``group_len``: the number of columns that share a step and an offset in units of the row's scale; 0 for none.
    ``activation_bits``: 32 (float32, not rounded), 16 (bf16; with integer weights 16-bit integers with one scale per
    token) or 8 (int8 with one scale per token).
    ``layout``: the ``ps_layout`` of a linear weight.
    ``head``: the scheme of the output head, and of an embedding that is tied to it.
    ``version``: counts changes of the packed values, and is part of cache keys.
    ``in_blocks``: the weights are blocks of a GGUF file, with a scale for each group of ``group_len`` columns; of the
    folders of ``penstock quantize`` only the output head can have them.  Activations are int8, with a scale for each
    32 columns.
    ``hadamard``: True if inputs and weights are rotated by blocks of 32 columns (``quant.hadamard``) before they are
    rounded.  The output head is not, because an embedding may share its weight.
    ``exportable``: True if the integers are chosen so that a GGUF file can hold them (``quant.exportable``).  No scheme
    of the table is.
    """

    name: str
    weight_bits: int
    group_len: int
    activation_bits: int
    layout: int
    head: str
    version: int = 1
    in_blocks: bool = False
    hadamard: bool = False
    exportable: bool = False

    @property
    def plain(self) -> str:
        """The name of the scheme without rotation: its own, if it has none."""
        return self.name.removesuffix(ROTATED_SUFFIX)

    @property
    def quantized(self) -> bool:
        """True if Penstock makes integers with scales from float weights."""
        return self.weight_bits <= 8 and not self.in_blocks


SCHEMES: Final[dict[str, Scheme]] = {
    scheme.name: scheme
    for scheme in (
        Scheme("f32", 32, 0, 32, layout=layouts.T16_F32, head="f32"),
        Scheme("f16", 16, 0, 32, layout=layouts.T16_F16, head="f16"),
        Scheme("bf16", 16, 0, 16, layout=layouts.T16_BF16, head="bf16"),
        Scheme("w8a16", 8, 0, 16, layout=layouts.T16_I8, head="w8a16", version=2),
        Scheme("w8a8", 8, 0, 8, layout=layouts.T16_I8, head="w8a8", version=2),
        Scheme("w4a16", 4, GROUP_LEN, 16, layout=layouts.T16_I4G32, head="w8a16", version=2),
        Scheme("w4a8", 4, GROUP_LEN, 8, layout=layouts.T16_I4G32, head="w8a8", version=2),
        Scheme("w8a8_h32", 8, 0, 8, layout=layouts.T16_I8, head="w8a8", version=2, hadamard=True),
        Scheme("w4a8_h32", 4, GROUP_LEN, 8, layout=layouts.T16_I4G32, head="w8a8", version=2, hadamard=True),
        Scheme("q8_0", 8, 32, 8, layout=layouts.T16_Q8_0, head="q8_0", in_blocks=True),
        Scheme("q4_0", 4, 32, 8, layout=layouts.T16_Q4_0, head="q4_0", in_blocks=True),
        Scheme("q4_k", 4, 32, 8, layout=layouts.T16_Q4_K, head="q4_k", in_blocks=True),
        Scheme("q5_k", 5, 32, 8, layout=layouts.T16_Q5_K, head="q5_k", in_blocks=True),
        Scheme("q6_k", 6, 16, 8, layout=layouts.T16_Q6_K, head="q6_k", in_blocks=True),
        Scheme("mxfp4", 4, 32, 8, layout=layouts.T16_MXFP4, head="mxfp4", in_blocks=True),
        Scheme("uint4", 4, 32, 8, layout=layouts.T16_UINT4, head="uint4", in_blocks=True),
        Scheme("q4_1", 4, 32, 8, layout=layouts.T16_Q4_1, head="q4_1", in_blocks=True),
        Scheme("q5_0", 5, 32, 8, layout=layouts.T16_Q5_0, head="q5_0", in_blocks=True),
        Scheme("q5_1", 5, 32, 8, layout=layouts.T16_Q5_1, head="q5_1", in_blocks=True),
        Scheme("iq4_nl", 4, 32, 8, layout=layouts.T16_IQ4_NL, head="iq4_nl", in_blocks=True),
        Scheme("iq4_xs", 4, 32, 8, layout=layouts.T16_IQ4_XS, head="iq4_xs", in_blocks=True),
        Scheme("q2_k", 2, 16, 8, layout=layouts.T16_Q2_K, head="q2_k", in_blocks=True),
        Scheme("q3_k", 3, 16, 8, layout=layouts.T16_Q3_K, head="q3_k", in_blocks=True),
        Scheme("nvfp4", 4, 16, 8, layout=layouts.T16_NVFP4, head="nvfp4", in_blocks=True),
        Scheme("tq2_0", 2, 256, 8, layout=layouts.T16_TQ2_0, head="tq2_0", in_blocks=True),
        Scheme("tq1_0", 2, 256, 8, layout=layouts.T16_TQ1_0, head="tq1_0", in_blocks=True),
        Scheme("q2_0", 2, 64, 8, layout=layouts.T16_Q2_0, head="q2_0", in_blocks=True),
        Scheme("q1_0", 1, 128, 8, layout=layouts.T16_Q1_0, head="q1_0", in_blocks=True),
    )
}


def find_scheme(name: str) -> Scheme:
    """Return the scheme called ``name``; InvalidArgumentError lists those that exist."""
    scheme = SCHEMES.get(name)
    if scheme is None:
        raise refusal("scheme", f"one of {', '.join(SCHEMES)}", name)
    return scheme


def rounds_to_int8(name: str) -> bool:
    """Return True for a scheme whose linears multiply int8 activations."""
    scheme = SCHEMES.get(name)
    return scheme is not None and scheme.activation_bits == 8


def quantizing_scheme(name: str, exportable: bool = False) -> Scheme:
    """Return the scheme called ``name`` if its weights are integers; InvalidArgumentError lists those that qualify.

    ``exportable``: with integers that a GGUF file can hold; InvalidArgumentError for a rotated scheme.
    """
    scheme = SCHEMES.get(name)
    if scheme is None or not scheme.quantized:
        names = ", ".join(known.name for known in SCHEMES.values() if known.quantized)
        reason = "" if scheme is None else ", which does not quantize"
        raise InvalidArgumentError(f"scheme: expected one of {names}, got {name!r:.60}{reason}", param="scheme")
    if exportable and scheme.hadamard:
        raise InvalidArgumentError(
            f"exportable: expected a scheme that a GGUF file can hold, such as {scheme.plain}, got {scheme.name}, "
            "whose inputs are rotated",
            param="exportable",
        )
    return replace(scheme, exportable=True) if exportable else scheme


def default_scheme(dtype: str) -> str:
    """Return the scheme that keeps the element type ``dtype`` ("f32", "f16", "bf16") of a checkpoint."""
    return check_choice("dtype", dtype, ("f32", "f16", "bf16"))
