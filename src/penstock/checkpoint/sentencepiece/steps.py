"""The steps of ``tokenizer.json`` that SentencePiece models need, whatever file they come from."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["SPACE_MARK", "decoder_steps", "normalizer_steps"]

SPACE_MARK: Final = "\u2581"
"""The character for a space in the pieces."""


def normalizer_steps(has_prefix: bool) -> list[dict[str, Any]]:
    """Return the normalizers that mark the spaces of a text, which with ``has_prefix`` begins with one more."""
    prepend = [{"type": "Prepend", "prepend": SPACE_MARK}] if has_prefix else []
    return [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}]


def decoder_steps(has_prefix: bool) -> list[dict[str, Any]]:
    """Return the decoders that turn pieces into text; with ``has_prefix`` the text loses the space it began with."""
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps
