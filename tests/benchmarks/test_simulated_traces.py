"""The two traces of routing: caches short, and caches ample."""

from __future__ import annotations

import json

import pytest

from benchmarks.simulated_traces import TRACES, requests
from penstock.cluster.replica import ReplicaLimits
from penstock.cluster.simulate import Simulation, SimulationReport, simulate
from penstock.cluster.trace import parse_trace


def report_of(name: str, num_requests: int, policy: str) -> SimulationReport:
    shape = TRACES[name]
    lines = (json.dumps(request) for request in requests(shape, num_requests))
    settings = Simulation(shape.replicas, policy, limits=ReplicaLimits(num_pages=shape.pages))
    return simulate(parse_trace(lines), settings)


@pytest.mark.long
def test_prefixes_pay_where_caches_are_short() -> None:
    shape = TRACES["short"]
    num_pages = shape.num_prefixes * shape.prefix_tokens // 32
    assert shape.pages < num_pages < shape.replicas * shape.pages, (
        "all caches hold the prefixes, but no single one does"
    )
    least, prefix = (report_of("short", 2000, policy) for policy in ("least-loaded", "prefix"))
    assert prefix.prefilled_tokens * 2 <= least.prefilled_tokens
    assert prefix.ttft["p90"] < least.ttft["p90"]
    assert prefix.load_imbalance < 0.1


def test_prefixes_cost_nothing_where_caches_are_ample() -> None:
    least, prefix = (report_of("ample", 1000, policy) for policy in ("least-loaded", "prefix"))
    assert prefix.prefilled_tokens <= least.prefilled_tokens
    assert prefix.ttft["p90"] <= least.ttft["p90"]
    assert prefix.e2e["p90"] <= least.e2e["p90"]
    assert prefix.load_imbalance < 0.1


def test_a_seed_gives_the_same_trace() -> None:
    shape = TRACES["ample"]
    assert [*requests(shape, 9, 3)] == [*requests(shape, 9, 3)]
    assert [*requests(shape, 9, 3)] != [*requests(shape, 9, 4)]
