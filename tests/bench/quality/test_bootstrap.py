"""Intervals over windows: those of plain numpy, and they cover the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.bench.quality.bootstrap import bootstrap_mean, window_sums


def test_the_interval_is_that_of_a_plain_bootstrap() -> None:
    random = np.random.default_rng(3)
    window = np.repeat(np.arange(40), random.integers(5, 30, 40))
    values = random.normal(0.3, 1, len(window)) + random.normal(0, 1, 40)[window]
    interval = bootstrap_mean(*window_sums(values, window))
    means = []
    for _ in range(4000):
        drawn = np.concatenate([values[window == pick] for pick in random.integers(0, 40, 40)])
        means.append(drawn.mean())
    assert interval.value == pytest.approx(values.mean())
    assert interval.standard_error == pytest.approx(np.std(means), rel=0.05)
    assert (interval.low, interval.high) == pytest.approx(tuple(np.percentile(means, (2.5, 97.5))), abs=0.05)
    assert interval.detectable == pytest.approx(2.8016 * interval.standard_error, rel=1e-4)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    random, counts = np.random.default_rng(5), np.full(60, 8.0)
    intervals = [bootstrap_mean(random.normal(2, 3, 60), counts, draws=400) for _ in range(200)]
    covered = sum(one.low <= 2 / 8 <= one.high for one in intervals if one.low is not None and one.high is not None)
    assert 0.88 < covered / 200 < 0.99


def test_one_window_has_no_interval_and_equal_draws_are_equal() -> None:
    alone = bootstrap_mean(np.array([3.0]), np.array([2.0]))
    assert (alone.value, alone.low, alone.standard_error) == (1.5, None, None)
    assert not alone.excludes_zero
    sums, counts = np.arange(1.0, 9.0), np.full(8, 2.0)
    assert bootstrap_mean(sums, counts) == bootstrap_mean(sums, counts)
    assert bootstrap_mean(sums, counts).excludes_zero
