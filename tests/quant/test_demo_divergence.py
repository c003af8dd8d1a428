"""The divergence of the demo model's schemes from float32 stays what it was.

Equal bits give an equal divergence, on every instruction level and with any number of threads, so a second run has no
noise of its own.  A change that only orders float additions otherwise moves values across a boundary of rounding here
and there: up in one window, down in another.  Its noise is the interval of the paired differences of the windows.  A
change beyond that is one of quality.  If it is wanted, or better, write down what the failure prints.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.bench.quality.bootstrap import MIN_WINDOWS, bootstrap_mean, window_sums
from penstock.bench.quality.scores import score_windows
from penstock.bench.quality.texts import open_text
from penstock.bench.quality.windows import WindowRule, cut_text
from penstock.llm.llm import LLM
from tests.support.command import FOLDER

RECORDED: dict[str, list[float]] = json.loads(Path(__file__).with_name("demo_divergence.json").read_text())
"""By scheme the mean divergence of each window, in nats per token."""
WINDOW_TOKENS, NUM_WINDOWS = 256, 16
LEAST_NOISE = {"w8a8": 0.005, "w4a8": 0.005, "bf16": 0.1}
"""The share of a divergence that no change has to explain, because 16 windows that happen to agree would make the
interval nearly empty.  Integers have the same bits everywhere; processors with instructions for bf16 add its products
in another order, and its divergence of 1e-5 is made of the roundings that this moves."""


def moves_beyond_noise(scheme: str, now: NDArray[np.float64], before: NDArray[np.float64]) -> bool:
    """Return True if windows' divergences changed by more than chance explains: three standard errors of the pairs."""
    change = bootstrap_mean(now - before, np.ones(len(now)))
    assert change.standard_error is not None
    return abs(change.value) > max(3 * change.standard_error, LEAST_NOISE[scheme] * float(before.mean()))


def measure(scheme: str) -> NDArray[np.float64]:
    """Return the mean divergence of each window; keys and values are float32, whose bits no processor changes."""
    with LLM(FOLDER, scheme=scheme, kv_cache="f32") as model, LLM(FOLDER, scheme="f32", kv_cache="f32") as original:
        rule = WindowRule(length=WINDOW_TOKENS, max_windows=NUM_WINDOWS).resolve(1024)
        windows = cut_text(open_text(FOLDER / "valid.txt"), model.tokenizer, rule).windows
        scores = score_windows([("model", model), ("against", original)], windows)
    sums, counts = window_sums(scores.divergence, scores.window)
    return sums / counts


@pytest.mark.long
@pytest.mark.parametrize("scheme", RECORDED)
def test_the_divergence_is_what_it_was(scheme: str) -> None:
    now, before = measure(scheme), np.array(RECORDED[scheme])
    assert len(now) == NUM_WINDOWS >= MIN_WINDOWS
    assert not moves_beyond_noise(scheme, now, before), f"{before.mean():.6f} became {now.mean():.6f}: {now.tolist()}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda values, noise: values, False),
        (lambda values, noise: values * (1 + 0.02 * noise), False),
        (lambda values, noise: values * 1.03, True),
        (lambda values, noise: values * 0.97, True),
        (lambda values, noise: values * (1.05 + 0.02 * noise), True),
    ],
    ids=["equal", "noise", "worse", "better", "worse-with-noise"],
)
def test_noise_passes_and_a_change_of_quality_does_not(
    change: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]], expected: bool
) -> None:
    noise = np.random.default_rng(4).standard_normal(NUM_WINDOWS)
    for scheme in ("w8a8", "w4a8"):
        values = np.array(RECORDED[scheme])
        assert moves_beyond_noise(scheme, change(values, noise - noise.mean()), values) is expected
