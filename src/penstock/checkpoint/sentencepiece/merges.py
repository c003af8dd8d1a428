"""The merges of a SentencePiece model, which has the score of each piece instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from penstock.checkpoint.tokenizer_limits import MAX_MERGES
from penstock.errors import InvalidFileError

__all__ = ["merges_by_score"]

MAX_CHARS: Final = 1 << 23
"""Limit on the characters of all pieces: the time to find the merges grows with it."""


def merges_by_score(scores: Mapping[str, float], ids: Mapping[str, int], field: str, file: str) -> list[list[str]]:
    """Return every way to make a piece of two others, in the order in which SentencePiece prefers them.

    ``scores``: the score of each piece that merges may make or join; the highest is merged first, of equal ones that
    with the lowest id.  ``field`` and ``file``: where the pieces are, for errors.  The time is proportional to the
    number of characters and merges, however long a piece is.  Raises InvalidFileError above MAX_CHARS or MAX_MERGES.
    """
    num_chars = sum(map(len, scores))
    if num_chars > MAX_CHARS:
        raise InvalidFileError(
            f"{file}: {field}: expected at most {MAX_CHARS} characters, got {num_chars}", param=field
        )
    heads = _prefix_lens(scores)
    tails = _prefix_lens(text[::-1] for text in scores)
    merges = []
    for text, score in scores.items():
        left_lens = set(heads[text])
        for right_len in tails[text[::-1]]:
            at = len(text) - right_len
            if at in left_lens:
                left, right = text[:at], text[at:]
                merges.append((-score, ids[text], ids[left], ids[right], left, right))
        if len(merges) > MAX_MERGES:
            raise InvalidFileError(
                f"{file}: {field}: expected pieces with at most {MAX_MERGES} merges, got more", param=field
            )
    merges.sort(key=lambda merge: merge[:4])
    return [[left, right] for *_, left, right in merges]


def _prefix_lens(texts: Iterable[str]) -> dict[str, list[int]]:
    """Return the lengths of the other texts that each text begins with."""
    result: dict[str, list[int]] = {}
    begun: list[str] = []  # the texts that the last text begins with, and this text
    for text in sorted(texts):  # all texts that begin with another follow it without a gap
        while begun and not text.startswith(begun[-1]):
            begun.pop()
        result[text] = [len(other) for other in begun]
        begun.append(text)
    return result
