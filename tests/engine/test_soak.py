"""The short form of ``make soak``: ended requests leave nothing behind."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path

import pytest

from penstock import LLM, ProgramLimits
from penstock.engine.request import Request
from tests.support.command import DEMO

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def num_requests() -> int:
    gc.collect()
    return sum(type(one) is Request for one in gc.get_objects())  # isinstance would wake lazy objects of other modules


def load_script():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def num_blocks(llm: LLM) -> int:
    """Pieces of memory that Python holds; a request is dozens of them.  All have ended: what is kept for deadlines
    is let go of, for the number of those differs.
    """
    llm.engine._deadlines.take_expired(float("inf"))
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.long
def test_requests_that_ended_keep_no_memory():
    """The same 200 requests again and again: a leak of one object a request shows, and one of 20 KB outside of Python.
    The least of three rounds, for whatever else lives in the process may allocate meanwhile.
    """
    script = load_script()
    with LLM(DEMO, limits=ProgramLimits(max_requests=16, num_pages=96, context_len=512)) as llm:
        for _ in range(2):
            script.soak(llm, 200)
        grown, resident = [], []
        for _ in range(3):
            before, bytes_before = num_blocks(llm), script.resident_bytes()
            script.soak(llm, 200)
            grown.append(num_blocks(llm) - before)
            resident.append(script.resident_bytes() - bytes_before)
    assert min(grown) < 120, grown
    assert min(resident) < 4 << 20, resident


@pytest.mark.long
def test_hundreds_of_requests_with_aborts_leave_nothing_behind():
    script = load_script()
    before = num_requests()
    with LLM(DEMO, limits=ProgramLimits(max_requests=16, num_pages=96, context_len=512)) as llm:
        readings = script.soak(llm, 300)
        llm.engine.check_integrity()
        figures = llm.engine.figures()
        assert len(readings) == 100
        assert sum(figures.num_finished.values()) == 300
        assert set(figures.num_finished) >= {"length", "abort"}
        assert figures.num_held_pages == 0
        assert not llm.engine.has_work
        assert num_requests() - before <= len(llm.engine._deadlines) <= 64
        tables = [pages for pages in llm.engine.layouts[0]._owners if pages is not None]
        assert tables
        assert not any(table for pages in tables for table in pages.tables)
