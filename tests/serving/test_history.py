"""The history of a model since the service started: bounded, and with the right means."""

from __future__ import annotations

import json
import time

import pytest

from penstock.serving.history import MAX_SAMPLES, Series
from tests.support.http_service import until


def test_long_history_keeps_its_means_and_its_bound():
    series = Series()
    for second in range(10_000):
        series.add(second + 1.0, 1.0, (float(second % 2), 1.0, 0.1, 2.0, 3.0, 0.5))
    assert MAX_SAMPLES // 2 <= len(series.at_s) <= MAX_SAMPLES
    assert series.interval_s == 16.0
    assert series.at_s == sorted(series.at_s)
    assert all(len(values) == len(series.at_s) for values in series.columns.values())
    assert series.columns["output_tokens_per_s"] == pytest.approx([0.5] * len(series.at_s))
    assert set(series.columns["held_pages_share"]) == {0.5}
    assert series.at_s[0] == pytest.approx(16.0)
    assert series.at_s[-1] > 10_000 - 16.0


def test_history_has_rates_of_each_model(serve):
    service = serve("fake")
    history = service.gateway.admission.metrics.history
    service.do(sampled(history, 1.0))
    answer = service.post("/v1/completions", prompt="some words", max_tokens=16, temperature=0, ignore_eos=True)
    until(lambda: service.models.get("fake").figures().num_output_tokens == 16)
    service.do(sampled(history, 2.0))
    found = json.loads(service.ask("GET", "/status/history")[2])["models"]["fake"]
    assert len({len(values) for name, values in found.items() if name != "interval_s"}) == 1
    assert found["at_s"] == sorted(found["at_s"])
    start, end = found["at_s"]
    assert found["output_tokens_per_s"][1] * (end - start) == pytest.approx(16)
    assert found["prompt_tokens_per_s"][1] * (end - start) == pytest.approx(answer["usage"]["prompt_tokens"])


async def sampled(history, ahead_s: float) -> None:
    history.sample(time.perf_counter() + ahead_s)
