"""The steps of a normalizer."""

from __future__ import annotations

import base64
from typing import Final

from penstock.graph.tokenizer.components import Json, NotCompiledError, flatten
from penstock.graph.tokenizer.segment import (
    STEP_CHARSMAP,
    STEP_CHINESE,
    STEP_CLEAN,
    STEP_LOWERCASE,
    STEP_NFC,
    STEP_NFD,
    STEP_NFKC,
    STEP_NFKD,
    STEP_NMT,
    STEP_PREPEND,
    STEP_REPLACE,
    STEP_REPLACE_SPACES,
    STEP_STRIP_ACCENTS,
    STEP_STRIP_LEFT,
    STEP_STRIP_MARKS,
    STEP_STRIP_RIGHT,
)

__all__ = ["Step", "find_charsmap", "normalizer_steps"]

Step = tuple[int, bytes, bytes]
"""The kind of a step and its two texts."""

_MAX_STEPS, _MAX_STEP_BYTES = 16, 16
_KINDS: Final = {
    "NFC": STEP_NFC,
    "NFD": STEP_NFD,
    "NFKC": STEP_NFKC,
    "NFKD": STEP_NFKD,
    "Nmt": STEP_NMT,
    "Lowercase": STEP_LOWERCASE,
    "StripAccents": STEP_STRIP_MARKS,
    "Precompiled": STEP_CHARSMAP,
}
"""Normalizers without options, or with a map for which there is a table."""
_SPACES: Final = " {2,}"
"""The one regular expression that is known: runs of two spaces or more."""


def normalizer_steps(normalizer: Json | None) -> list[Step]:
    """Return the steps of the component ``normalizer``, in order."""
    steps = [step for part in flatten(normalizer, "normalizers") for step in _steps_of(part)]
    if len(steps) > _MAX_STEPS or any(max(len(a), len(b)) > _MAX_STEP_BYTES for _, a, b in steps):
        raise NotCompiledError(
            f"normalizer: expected up to {_MAX_STEPS} steps with strings of up to {_MAX_STEP_BYTES} bytes"
        )
    return steps


def _steps_of(part: Json) -> list[Step]:
    kind = part["type"]
    if kind in _KINDS:
        return [(_KINDS[kind], b"", b"")]
    if kind == "Prepend":
        return [(STEP_PREPEND, part["prepend"].encode(), b"")]
    if kind == "Replace" and part["pattern"].get("String"):
        return [(STEP_REPLACE, part["pattern"]["String"].encode(), part["content"].encode())]
    if kind == "Replace" and part["pattern"].get("Regex") == _SPACES:
        return [(STEP_REPLACE_SPACES, part["content"].encode(), b"")]
    if kind == "Strip":
        sides = ((STEP_STRIP_LEFT, part["strip_left"]), (STEP_STRIP_RIGHT, part["strip_right"]))
        return [(step, b"", b"") for step, chosen in sides if chosen]
    if kind == "BertNormalizer":
        return [(step, b"", b"") for step in _bert_steps(part)]
    raise NotCompiledError(f"normalizer {kind}")


def find_charsmap(normalizer: Json | None) -> tuple[bytes, bytes]:
    """Return the double array and the replacements of the map in a normalizer; empty without one.

    The map is that of SentencePiece: the size of a double array in bytes, the array, texts that end with a zero.
    """
    parts = [part for part in flatten(normalizer, "normalizers") if part["type"] == "Precompiled"]
    maps = {part["precompiled_charsmap"] for part in parts}
    if len(maps) > 1:
        raise NotCompiledError("normalizer Precompiled: expected one map, got two")
    blob = base64.b64decode(maps.pop()) if maps else bytes(4)
    end = 4 + int.from_bytes(blob[:4], "little")
    if end > len(blob) or end % 4:
        raise NotCompiledError(f"normalizer Precompiled: expected an array of {end - 4} bytes, got {len(blob) - 4}")
    return blob[4:end], blob[end:]


def _bert_steps(part: Json) -> list[int]:
    """Return the steps of BERT's normalizer, which strips accents where it makes letters small if it does not say."""
    strips = part["lowercase"] if part["strip_accents"] is None else part["strip_accents"]
    steps = [STEP_CLEAN] * part["clean_text"] + [STEP_CHINESE] * part["handle_chinese_chars"]
    return steps + [STEP_NFD, STEP_STRIP_ACCENTS] * strips + [STEP_LOWERCASE] * part["lowercase"]
