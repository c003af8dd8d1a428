"""A measurement ends with what limits it, how far it is from that, and what to try."""

from __future__ import annotations

import pytest

from penstock.bench import verdict
from penstock.bench.measure import Report
from penstock.bench.phase_report import PhaseReport, Row


def report(share: float, bound: str, scheme: str) -> Report:
    shares = {"prefill": 0.7, "decode": {1: share}}
    limits = {"prefill_peak": "int8"}
    return Report(
        "llama", scheme, "avx2", 2, 8, 8, weight_bytes_per_token=5_000_000, limits=limits, share_of_limit=shares,
        decode_bound={1: bound},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("share", "bound", "scheme", "expected"),
    [
        (0.9, "memory", "bf16", "limited by memory bandwidth, of which it reaches 90%. Export with --scheme w8a8 or"),
        (0.9, "memory", "w8a8", "--scheme w4a8"),
        (0.9, "memory", "w4a8", "more requests at once"),
        (0.8, "int8", "w8a8", "limited by int8 arithmetic, of which it reaches 80%. More cores"),
        (0.8, "f32", "f32", "--scheme w8a8"),
        (0.3, "memory", "w8a8", "only 30%; `penstock profile` shows"),
        (2.65, "memory", "w8a8", "5.0 MB per token fit into the CPU caches. Memory does not limit"),
    ],
)
def test_bench_names_the_limit_and_the_remedy(
    share: float, bound: str, scheme: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "cache_bytes", lambda: 32 << 20)
    prefill, decode = verdict.describe_bench(report(share, bound, scheme))
    assert prefill.startswith("prefill: limited by int8 arithmetic, of which it reaches 70%")
    assert expected in decode


def test_a_large_model_above_the_limit_asks_for_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "cache_bytes", lambda: 1 << 20)
    assert "measure again" in verdict.describe_bench(report(1.2, "memory", "w8a8"))[1]


def test_profile_names_long_waits() -> None:
    row = Row("linear", "linear", 1, 0.3, 0.0, 0.4, limit="memory", share_of_limit=0.5)
    between = {"waiting for other threads": 0.6}
    phase = PhaseReport("decode", 1, 1, 8, 1, 2, 1, 1, 1.0, 1.0, 1e9, {}, [row], [row], between, {})
    text = verdict.describe_phase(phase, "w8a8")
    assert text.startswith("decode: the nearest limit is memory bandwidth, of which it reaches only 20%")
    assert "Threads wait for each other 60% of the time" in text
