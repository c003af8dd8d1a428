"""Spans of a step added up: nothing is counted twice, and a thread that was absent is no thread of the step."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.bench.span_totals import add_up_spans
from penstock.core.spans import SPAN


def spans(*rows: tuple[int, int, int, int, int]) -> np.ndarray:
    """(node, thread, arrive, begin, end) each; the step itself goes from 0 to 100."""
    found = np.zeros(1 + len(rows), SPAN)
    found[0] = (-1, 0, 0, 0, 0, 0, 100)
    for at, (node, thread, arrive, begin, end) in enumerate(rows, 1):
        found[at] = (node, 0, thread, 0, arrive, begin, end)
    return found


@pytest.mark.parametrize("other", [1, 2, 7])
def test_each_nanosecond_of_a_thread_counts_once(other):
    """Thread 1 may have sat the step out while others walked it."""
    step = spans((0, 0, 2, 2, 40), (1, 0, 41, 50, 90), (0, other, 4, 6, 48), (1, other, 48, 50, 98))
    found = add_up_spans([(110.0, step)], 2)
    assert found.threads == 2
    assert found.work.tolist() == [(38 + 42) / 2, (40 + 48) / 2]
    assert found.busy.tolist() == [42, 48]
    assert found.wait.tolist() == [(0 + 2) / 2, (9 + 2) / 2]
    assert (found.starting, found.ending, found.calling) == ((2 + 4) / 2, (10 + 2) / 2, 10)
    whole = found.work.sum() + found.wait.sum() + found.starting + found.ending + found.gaps + found.calling
    assert whole == found.wall == 110
