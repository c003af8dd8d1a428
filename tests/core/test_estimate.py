"""Whether threads share a step: its estimate counts attention, which takes longest in a long context."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.core import spans
from penstock.core.native import Context, CoreProgram, Model, ProgramOptions, StepBatch
from penstock.graph.ir import Graph
from tests.support.core_steps import i32
from tests.support.tiny_graph import tiny_graph, write_bundle

CONTEXT_LEN = 1 << 17
NUM_PAGES = CONTEXT_LEN // 32


def threads_of(program: CoreProgram, position: int, tries: int) -> set[int]:
    """The threads that took part in steps of one token, until a second one did."""
    pages = np.arange(NUM_PAGES, dtype=np.int32).reshape(1, 1, -1)
    found = {0}
    for _ in range(tries):
        program.run(StepBatch(i32(5), i32(position), i32(0, 1), pages, i32(0)))
        found |= set(spans.last_spans(program)["thread"].tolist())
        if len(found) > 1:
            break
    return found


@pytest.mark.parametrize("window", [0, 32])
def test_long_context_is_shared_by_threads(window: int, tmp_path: Path) -> None:
    """Of one request: with a short context, or a window, one thread is faster."""

    def lengthen(graph: Graph) -> None:
        graph.context_len = CONTEXT_LEN

    path = write_bundle(tmp_path / "long.psm", tiny_graph(windows=(window,)), patch=lengthen)
    options = ProgramOptions(max_tokens=1, max_requests=1, max_rows=1, num_pages=NUM_PAGES)
    with Model.open(path) as model, Context(2) as context, CoreProgram(model, context, options) as program:
        spans.set_profiling(program, True)
        assert threads_of(program, 40, 20) == {0}
        assert threads_of(program, CONTEXT_LEN - 1, 200 if not window else 20) == ({0} if window else {0, 1})
