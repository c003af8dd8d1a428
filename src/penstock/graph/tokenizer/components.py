"""The functions that the parts of the compiler share: the refusal of a component, and components in sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = [
    "MAX_ADDED_BYTES", "MAX_TOKENS", "Json", "NotCompiledError", "check_lengths", "count_tokens", "flatten",
]  # fmt: skip

MAX_TOKENS: Final = 1 << 24
MAX_ADDED_BYTES: Final = 1024
_MAX_TOKEN_BYTES: Final = 4096

Json = dict[str, Any]


class NotCompiledError(Exception):
    """Raised for a component that the core lacks; the message names it."""


def flatten(value: Json | None, key: str) -> list[Json]:
    """Return components in order, with sequences flattened; ``key`` names the list of a sequence."""
    if value is None:
        return []
    return [part for inner in value[key] for part in flatten(inner, key)] if value["type"] == "Sequence" else [value]


def count_tokens(texts: Mapping[int, str]) -> int:
    """Return the number of ids; a vocabulary may leave some out, but not most."""
    num_tokens = max(texts, default=-1) + 1
    if not 0 < num_tokens < min(MAX_TOKENS, 4 * len(texts) + 65536):
        raise NotCompiledError(f"model.vocab: {len(texts)} tokens have ids up to {num_tokens - 1}")
    return num_tokens


def check_lengths(texts: Iterable[bytes]) -> None:
    """Refuse texts that the core refuses."""
    if max(map(len, texts)) > _MAX_TOKEN_BYTES:
        raise NotCompiledError(f"model.vocab: a token with a text of more than {_MAX_TOKEN_BYTES} bytes")
