"""The division of the rows of a network's parameters over ranks, and of its layers over stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import InvalidArgumentError

__all__ = ["TILE_ROWS", "Cut", "balance", "cut_evenly", "cut_heads"]

TILE_ROWS = 16
"""The rows that a kernel reads together: a cut between two tiles copies whole tiles."""


@dataclass(frozen=True)
class Cut:
    """The columns of a value, or the rows of a parameter, that each rank has: ``ranges[rank]`` is (start, stop).

    Ranges of key and value heads overlap when there are more ranks than heads; others follow each other.  ``slots``:
    the columns of a value are so many equal pieces, one after another, and each is cut so.
    """

    ranges: tuple[tuple[int, int], ...]
    slots: int = 1

    def size(self, rank: int) -> int:
        """Return the number of columns of a rank, those of all slots."""
        start, stop = self.ranges[rank]
        return self.slots * (stop - start)

    def times(self, factor: int) -> Cut:
        """Return the cut of elements that this cut of units of ``factor`` elements makes."""
        return Cut(tuple((start * factor, stop * factor) for start, stop in self.ranges), self.slots)

    def divided(self, factor: int) -> Cut | None:
        """Return the cut of units of ``factor`` columns; None if it divides one."""
        if any(bound % factor for own in self.ranges for bound in own):
            return None
        return Cut(tuple((start // factor, stop // factor) for start, stop in self.ranges), self.slots)

    def repeated(self, count: int) -> Cut:
        """Return the cut in which ``count`` ranks, one after another, have the same range."""
        return Cut(tuple(own for own in self.ranges for _ in range(count)))

    def shared(self, count: int) -> Cut:
        """Return the cut in which ``count`` ranks with the same range, one after another, divide it.

        Raises InvalidArgumentError (``context_parallel_size``) for more ranks than columns.
        """
        ranges: list[tuple[int, int]] = []
        for start, stop in self.ranges[::count]:
            part = cut_evenly(stop - start, count)
            if part is None:
                raise InvalidArgumentError(
                    f"context_parallel_size: expected at most {stop - start}, the columns of a rank's attention heads, "
                    f"got {count}",
                    param="context_parallel_size",
                )
            ranges += [(start + first, start + last) for first, last in part.ranges]
        return Cut(tuple(ranges))

    @property
    def ends(self) -> set[int]:
        """Return the ends of the parts of the ranks."""
        return {stop for _, stop in self.ranges}

    @property
    def is_partition(self) -> bool:
        """True if every column belongs to one rank."""
        return all(stop == start for (_, stop), (start, _) in pairwise(self.ranges))

    @property
    def starts(self) -> str:
        """The attribute ``starts`` of an op: where each rank's part starts, and the whole size."""
        return "|".join(str(start) for start in (*(start for start, _ in self.ranges), self.ranges[-1][1]))


def _divide(num_units: int, world: int) -> tuple[tuple[int, int], ...]:
    return tuple((num_units * rank // world, num_units * (rank + 1) // world) for rank in range(world))


def cut_evenly(size: int, world: int, unit: int = 1) -> Cut | None:
    """Cut ``size`` columns between units, and between tiles of 16 where there are enough; None if there are too few."""
    for step in (max(TILE_ROWS, unit) if TILE_ROWS % unit == 0 else unit, unit):
        num_units = -(-size // step)
        if num_units >= world:
            ranges = tuple((start * step, min(stop * step, size)) for start, stop in _divide(num_units, world))
            return Cut(ranges)
    return None


def cut_heads(num_heads: int, num_kv_heads: int, world: int) -> tuple[Cut, Cut]:
    """Return how query heads and key-value heads are cut, in heads.

    A rank has whole groups of query heads with their key-value head.  If there are more ranks than key-value heads,
    several ranks have the same one, and each a part of its query heads.  Raises InvalidArgumentError when the query
    heads are too few.
    """
    group = num_heads // num_kv_heads
    if world <= num_kv_heads:
        kv = Cut(_divide(num_kv_heads, world))
        return kv.times(group), kv
    heads, kv_heads = [], []
    for kv_head, (first, last) in enumerate(_divide(world, num_kv_heads)):
        if last - first > group:
            raise InvalidArgumentError(
                f"tensor_parallel_size: expected at most {num_heads} ranks for {num_heads} attention heads and "
                f"{num_kv_heads} key-value heads, got {world}",
                param="tensor_parallel_size",
            )
        for start, stop in _divide(group, last - first):
            heads.append((kv_head * group + start, kv_head * group + stop))
            kv_heads.append((kv_head, kv_head + 1))
    return Cut(tuple(heads)), Cut(tuple(kv_heads))


def balance(ends: Sequence[int], total: int, num_parts: int) -> list[int]:
    """Return ``num_parts`` - 1 of the ascending ``ends``, so that the greatest part up to ``total`` is least."""
    best: list[tuple[int, list[int]]] = [(end, []) for end in [*ends, total]]  # the parts up to each end
    for count in range(1, num_parts):
        longer = []
        for i, end in enumerate([*ends, total]):
            choices = [
                (max(best[j][0], end - ends[j]), [*best[j][1], ends[j]])
                for j in range(i)
                if len(best[j][1]) == count - 1
            ]
            longer.append(min(choices, key=lambda choice: choice[0], default=(total, [])))
        best = longer
    return best[-1][1]
