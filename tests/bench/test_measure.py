"""What bench reports is checked against what the machine can do."""

from __future__ import annotations

import pytest

from penstock.bench.measure import Bench, _Work, bench
from penstock.bench.profile import Profile, profile
from penstock.core import native
from penstock.errors import InternalError, InvalidArgumentError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.passes.append_tail import append_tail
from penstock.runtime.export_ranks import export_ranks
from penstock.runtime.machine import peak_rss_bytes
from tests.support.command import DEMO
from tests.support.errors import raises

SMALL = {"prompt_tokens": 20, "new_tokens": 4, "threads": 1}


def test_a_figure_above_the_compute_peak_is_an_error(monkeypatch):
    monkeypatch.setattr(native, "probe_compute", lambda *_args: 1.0)
    with pytest.raises(InternalError, match=r"^prefill: .* int8"):
        bench(Bench(DEMO, batches=(1,), **SMALL))


def test_a_decode_faster_than_memory_is_repeated_and_marked(monkeypatch):
    probes = []

    def slow_memory(*_args: object) -> float:
        probes.append(1)
        return 1e6

    monkeypatch.setattr(native, "probe_bandwidth", slow_memory)
    report = bench(Bench(DEMO, batches=(1, 2), **SMALL))
    assert report.inconsistent == [1, 2]
    assert len(probes) == 2 * 2 * 2  # before and after, measured twice, two batches
    assert report.limits["read_bytes_per_s"] == {"lowest": 1e6, "highest": 1e6}


def test_all_prompts_are_computed_before_decode_is_measured():
    report = bench(Bench(DEMO, batches=(8,), prompt_tokens=300, new_tokens=4))
    assert list(report.decode_tokens_per_s) == [8]


def test_shares_are_counted_from_the_graph(monkeypatch):
    monkeypatch.setattr(native, "probe_compute", lambda *_args: 1e15)
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_args: 1e15)
    report = bench(Bench(DEMO, batches=(1,), **SMALL))
    seconds = 1 / report.decode_tokens_per_s[1]
    body_and_head = 2 * (6 * (256 * 512 + 256 * 256 + 3 * 256 * 704) + 256 * 4096)
    at_least = body_and_head / 1e15 / seconds
    read = report.weight_bytes_per_token / 1e15 / seconds
    # The product may differ from the same figures multiplied in another order by a rounding.
    assert at_least * (1 - 1e-9) <= report.share_of_limit["decode"][1] <= at_least + 2 * read
    assert report.inconsistent == []
    assert report.prefill_tokens_per_s == pytest.approx(20 / report.first_token_s)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("batch", {"batches": ()}),
        ("batch", {"batches": (0,)}),
        ("new_tokens", {"new_tokens": 0}),
        ("prompt_tokens", {"prompt_tokens": True}),
    ],
)
def test_sizes_are_checked(param, fields):
    with raises(InvalidArgumentError, param=param):
        Bench(DEMO, **fields)


def test_the_head_is_known_behind_a_tail():
    graph, _ = read_graph(DEMO)
    plain = _Work.of(graph, 64)
    append_tail(graph, "argmax")
    assert _Work.of(graph, 64) == plain
    assert plain.head_ops == 2 * 256 * 4096


@pytest.mark.long
def test_ranks_are_measured_as_one():
    whole, ranks = (bench(Bench(DEMO, batches=(1,), tensor_parallel_size=world, **SMALL)) for world in (1, 2))
    assert (ranks.num_ranks, ranks.num_threads) == (2, 1)
    assert ranks.weight_bytes_per_token == whole.weight_bytes_per_token
    assert ranks.peak_rss_bytes > peak_rss_bytes()  # of this process alone


def test_what_is_cut_for_ranks_is_refused(tmp_path):
    export_ranks(DEMO, tmp_path / "parts", 2)
    with raises(UnsupportedError, param="model"):
        bench(Bench(tmp_path / "parts", batches=(1,), tensor_parallel_size=2, **SMALL))


def test_a_profile_of_ranks_is_refused():
    with raises(UnsupportedError, param="tensor_parallel_size", match="got 2"):
        profile(Profile(DEMO, tensor_parallel_size=2))
