"""The simulator: many steps at once equal one by one, tokens are accounted for, prefixes pay where caches are short."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import pytest

from penstock.cluster.autoscale import ScalePolicy
from penstock.cluster.costs import COSTS_348M, StepCosts, read_costs, write_costs
from penstock.cluster.handovers import CopyCosts
from penstock.cluster.replica import ReplicaLimits
from penstock.cluster.roles import WorkerRoles
from penstock.cluster.routing import POLICIES, ReplicaRouter
from penstock.cluster.simulate import Simulation, simulate
from penstock.cluster.trace import SegmentKeys, TraceRequest, parse_trace
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.serving.workers.worker_connection import page_keys
from tests.support.errors import raises
from tests.support.marks import mostly_long

LONG_CONTEXTS = replace(COSTS_348M, prefill_step_s=0.002, prefill_context_s=2e-7, decode_context_s=3e-6)


def trace_of(num_requests: int, rate: float, num_groups: int = 6, seed: int = 1) -> list[TraceRequest]:
    """Requests with one of a few beginnings, some of which arrive at the same time."""
    draw, now, requests = random.Random(seed), 0.0, []
    for number in range(num_requests):
        if number % 7:
            now = round(now + draw.expovariate(rate), 6)
        segments = [(f"system {draw.randrange(num_groups)}", 200), (f"user {number}", draw.randint(1, 150))]
        requests.append(TraceRequest(now, segments, draw.randint(1, 128)))
    return requests


@pytest.mark.parametrize("policy", mostly_long(POLICIES, "prefix"))
@pytest.mark.parametrize("costs", [COSTS_348M, LONG_CONTEXTS], ids=["", "contexts"])
@pytest.mark.parametrize(
    ("limits", "rate"),
    [(ReplicaLimits(), 30.0), (ReplicaLimits(num_pages=40, max_requests=8), 12.0)],
    ids=["room", "short of pages"],
)
def test_many_steps_at_once_equal_one_by_one(policy: str, limits: ReplicaLimits, rate: float, costs: StepCosts) -> None:
    trace = trace_of(1000, rate)
    settings = Simulation(4, policy, costs, limits=limits)
    at_once, stepwise = simulate(trace, settings), simulate(trace, replace(settings, is_stepwise=True))
    assert asdict(at_once) == asdict(stepwise)
    assert at_once.requests == 1000
    assert at_once.output_tokens == sum(request.output_tokens for request in trace)
    assert (at_once.preemptions > 0) == (limits.num_pages == 40), "the second form is short of pages"


def test_every_prompt_token_is_computed_or_cached() -> None:
    trace = trace_of(300, 20.0)
    report = simulate(trace, Simulation(3))
    assert report.preemptions == 0
    assert report.prefilled_tokens + report.cached_tokens == sum(request.prompt_tokens for request in trace)
    assert report.cached_tokens > 0
    assert 0 < report.utilisation <= 1


def test_one_request_takes_what_its_steps_cost() -> None:
    costs = replace(COSTS_348M, prefill_token_s=0.001, decode_step_s={1: 0.02, 2: 0.03})
    report = simulate([TraceRequest(5.0, [("a", 100)], 11)], Simulation(costs=costs))
    assert report.ttft["p50"] == pytest.approx(0.1)
    assert report.tpot["p50"] == pytest.approx(0.02)
    assert report.e2e["p99"] == pytest.approx(0.3)
    assert report.seconds == pytest.approx(0.3)
    assert (report.steps, report.utilisation) == (11, 1.0)


def test_contexts_cost_their_tokens() -> None:
    costs = replace(
        COSTS_348M,
        prefill_token_s=0.001,
        decode_step_s={1: 0.02},
        prefill_step_s=0.005,
        prefill_context_s=1e-5,
        decode_context_s=1e-4,
    )
    report = simulate([TraceRequest(0.0, [("a", 100)], 11)], Simulation(costs=costs))
    first = 0.005 + 0.1 + 1e-5 * (100 * 99 / 2)
    assert report.ttft["p50"] == pytest.approx(first)
    assert report.e2e["p50"] == pytest.approx(first + sum(0.02 + 1e-4 * (100 + i) for i in range(10)))
    two = costs.on_ranks(2)
    assert (two.decode_context_s, two.prefill_context_s) == (costs.decode_context_s / 2, costs.prefill_context_s / 2)


def test_a_request_costs_its_part_once() -> None:
    costs = replace(COSTS_348M, prefill_token_s=0.001, decode_step_s={1: 0.02}, prefill_step_s=0.005, request_s=0.003)
    waiting = [TraceRequest(time, [(str(time), 20)], 1) for time in (0.0, 0.01, 0.02)]
    report = simulate(waiting, Simulation(costs=costs))
    assert report.seconds == pytest.approx(0.025 + 0.045 + 0.003), "a step of prompts includes that of one"
    beside = [TraceRequest(0.0, [("a", 20)], 11), TraceRequest(0.05, [("b", 20)], 1)]
    report = simulate(beside, Simulation(costs=costs))
    assert report.seconds == pytest.approx(0.025 + 10 * 0.02 + 0.020 + 0.003)
    assert costs.on_ranks(2).request_s == costs.request_s


def test_an_empty_trace_has_no_percentiles() -> None:
    report = simulate([], Simulation(2))
    assert (report.requests, report.ttft, report.seconds) == (0, {}, 0.0)


def test_keys_name_the_content_of_segments() -> None:
    keys = SegmentKeys()
    whole = keys.of_prompt([("a", 100), ("b", 60)])
    assert len(whole) == 5
    assert keys.of_prompt([("a", 40), ("c", 99)])[:1] == whole[:1], "40 tokens of a are its first 40"
    assert keys.of_prompt([("a", 40), ("c", 99)])[1] != whole[1]
    assert keys.of_prompt([("a", 99), ("b", 61)])[:3] == whole[:3]
    assert keys.of_prompt([("a", 99), ("b", 61)])[3] != whole[3], "b begins one token earlier"
    assert keys.of_prompt([("a", 100), ("b", 96)])[:5] == whole
    assert not set(keys.of_prompt([("b", 160)])) & set(whole), "what is before a page belongs to its key"
    assert keys.of_prompt([("a", 31)]) == []


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "expected one JSON object"),
        ("[1]", "expected one JSON object, got"),
        ('{"time": 1, "segments": [["a", 1]]}', "output_tokens: expected a value, got none"),
        ('{"time": 1, "segments": [["a", 1]], "output_tokens": 1, "x": 2}', "x: expected one of the fields"),
        ('{"time": -1, "segments": [["a", 1]], "output_tokens": 1}', "time: expected seconds"),
        ('{"time": NaN, "segments": [["a", 1]], "output_tokens": 1}', "time: expected seconds"),
        (
            '{"time": 0.1, "segments": [["a", 1]], "output_tokens": 1}',
            "time: expected at least that of the line before",
        ),
        ('{"time": 1, "segments": [], "output_tokens": 1}', "segments: expected a list"),
        ('{"time": 1, "segments": [["a"]], "output_tokens": 1}', "segments: expected pairs"),
        ('{"time": 1, "segments": [["a", 0]], "output_tokens": 1}', "segments: expected tokens from 1"),
        ('{"time": 1, "segments": [["a", true]], "output_tokens": 1}', "segments: expected tokens from 1"),
        ('{"time": 1, "segments": [["a", 1]], "output_tokens": 1.5}', "output_tokens: expected an integer"),
    ],
)
def test_bad_lines_are_named(line: str, error: str) -> None:
    good = '{"time": 0.5, "segments": [["a", 1]], "output_tokens": 1}'
    with pytest.raises(InvalidFileError, match=f"^t: line 3: {error}"):
        list(parse_trace([good, "", line], "t"))


def test_a_request_that_fits_no_replica_is_named() -> None:
    lines = ['{"time": 0, "segments": [["a", 300]], "output_tokens": 21}']
    with raises(InvalidFileError, param="segments", match="321"):
        simulate(parse_trace(lines), Simulation(limits=ReplicaLimits(num_pages=10)))


def test_costs_lie_on_lines_between_batches() -> None:
    costs = replace(COSTS_348M, decode_step_s={1: 0.01, 5: 0.03, 10: 0.04})
    assert [costs.decode_s(n) for n in (1, 3, 5, 20)] == pytest.approx([0.01, 0.02, 0.03, 0.06])
    two = costs.on_ranks(2)
    assert two.decode_s(1) == pytest.approx(0.005 + costs.exchange_s)
    assert two.prefill_token_s == costs.prefill_token_s / 2
    assert costs.on_ranks(1) is costs
    with raises(InvalidArgumentError, param="tp"):
        costs.on_ranks(0)


def test_costs_are_read_back_and_checked(tmp_path) -> None:
    path = tmp_path / "costs.json"
    write_costs(COSTS_348M, path)
    assert read_costs(path) == COSTS_348M
    text = path.read_text()
    older = [line for line in text.splitlines() if "request_s" not in line and "prefill_step_s" not in line]
    path.write_text("\n".join(older).replace('"decode_context_s": 0.0,', '"decode_context_s": 0.0'))
    assert read_costs(path) == COSTS_348M, "files of earlier versions have fewer fields"
    for old, new, param, fact in (
        ('"tp": 1', '"tp": 0', "tp", "expected an integer"),
        ('"tp": 1', '"ranks": 1', "ranks", "expected one of"),
        ('"model": "348M w8a8", ', "", "model", "expected a value"),
        ('"1": 0.0104', '"none": 0.0104', "decode_step_s", "expected batches"),
        ('"prefill_token_s": 0', '"prefill_token_s": -0', "prefill_token_s", "expected"),
        ('"decode_context_s": 0', '"decode_context_s": -1', "decode_context_s", "expected"),
        ('"request_s": 0', '"request_s": -1', "request_s", "expected"),
    ):
        assert old in " ".join(text.split()), old
        path.write_text(" ".join(text.split()).replace(old, new))
        with raises(InvalidFileError, param=param, match=fact):
            read_costs(path)
    with pytest.raises(FileAccessError):
        read_costs(tmp_path / "none.json")


def test_failed_replicas_lose_no_request() -> None:
    trace = trace_of(1000, 30.0)
    calm, shaken = (simulate(trace, Simulation(4, mtbf_s=mtbf_s, restart_s=2.0)) for mtbf_s in (0.0, 15.0))
    assert calm.failures == calm.retries == 0
    assert shaken.failures > 3
    assert shaken.retries > 3
    assert shaken.requests == 1000
    assert shaken.output_tokens == sum(request.output_tokens for request in trace)
    assert shaken.prefilled_tokens > calm.prefilled_tokens
    assert shaken.e2e["p99"] > calm.e2e["p99"]
    assert shaken == simulate(trace, Simulation(4, mtbf_s=15.0, restart_s=2.0))


@pytest.mark.parametrize("policy", POLICIES)
def test_failures_are_the_same_one_step_at_a_time(policy: str) -> None:
    settings = Simulation(3, policy, LONG_CONTEXTS, mtbf_s=5.0, restart_s=1.0)
    at_once, stepwise = (simulate(trace_of(500, 20.0), replace(settings, is_stepwise=one)) for one in (False, True))
    assert at_once.failures > 3
    assert asdict(at_once) == asdict(stepwise)


def test_requests_wait_while_every_replica_is_down() -> None:
    requests = [TraceRequest(0.0, [("a", 100)], 200), TraceRequest(1.0, [("b", 100)], 200)]
    calm = simulate(requests, Simulation(1))
    report = simulate(requests, Simulation(1, mtbf_s=calm.seconds / 2, restart_s=100.0))
    assert report.failures > 0
    assert report.output_tokens == 400
    assert report.e2e["p99"] > 100


def waves(num_requests: int) -> list[TraceRequest]:
    """Twenty seconds with many requests, as many with few, and so on."""
    draw, now, requests = random.Random(3), 0.0, []
    for number in range(num_requests):
        now += draw.expovariate(0.2 if now // 20 % 2 else 30.0)
        segments = [("system", 200), (f"user {number}", draw.randint(1, 150))]
        requests.append(TraceRequest(now, segments, draw.randint(1, 128)))
    return requests


@pytest.mark.long
@pytest.mark.parametrize("low", [0, 1])
def test_the_number_of_replicas_follows_the_load(low: int) -> None:
    trace = waves(1500)
    scale = ScalePolicy(low, 6, down_after_s=15.0)
    settings = Simulation(1, scale=scale, start_s=2.0)
    report, fixed = simulate(trace, settings), simulate(trace, Simulation(6))
    assert report.output_tokens == fixed.output_tokens, "no request is lost"
    assert report.replicas > 1
    assert 2 <= report.scalings < 20, "a few up and a few down for each wave"
    assert report.replica_seconds < 0.8 * fixed.replica_seconds
    assert 0 < report.utilisation <= 1
    assert asdict(report) == asdict(simulate(trace, replace(settings, is_stepwise=True)))


def test_the_last_replica_ends_and_a_request_waits() -> None:
    trace = [TraceRequest(0.0, [("a", 50)], 5), TraceRequest(100.0, [("b", 50)], 5)]
    report = simulate(trace, Simulation(1, scale=ScalePolicy(0, 2, down_after_s=10.0), start_s=3.0))
    assert report.ttft["p99"] > 2.9
    assert report.ttft["p50"] < 3.0
    assert (report.replicas, report.scalings) == (1, 2)
    assert report.replica_seconds < 20.0


def test_scaling_with_failures_is_refused() -> None:
    with raises(InvalidArgumentError, param="mtbf_s"):
        Simulation(scale=ScalePolicy(1, 2), mtbf_s=1.0)


def test_routing_looks_at_as_many_pages_as_in_the_service(monkeypatch) -> None:
    """The same leading pages of a long prompt; the replica still shares all of its pages."""
    looked: list[int] = []

    class Spy(ReplicaRouter):
        def route(self, num_tokens, keys, session="", places=None):
            looked.append(len(keys))
            return super().route(num_tokens, keys, session, places)

        def begin(self, place, num_queued, keys, session=""):
            looked.append(len(keys))
            return super().begin(place, num_queued, keys, session)

    monkeypatch.setattr("penstock.cluster.simulate.ReplicaRouter", Spy)
    requests = [TraceRequest(time, [("book", 20_000)], 4) for time in (0.0, 1000.0)]
    report = simulate(requests, Simulation(replicas=2, limits=ReplicaLimits(num_pages=2048)))
    assert set(looked) == {len(page_keys(range(20_000), ""))}
    assert report.cached_tokens > 19_000


APART = replace(
    COSTS_348M, prefill_token_s=0.001, decode_step_s={1: 0.02, 2: 0.03}, prefill_step_s=0.005, request_s=0.0
)


def test_a_handover_takes_what_its_steps_and_copies_cost() -> None:
    """By hand: prefill, tokens in the first replica during the copy, and those of the second one."""
    settings = Simulation(2, costs=APART, roles=WorkerRoles(1, 1), copies=CopyCosts(0.02, 0.01))
    report = simulate([TraceRequest(0.0, [("a", 100)], 11)], settings)
    first = 0.005 + 0.1
    assert report.ttft["p50"] == pytest.approx(first)
    # 3 full pages: the copy takes 0.05 s, so the first replica computes 3 more tokens of 0.02 s; the second one
    # computes the text behind 96 tokens, 4 of the prompt and 4 of the answer, and then 6 tokens
    second = max(0.005 + (104 - 96) * 0.001, 0.02)
    assert report.e2e["p50"] == pytest.approx(first + 3 * 0.02 + second + 6 * 0.02)
    assert (report.roles, report.handovers, report.copied_pages) == ("1+1", 1, 3)
    assert (report.prefilled_tokens, report.cached_tokens, report.output_tokens) == (104, 0, 11)


def test_short_prompts_and_full_replicas_hand_over_nothing() -> None:
    settings = Simulation(2, costs=APART, roles=WorkerRoles(1, 1), copies=CopyCosts(0.0, 0.0))
    short = simulate([TraceRequest(0.0, [("a", 63)], 5), TraceRequest(9.0, [("b", 640)], 1)], settings)
    assert (short.handovers, short.copied_pages) == (0, 0)
    one_place = replace(settings, limits=ReplicaLimits(max_requests=1))
    both = [TraceRequest(0.0, [("a", 40)], 100), TraceRequest(0.001, [("b", 100)], 5)]
    assert simulate(both, one_place).handovers == 0
    assert simulate(both, settings).handovers == 1


@pytest.mark.parametrize("mtbf_s", [0.0, 4.0])
def test_roles_finish_every_request(mtbf_s: float) -> None:
    """Many steps at once equal one by one, also with failures of both kinds of replicas."""
    trace = trace_of(300, 12.0)
    settings = Simulation(4, roles=WorkerRoles(2, 2), mtbf_s=mtbf_s, restart_s=1.0)
    at_once, stepwise = simulate(trace, settings), simulate(trace, replace(settings, is_stepwise=True))
    assert asdict(at_once) == asdict(stepwise)
    assert at_once.output_tokens == sum(request.output_tokens for request in trace)
    assert at_once.handovers > 100
    assert (at_once.failures > 0) == (mtbf_s > 0)


@pytest.mark.parametrize("seed", range(6))
def test_a_target_that_fails_before_a_handover_loses_nothing(seed: int) -> None:
    trace = [replace(request, output_tokens=1 + request.output_tokens // 8) for request in trace_of(100, 12.0)]
    settings = Simulation(4, roles=WorkerRoles(2, 2), mtbf_s=1.0, restart_s=0.5, seed=seed)
    at_once, stepwise = simulate(trace, settings), simulate(trace, replace(settings, is_stepwise=True))
    assert asdict(at_once) == asdict(stepwise)
    assert at_once.output_tokens == sum(request.output_tokens for request in trace)


def test_prompts_delay_no_answer_of_another_replica() -> None:
    """What roles are for: long prompts beside answers make their tokens uneven, unless they are computed elsewhere."""
    answers = [TraceRequest(0.0, [(f"a {i}", 70)], 400) for i in range(2)]
    prompts = [TraceRequest(1.0 + i / 2, [(f"p {i}", 2000)], 1) for i in range(6)]
    costs = replace(APART, prefill_token_s=0.0002, decode_step_s={1: 0.02})
    together = simulate([*answers, *prompts], Simulation(2, "round-robin", costs))
    apart = simulate([*answers, *prompts], Simulation(2, costs=costs, roles=WorkerRoles(1, 1)))
    assert apart.handovers == 2
    assert max(apart.tpot.values()) < max(together.tpot.values())


def test_roles_name_all_replicas() -> None:
    with raises(InvalidArgumentError, param="replicas"):
        Simulation(3, roles=WorkerRoles(1, 1))
    with raises(InvalidArgumentError, param="decode_workers"):
        WorkerRoles(1, 0)
