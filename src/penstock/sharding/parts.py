"""The rows of stored tensors that make up rows of a network's parameter, and their places in a rank's file.

A parameter comes from its sources (``penstock.checkpoint.sources``): rows of a fused tensor, for example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.checkpoint.sources import Source
from penstock.sharding.strategy import RowRanges

__all__ = ["join_rows", "local_sources", "select_rows"]


def select_rows(pieces: Sequence[Source], rows: RowRanges, size_of: Callable[[Source], int]) -> tuple[Source, ...]:
    """Return the sources of the rows ``rows`` of a parameter that comes from ``pieces``.

    ``size_of`` returns the number of rows of a piece's tensor; of a transposed one, or one whose rows are transposed,
    these are its columns.
    """
    selected: list[Source] = []
    for start, stop in rows:
        end = 0
        for piece in pieces:
            for first, last in _ranges(piece) or ((0, size_of(piece)),):
                begin, end = end, end + last - first
                low, high = max(start, begin), min(stop, end)
                if low < high:
                    own = (first + low - begin, first + high - begin)
                    if selected and _with_ranges(selected[-1], _ranges(piece)) == piece:
                        selected[-1] = _with_ranges(piece, _append(_ranges(selected[-1]), own))
                    else:
                        selected.append(_with_ranges(piece, (own,)))
    return tuple(selected)


def _ranges(piece: Source) -> RowRanges:
    """Return which of its tensor's rows, or columns, the rows of the parameter are."""
    return piece.columns if piece.rows_transposed else piece.rows


def _with_ranges(piece: Source, ranges: RowRanges) -> Source:
    return replace(piece, columns=ranges) if piece.rows_transposed else replace(piece, rows=ranges)


def local_sources(
    pieces: Sequence[Source], part_of: Callable[[str], RowRanges | None], is_cut: Callable[[str], bool]
) -> tuple[Source, ...] | None:
    """Return ``pieces``, which name rows of whole tensors, with the rows of a rank's tensors; None if it lacks some.

    ``part_of`` returns the rows of a tensor that the rank's file has, of stacked matrices those of each.  ``is_cut``:
    whether ranks have different ones.
    """
    local = []
    for piece in pieces:
        part, rows = part_of(piece.tensor), []
        if part is not None and piece.index is not None and not is_cut(piece.tensor):
            local.append(piece)
            continue
        for start, stop in piece.rows:
            own = None if part is None else _place(part, start, stop)
            if own is None:
                return None
            rows.append(own)
        local.append(replace(piece, rows=tuple(rows)))
    return tuple(local)


def join_rows(rows: Sequence[tuple[int, int]]) -> RowRanges:
    """Return ranges in ascending order, with those that touch or overlap put together."""
    joined: RowRanges = ()
    for start, stop in sorted(rows):
        if joined and joined[-1][1] >= start:
            joined = (*joined[:-1], (joined[-1][0], max(stop, joined[-1][1])))
        else:
            joined = (*joined, (start, stop))
    return joined


def _append(rows: RowRanges, own: tuple[int, int]) -> RowRanges:
    return (*rows[:-1], (rows[-1][0], own[1])) if rows[-1][1] == own[0] else (*rows, own)


def _place(part: RowRanges, start: int, stop: int) -> tuple[int, int] | None:
    """Return where rows lie within the rows ``part``; None if these lack some."""
    before = 0
    for first, last in part:
        if first <= start and stop <= last:
            return before + start - first, before + stop - first
        before += last - first
    return None
