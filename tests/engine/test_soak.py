"""The short form of ``make soak``: what ended leaves nothing behind."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path

from penstock import LLM, ProgramLimits
from penstock.engine.request import Request
from tests.cli.conftest import DEMO

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def num_requests() -> int:
    gc.collect()
    return sum(type(one) is Request for one in gc.get_objects())  # isinstance would wake lazy objects of other modules


def test_hundreds_of_requests_with_aborts_leave_nothing_behind():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
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
        tables = [pages for pages in llm.engine.layout._owners if pages is not None]
        assert tables
        assert not any(table for pages in tables for table in pages.tables)
