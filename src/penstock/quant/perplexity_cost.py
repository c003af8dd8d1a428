"""The cost of each scheme in perplexity, as docs/guides/quantization.md has measured it."""

from __future__ import annotations

from typing import Final

__all__ = ["PERPLEXITY_COST"]

PERPLEXITY_COST: Final = {
    "f32": 0.0,
    "f16": 0.0,
    "bf16": 0.0,
    "w8a16": 0.0,
    "w8a8": 0.0013,
    "w4a16": 0.0053,
    "w4a8": 0.0061,
    "w8a8_h32": 0.0004,
    "w4a8_h32": 0.0070,
}
"""By scheme, the increase of the perplexity against f32 as a share of it: demo model, 54,784 tokens, f32 keys and
values (``make perplexity``).  Other models lose other amounts; ``penstock.LLM.score`` and docs/guides/evaluation.md
measure them."""
