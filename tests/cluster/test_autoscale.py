"""The number of replicas under a virtual clock: a burst, a lull, and a load that comes and goes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.cluster.autoscale import Autoscaler, Load, ScalePolicy, parse_range
from penstock.errors import InvalidArgumentError
from tests.support.errors import raises

POLICY = ScalePolicy(1, 8, queue_s=2.0, down_after_s=60.0)


def history(scaler: Autoscaler, load: Callable[[float], Load], seconds: float, start: float = 0.0) -> list[int]:
    """The numbers that were wanted over ``seconds``, each once per change, looked at each half second."""
    wanted = [scaler.wanted]
    for step in range(int(seconds * 2)):
        now = start + step / 2
        if scaler.update(now, load(now)) != wanted[-1]:
            wanted.append(scaler.wanted)
    return wanted


def test_a_burst_adds_and_a_lull_removes() -> None:
    scaler = Autoscaler(POLICY, 1)
    assert history(scaler, lambda now: Load(queued_s=9.0), 10) == [1, 5], "all at once, not one by one"
    assert history(scaler, lambda now: Load(num_busy=1.4), 55, 10) == [5], "not yet"
    assert history(scaler, lambda now: Load(num_busy=1.4), 60, 65) == [5, 3], "1.4 of 0.9 each leave three 60 % full"
    assert history(scaler, lambda now: Load(), 200, 125) == [3, 1]


def test_a_moment_of_load_adds_nothing() -> None:
    scaler = Autoscaler(POLICY, 1)
    assert history(scaler, lambda now: Load(queued_s=20.0 * (now == 5.0)), 60) == [1]


def test_a_load_that_comes_and_goes_does_not_oscillate() -> None:
    """Twenty seconds of load and twenty without, for an hour."""
    scaler = Autoscaler(POLICY, 1)
    assert history(scaler, lambda now: Load(num_busy=3.0 if now % 40 < 20 else 0.1), 3600) == [1, 4]


@pytest.mark.parametrize("busy", [0.85, 0.9, 0.95, 1.8, 1.85, 2.0])
def test_a_load_near_a_limit_changes_at_most_once(busy: float) -> None:
    scaler = Autoscaler(POLICY, 1)
    wanted = history(scaler, lambda now: Load(num_busy=busy + 0.1 * (now % 1)), 3600)
    assert len(wanted) <= 2
    assert wanted == sorted(wanted)


def test_the_limits_hold() -> None:
    scaler = Autoscaler(ScalePolicy(2, 3, down_after_s=10.0), 1)
    assert history(scaler, lambda now: Load(queued_s=1e6), 10) == [2, 3]
    assert history(scaler, lambda now: Load(), 100, 10) == [3, 2]


def test_none_is_left_and_the_next_request_wakes_one_at_once() -> None:
    scaler = Autoscaler(ScalePolicy(0, 4, down_after_s=30.0), 1)
    assert history(scaler, lambda now: Load(num_busy=0.01), 300) == [1], "one request is enough to stay"
    assert history(scaler, lambda now: Load(), 60, 300) == [1, 0]
    assert scaler.update(360.0, Load(num_busy=0.03)) == 1
    assert history(scaler, lambda now: Load(), 29, 361) == [1]


@pytest.mark.parametrize("text", ["", "x", "1..", "..3", "1.5", "-1..2", "1..2..3", "1-3", "١..٣"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with raises(InvalidArgumentError, param="replicas"):
        parse_range(text)


def test_a_range() -> None:
    assert (parse_range("3"), parse_range("0..16")) == ((3, 3), (0, 16))
    with raises(InvalidArgumentError, param="replicas", match=r"5\.\.4"):
        parse_range("5..4")
    with raises(InvalidArgumentError, param="replicas"):
        ScalePolicy(5, 4)
    with raises(InvalidArgumentError, param="replicas"):
        ScalePolicy(0, 0)


@pytest.mark.parametrize(("up_after_s", "down_after_s"), [(1.0, 12.0), (0.0, 3.0), (5.0, 2.0)])
def test_the_extremes_are_those_of_all_samples(up_after_s: float, down_after_s: float) -> None:
    """The numbers that are wanted, against those from every sample in the two windows; at most a few are kept."""
    draw, now = random.Random(5), 0.0
    scaler = Autoscaler(ScalePolicy(1, 50, up_after_s=up_after_s, down_after_s=down_after_s), 1)
    samples: list[tuple[float, float]] = []
    for _ in range(4000):
        now += draw.choice([0.0, 0.25, 0.5, 2.0])
        demand = draw.choice([0.0, 3.0, draw.uniform(0, 20)])
        scaler.update(now, Load(queued_s=demand * 2.0))
        samples.append((now, demand))
        window = [(at, value) for at, value in samples if at > now - max(up_after_s, down_after_s)]
        assert scaler._least[0][1] == min(value for at, value in window if at >= now - up_after_s)
        assert scaler._most[0][1] == max(value for _, value in window)
        samples = window
