"""Sampling against a plain numpy walk with the same random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.core.native import Context, Sampling, cpu_levels, sample_logits
from penstock.errors import InvalidArgumentError
from tests.support.core_steps import i32, random_numbers, sampling
from tests.support.errors import raises
from tests.support.philox import philox, uniform

LEVELS = [name for name, runnable in cpu_levels() if runnable]
VOCAB, ROWS = 3001, 96


KNOWN_ANSWERS = [  # Random123's kat_vectors
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_reference_generator_gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == expected


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_core_draws_from_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int], context: Context
) -> None:
    """Over equal logits the token is the uniform number times the vocabulary."""
    vocab = 1 << 16
    made = sampling(
        1,
        temperature=np.ones(1, np.float32),
        seed=np.array([key[0] | key[1] << 32], np.uint64),
        counter=np.array([[counter[2] | counter[3] << 32, counter[0] | counter[1] << 32]], np.uint64).view(np.int64),
    )
    ids, logprobs, *_ = sample_logits(context, np.zeros((1, vocab), np.float32), made)
    assert ids[0] == expected[0] >> 16
    assert logprobs[0] == pytest.approx(-np.log(vocab), rel=1e-6)


def reference(logits: npt.NDArray[np.float32], s: Sampling, row: int) -> tuple[int, float]:
    """The token, and how near the walk came to another one."""
    x = logits.astype(np.float64)
    allowed = np.ones(len(x), bool)
    if s.mask is not None:
        allowed = np.unpackbits(s.mask[row].view(np.uint8), bitorder="little")[: len(x)].astype(bool)
    ids = np.flatnonzero(allowed)
    if s.temperature[row] == 0:
        return int(ids[np.argmax(x[ids])]), 1.0
    weights = np.exp((x[ids] - x[ids].max()) / np.float64(s.temperature[row]))
    margin = 1.0
    if s.top_k[row] or s.top_p[row] < 1:
        order = np.lexsort((ids, -x[ids]))[: s.top_k[row] or None]
        ids, weights = ids[order], weights[order]
        reached = np.cumsum(weights) / weights.sum()
        target = float(s.top_p[row])
        kept = int(np.searchsorted(reached, target)) + 1
        margin = float(np.abs(reached - target).min()) if target < 1 else 1.0
        ids, weights = ids[:kept], weights[:kept]
    reached = np.cumsum(weights) / weights.sum()
    u = uniform(int(s.seed[row]), int(s.counter[row, 0]), int(s.counter[row, 1]))
    token = int(ids[min(int(np.searchsorted(reached, u, side="right")), len(ids) - 1)])
    return token, min(margin, float(np.abs(reached - u).min()))


def case(name: str) -> tuple[npt.NDArray[np.float32], Sampling]:
    rng = np.random.default_rng(17)
    logits = (rng.standard_normal((ROWS, VOCAB)) * 3).astype(np.float32)
    logits[:, 7] = logits[:, 1000] = logits.max(axis=1)  # ties
    return logits, sampling(ROWS, **random_numbers(rng, name, ROWS, VOCAB))


@pytest.mark.parametrize("name", ["t", "k", "p", "kp", "m", "km", "pm", "kpm", "g", "gm"])
def test_tokens_are_those_of_the_reference(name: str) -> None:
    """t: temperature alone, k: top_k, p: top_p, m: mask, g: greedy; on every level, with any number of threads."""
    logits, s = case(name)
    expected = [reference(logits[row], s, row) for row in range(ROWS)]
    results = set()
    for level in LEVELS:
        for threads in (1, 3):
            with Context(threads, level) as context:
                ids, logprobs, *_ = sample_logits(context, logits, s)
            results.add(ids.tobytes() + logprobs.tobytes())
    assert len(results) == 1
    near = [row for row, (_, margin) in enumerate(expected) if margin < 1e-6]
    assert len(near) < 3
    for row, (token, _) in enumerate(expected):
        assert row in near or ids[row] == token
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) + exact.max(
        axis=1, keepdims=True
    )
    assert np.allclose(logprobs, exact[np.arange(ROWS), ids], rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_its_company(context: Context) -> None:
    logits, s = case("kp")
    together = sample_logits(context, logits, s).ids
    for row in range(0, ROWS, 7):
        one = slice(row, row + 1)
        arrays = (s.temperature[one], s.top_k[one], s.top_p[one], s.seed[one], s.counter[one])
        ids = sample_logits(context, logits[one], Sampling(*(array.copy() for array in arrays))).ids
        assert ids[0] == together[row]


def test_extremes(context: Context) -> None:
    logits = np.full((4, 40), -np.inf, np.float32)
    logits[:, 17] = -3e38
    logits[3, 20] = 3e38
    temperature = np.array([0, 1e-45, 3e38, 1], np.float32)
    ids, logprobs, *_ = sample_logits(context, logits, sampling(4, temperature=temperature))
    assert ids.tolist() == [17, 17, 17, 20]
    assert (logprobs == 0).all()


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "temperature_nan": ({"temperature": np.array([0, np.nan], np.float32)}, "temperature[1]", "expected 0 or"),
    "temperature_negative": ({"temperature": np.array([-1, 0], np.float32)}, "temperature[0]", ".* got -1"),
    "temperature_infinite": ({"temperature": np.array([0, np.inf], np.float32)}, "temperature[1]", ".* got inf"),
    "top_k": ({"top_k": i32(0, -1)}, "top_k[1]", r"expected 0 \(off\) or more, got -1"),
    "top_p_zero": ({"top_p": np.array([1, 0], np.float32)}, "top_p[1]", "expected more than 0 and at most 1, got 0"),
    "top_p_high": ({"top_p": np.array([1.5, 1], np.float32)}, "top_p[0]", ".* got 1.5"),
    "top_p_nan": ({"top_p": np.array([np.nan, 1], np.float32)}, "top_p[0]", ".* got"),
    "slot": ({"slot": i32(-1, 0)}, "slot[1]", "expected -1 or a slot below 0, got 0"),
    "masked": ({"mask": np.array([[1, 0], [0, 0]], np.uint32)}, "mask[1]", "expected a token that is allowed"),
    "mask_shape": ({"mask": np.ones((2, 3), np.uint32)}, "mask", r"expected C-contiguous uint32 \[2, 2\]"),
    "counter_shape": ({"counter": np.zeros((2, 3), np.int64)}, "counter", r"expected C-contiguous int64 \[2, 2\]"),
    "seed_type": ({"seed": np.zeros(2, np.int64)}, "seed", r"expected C-contiguous uint64 \[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_sampling_is_refused_by_field_and_row(name: str, context: Context) -> None:
    changes, param, message = REFUSED[name]
    with raises(InvalidArgumentError, param=param, match=message):
        sample_logits(context, np.zeros((2, 40), np.float32), sampling(2, **changes))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused_by_row(bad: float, context: Context) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[1:, 39] = bad
    with raises(InvalidArgumentError, param="logits"):
        sample_logits(context, logits, sampling(3))
