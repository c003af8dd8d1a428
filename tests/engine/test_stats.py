"""What the engine counts, and what a failed step leaves behind."""

from __future__ import annotations

import pytest

from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.engine.scheduler import Scheduler
from penstock.errors import InternalError
from tests.support.engine_requests import finish_order, prompt_of, submit


@pytest.mark.parametrize("error", [InternalError("planted"), MemoryError("planted"), ValueError("planted")])
def test_a_step_error_ends_its_requests_not_the_engine(make_llm, error):
    engine = make_llm(max_requests=2).engine
    requests = [submit(engine, salt=i) for i in range(3)]
    engine.program.fail_next = error
    assert engine.step() == requests[:2]
    assert [type(r.error) for r in requests] == [InternalError, InternalError, type(None)]
    assert "planted" in str(requests[0].error)
    engine.check_integrity()
    assert finish_order(engine, requests)[-1] == 2
    assert requests[2].error is None
    assert engine.figures().num_finished == {"error": 2, "length": 1}


def test_a_scheduler_error_ends_requests_not_the_engine(make_llm, monkeypatch):
    engine = make_llm().engine
    requests = [submit(engine, length=100, salt=i) for i in range(3)]
    engine.step()

    def planted(self):
        monkeypatch.undo()
        raise IndexError("planted")

    monkeypatch.setattr(Scheduler, "schedule", planted)
    assert engine.step() == requests
    assert all("planted" in str(r.error) for r in requests)
    engine.check_integrity()
    assert engine.scheduler.ledger.pools[0].num_free == engine.program.limits.num_pages
    again = submit(engine)
    finish_order(engine, [again])
    assert len(again.output_ids) == 5


def test_figures_count_what_happened(make_llm):
    llm = make_llm(num_pages=64)
    engine = llm.engine
    running = submit(engine, length=70, max_tokens=40)
    for _ in range(3):
        engine.step()
    now = engine.figures()
    assert (now.num_running, now.num_waiting, now.num_steps, now.num_output_tokens) == (1, 0, 3, 2)
    assert (now.num_pages, now.num_held_pages, now.page_use) == (64, 3, 3 / 64)
    assert now.num_step_tokens == 71  # the prompt, and the first of the two
    assert (sum(now.num_steps_by.values()), now.num_steps_by["1"]) == (3, 1)
    engine.abort(running)
    submit(engine, length=70, max_tokens=1)
    finish_order(engine, [])
    then = engine.figures()
    assert (then.num_running, then.num_held_pages, then.num_named_pages) == (0, 0, 2)
    assert (then.num_prompt_tokens, then.num_cached_tokens, then.hit_rate) == (140, 64, 64 / 140)
    assert then.num_finished == {"abort": 1, "length": 1}


def test_timings_tell_waiting_from_computing(make_llm):
    llm = make_llm(max_requests=1)
    results = llm.generate([prompt_of(20), prompt_of(30)], SamplingParams(max_tokens=20, ignore_eos=True))
    for timings in (r.timings for r in results):
        assert timings["queued_s"] + timings["prefill_s"] == pytest.approx(timings["first_token_s"])
        assert timings["first_token_s"] + 19 * timings["per_token_s"] == pytest.approx(timings["total_s"], abs=0.01)
    assert results[1].timings["queued_s"] > results[0].timings["queued_s"]


def test_figures_of_a_model_without_page_groups(make_llm):
    figures = make_llm(windows=()).engine.figures()
    assert (figures.num_pages, figures.num_held_pages, figures.num_named_pages, figures.page_use) == (0, 0, 0, 0)


def test_a_request_keeps_its_fields_in_slots():
    """CPython reads attributes more slowly from a class with more than 30 of them in a dictionary."""
    assert not hasattr(Request(0, [5], 1), "__dict__")
