"""The merges of a byte pair encoding, as a table of ids and as the JSON text of pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import add
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["MadeMerges", "merge_table"]

_BETWEEN: Final = "\x7f"
"""Stands between two merges while many are written as one text; JSON leaves it as it is."""
_QUOTED_COMMA: Final = '", "'
_NEXT_PAIR: Final = '"], ["'


def merge_table(vocab: Mapping[str, int], lefts: Sequence[str], rights: Sequence[str]) -> npt.NDArray[np.uint32]:
    """Return the table of merges, uint32 [merges, 4]: left, right, rank, token; KeyError for one without an id."""
    table = np.empty((len(lefts), 4), np.uint32)
    table[:, 2] = np.arange(len(lefts))
    for i, column in ((0, lefts), (1, rights)):
        table[:, i] = np.fromiter(map(vocab.__getitem__, column), np.uint32, len(lefts))
    made = list(map(add, lefts, rights))
    first = _first_of_run(vocab, made)
    if first is None:
        table[:, 3] = np.fromiter(map(vocab.__getitem__, made), np.uint32, len(made))
    else:
        table[:, 3] = table[:, 2] + np.uint32(first)
    return table


def _first_of_run(vocab: Mapping[str, int], made: Sequence[str]) -> int | None:
    """Return the id of the first of these tokens if the others follow it in ``vocab``, else None.

    Most vocabularies have their tokens in the order of the merges, and to compare texts is faster than to look them up.
    """
    first = vocab.get(made[0]) if made else None
    if first is None:
        return None
    end = first + len(made)
    follow = list(islice(vocab.values(), first, end)) == list(range(first, end))
    return first if follow and list(islice(vocab, first, end)) == made else None


class MadeMerges:
    """The ``table`` of merges, and their JSON ``text``, an array of pairs."""

    def __init__(self, table: npt.NDArray[np.uint32], text: str) -> None:
        self.table = table
        self.text = text

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def of(cls, merges: Sequence[str], vocab: Mapping[str, int]) -> MadeMerges | None:
        """Return the merges of lines "left right"; None if a line has another number of spaces, or a text no id.

        No step is taken for each line, because there are hundreds of thousands.
        """
        joined = _BETWEEN.join(merges)
        codes = np.frombuffer(joined.encode(), np.uint8)
        gaps = codes[(codes == ord(" ")) | (codes == ord(_BETWEEN))]  # one space, then the end of the line, and so on
        if len(gaps) != 2 * len(merges) - 1 or (gaps[::2] != ord(" ")).any() or (gaps[1::2] != ord(_BETWEEN)).any():
            return None
        texts = joined.replace(_BETWEEN, " ").split(" ")
        try:
            table = merge_table(vocab, texts[::2], texts[1::2])
        except KeyError:
            return None
        escaped = json.dumps(joined, ensure_ascii=False)[1:-1]
        return cls(table, f'[["{escaped.replace(" ", _QUOTED_COMMA).replace(_BETWEEN, _NEXT_PAIR)}"]]')
