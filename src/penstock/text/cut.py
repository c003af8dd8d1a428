"""Texts that are cut to a number of tokens while the tokens around them stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final

from penstock.checkpoint.pooling.head import PoolingHead

__all__ = ["FILLERS", "encode_text", "num_shared"]

FILLERS: Final = ("", "0", "x y")
"""Texts that share no token: what their encoded forms have in common was put around them."""


def encode_text(encode: Callable[[str], Sequence[int]], text: str, head: PoolingHead) -> Sequence[int]:
    """Return the token ids of a text that becomes a vector, as sentence-transformers makes them.

    The text is lowercased if the head says so, character by character as the library ``tokenizers`` does.  The end of a
    text that is longer than the head's ``max_text_len`` is cut; the special tokens behind it stay.
    """
    ids = encode("".join(map(str.lower, text)) if head.lowercase else text)
    if not head.max_text_len or len(ids) <= head.max_text_len:
        return ids
    _, num_behind = num_shared(ids, [encode(filler) for filler in FILLERS])
    if num_behind >= head.max_text_len:
        return ids[: head.max_text_len]
    return [*ids[: head.max_text_len - num_behind], *ids[len(ids) - num_behind :]]


def num_shared(ids: Sequence[int], others: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return how many tokens at their beginning and at their end all lists share."""
    return _num_common([ids, *others]), _num_common([each[::-1] for each in (ids, *others)])


def _num_common(lists: Sequence[Sequence[int]]) -> int:
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*lists, strict=False)))
