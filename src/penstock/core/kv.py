"""The constants of KV pages that the native core, the engine and ``penstock.lite`` share."""

from __future__ import annotations

from typing import Final

__all__ = ["KV_LAYOUTS", "KV_NUMBERS", "PAGE_TOKENS", "kv_layout_of", "pages_for"]

PAGE_TOKENS: Final = 32
"""The number of tokens in a KV page (``PS_PAGE_TOKENS``)."""

KV_LAYOUTS: Final = ("auto", "f32", "bf16", "int8")
"""The formats of keys and values; "auto" lets the core choose: f32 under the scheme f32, else bf16."""

KV_NUMBERS: Final = {"f32": 1, "bf16": 2, "int8": 3}
"""The numbers of ``ps_kv_layout`` by name."""


def pages_for(num_tokens: int) -> int:
    """Return the number of pages that ``num_tokens`` tokens of one request need."""
    return -(-num_tokens // PAGE_TOKENS)


def kv_layout_of(kv_layout: str, scheme: str) -> str:
    """Return the format that ``kv_layout`` means under a scheme: resolves "auto" and returns others unchanged."""
    if kv_layout != "auto":
        return kv_layout
    from penstock.core.library import library  # imported here: the engine's page planning must not load the core

    number = library().ps_auto_kv_layout(scheme.encode())
    return next(name for name, layout in KV_NUMBERS.items() if layout == number)
