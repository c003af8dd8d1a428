"""The online benchmark measures what it says: the trace, the moments that count, the capacity."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from penstock.bench.charts.latency_chart import draw_latency
from penstock.bench.online import OnlineBench, RateReport, SyntheticTrace, _Run, bench_online
from penstock.engine.options import EngineOptions
from penstock.errors import InvalidArgumentError
from penstock.runtime.program import ProgramLimits
from tests.support.command import DEMO
from tests.support.engine_requests import prompt_of
from tests.support.errors import raises

SMALL = SyntheticTrace(num_requests=6, prompt_tokens=40, new_tokens=6, shared_tokens=32)


def test_a_trace_has_the_lengths_that_were_asked_for():
    equal = SyntheticTrace(num_requests=5, prompt_tokens=30, new_tokens=7, spread=0).lengths()
    assert equal == ([30] * 5, [7] * 5)
    trace = SyntheticTrace(num_requests=2000, prompt_tokens=100, new_tokens=50, shared_tokens=60)
    prompts, answers = trace.lengths()
    assert (prompts, answers) == trace.lengths()
    assert 90 < sorted(prompts)[1000] < 110
    assert 45 < sorted(answers)[1000] < 55
    assert (min(prompts), max(prompts), max(answers)) == (61, 400, 200)


def test_latencies_count_from_when_a_request_was_due(make_llm, monkeypatch):
    engine = make_llm(max_requests=1).engine
    clock = [0.0]
    monkeypatch.setattr("penstock.bench.online.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("penstock.bench.online.time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    honest = engine.step

    def one_second_steps():
        clock[0] += 1
        return honest()

    monkeypatch.setattr(engine, "step", one_second_steps)
    run = _Run(engine, [prompt_of(5, i) for i in range(3)], [4, 2, 1], rate=0.0)
    run.rate, run.due = 1.0, [0.0, 0.5, 20.0]
    report = run.report()
    assert run.first_token == [1.0, 4.5, 1.0]  # the second one waits for the four steps of the first
    assert run.between == [1.0] * 4
    assert run.whole == [4.0, 5.5, 1.0]
    assert report.seconds == 21.0
    assert report.output_tokens_per_s == 7 / 21
    assert (report.max_running, report.max_waiting) == (1, 1)


def test_arrivals_are_a_poisson_process(make_llm):
    run = _Run(make_llm().engine, [[5]] * 4000, [1] * 4000, rate=50.0)
    gaps = np.diff(run.due)
    assert run.due[0] == 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)  # an exponential's is its mean
    assert (gaps < 0.25 / 50).mean() == pytest.approx(1 - np.exp(-0.25), rel=0.1)


@pytest.fixture(scope="module")
def report():
    limits = ProgramLimits(max_requests=4, context_len=256)
    return bench_online(OnlineBench(DEMO, SMALL, rates=(50.0,), shares=(0.5,), limits=limits))


def test_a_run_offline_and_one_per_rate(report):
    rates = [run.rate for run in report.runs]
    assert rates[0] == 0
    assert rates[1:] == sorted([50.0, report.runs[0].requests_per_s / 2])
    for run in report.runs:
        assert 0 < run.first_token_s[50] <= run.first_token_s[99] <= run.request_s[99] <= run.seconds
        assert 0 < run.between_tokens_s[50] <= run.between_tokens_s[99]
        assert run.hit_rate > 0.2
        assert run.num_preemptions == 0


def test_without_the_cache_nothing_is_shared():
    limits = ProgramLimits(max_requests=4, context_len=256)
    off = EngineOptions(prefix_cache=False)
    report = bench_online(OnlineBench(DEMO, SMALL, rates=(100.0,), shares=(), limits=limits, options=off))
    assert [run.hit_rate for run in report.runs] == [0, 0]


def test_the_picture_is_sound_and_shows_every_rate(report):
    picture = draw_latency(report, "a <model> & more")
    root = ElementTree.fromstring(picture)  # noqa: S314 - our own picture
    name = "{http://www.w3.org/2000/svg}"
    assert len([one for one in root.iter(f"{name}path") if one.get("stroke-width") == "2"]) == 6
    assert len(root.findall(f".//{name}circle")) == 6 * 2
    assert "a &lt;model&gt; &amp; more" in picture
    for tag, keys in (("circle", ("cx", "cy")), ("text", ("x", "y"))):
        for item in root.findall(f".//{name}{tag}"):
            x, y = (float(item.get(key) or -1) for key in keys)
            assert 0 <= x <= 920
            assert 0 <= y <= 348
    assert isinstance(report.runs[1], RateReport)


@pytest.mark.parametrize(
    ("fields", "field", "fact"),
    [
        ({"rates": (0.0,)}, "rate", ".* 0.0"),
        ({"rates": (1.0,) * 33}, "rate", "^rate .* 32"),
        ({"trace": SyntheticTrace(prompt_tokens=5000)}, "prompt_tokens", "holds 1024"),
    ],
)
def test_unmeasurable_settings_are_refused(fields, field, fact):
    with raises(InvalidArgumentError, param=field, match=fact):
        bench_online(OnlineBench(DEMO, **fields))


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"num_requests": 0}, "num_requests", "num_requests"),
        ({"prompt_tokens": True}, "prompt_tokens", "prompt_tokens"),
        ({"new_tokens": 1.5}, "new_tokens", "new_tokens"),
        ({"spread": 3.0}, "spread", "spread"),
        ({"shared_tokens": 256}, "shared_tokens", "less than prompt_tokens 256"),
    ],
)
def test_a_bad_trace_is_refused_by_name(fields, field, message):
    with raises(InvalidArgumentError, param=field, match=message):
        SyntheticTrace(**fields)
