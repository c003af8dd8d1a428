"""KV pages by number: what the native core, the engine and ``penstock.lite`` agree on."""

from __future__ import annotations

from typing import Final

__all__ = ["KV_LAYOUTS", "KV_NUMBERS", "PAGE_TOKENS", "kv_layout_of", "pages_for"]

PAGE_TOKENS: Final = 32
"""Tokens in one KV page (``PS_PAGE_TOKENS``)."""

KV_LAYOUTS: Final = ("auto", "f32", "bf16", "int8")
"""How keys and values may lie in a page; "auto": what the core takes for the scheme, f32 under f32, else bf16."""

KV_NUMBERS: Final = {"f32": 1, "bf16": 2, "int8": 3}
"""By the numbers of ``ps_kv_layout``; ``graph.ir``, which has them too, takes as long to import as a decode step."""


def pages_for(num_tokens: int) -> int:
    """Pages that hold ``num_tokens`` tokens of one request."""
    return -(-num_tokens // PAGE_TOKENS)


def kv_layout_of(kv_layout: str, scheme: str) -> str:
    """What ``kv_layout`` means under a scheme."""
    if kv_layout != "auto":
        return kv_layout
    from penstock.core.library import library  # here: the engine's planning knows pages and needs no core

    number = library().ps_auto_kv_layout(scheme.encode())
    return next(name for name, layout in KV_NUMBERS.items() if layout == number)
