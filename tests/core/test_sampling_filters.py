"""Filters, biases and penalties against transformers' logits processors, and the drawn tokens against chi-square."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation import logits_process as processors

from penstock.core.native import Biases, Context, Penalties, Sampling, cpu_levels, sample_logits
from penstock.errors import InvalidArgumentError
from tests.support.core_steps import i32, random_numbers, sampling
from tests.support.errors import raises
from tests.support.philox import uniform

LEVELS = [name for name, runnable in cpu_levels() if runnable]
VOCAB, ROWS = 3001, 48
F32 = npt.NDArray[np.float32]


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def starts_of(lens: list[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *lens], dtype=np.int32)


def make(name: str) -> tuple[F32, Sampling]:
    """A letter for each thing: t temperature, n min_p, k top_k, p top_p, y typical, r repetition, f frequency,
    s presence, b bias, x forbidden tokens, m mask, g greedy."""
    rng = np.random.default_rng(sum(map(ord, name)))
    logits = (rng.standard_normal((ROWS, VOCAB)) * 3).astype(np.float32)
    changes = random_numbers(rng, name, ROWS, VOCAB)
    if "n" in name:
        changes["min_p"] = rng.uniform(0.001, 0.3, ROWS).astype(np.float32)
    if "y" in name:
        changes["typical_p"] = rng.uniform(0.1, 0.95, ROWS).astype(np.float32)
    if set("rfs") & set(name):
        lens = rng.integers(0, 80, ROWS).tolist()
        likely = np.argsort(-logits, axis=1)[:, :20]  # so that it matters
        rows = [
            np.where(rng.random(n) < 0.5, rng.choice(likely[r], n), rng.integers(0, VOCAB, n))
            for r, n in enumerate(lens)
        ]
        changes["penalties"] = Penalties(
            repetition=rng.uniform(0.7, 1.8, ROWS).astype(np.float32) if "r" in name else np.ones(ROWS, np.float32),
            presence=rng.uniform(-2, 2, ROWS).astype(np.float32) * np.float32("s" in name),
            frequency=rng.uniform(-2, 2, ROWS).astype(np.float32) * np.float32("f" in name),
            starts=starts_of(lens),
            prompt_lens=np.array([rng.integers(0, n + 1) for n in lens], np.int32),
            history=np.concatenate(rows).astype(np.int32),
        )
    if set("bx") & set(name):
        lens = rng.integers(0, 9, ROWS).tolist()
        ids = [
            [*rng.permutation(VOCAB)[: n - 1].tolist(), int(logits[r].argmax())] if n else []
            for r, n in enumerate(lens)
        ]
        values = rng.uniform(-9, 9, sum(lens)).astype(np.float32)
        if "x" in name:
            values[rng.random(len(values)) < 0.6] = -np.inf
        changes["biases"] = Biases(starts_of(lens), np.array([i for row in ids for i in row], np.int32), values)
    return logits, sampling(ROWS, **changes)


def expected_scores(logits: F32, s: Sampling, row: int) -> F32:
    """The row after transformers' processors, in our order; what was taken out is minus infinity."""
    scores = torch.from_numpy(logits[row : row + 1].copy())
    if s.mask is not None:
        allowed = np.unpackbits(s.mask[row].view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        scores[0, ~torch.from_numpy(allowed)] = -np.inf
    empty = torch.zeros((1, 0), dtype=torch.long)
    if s.biases is not None:
        part = slice(s.biases.starts[row], s.biases.starts[row + 1])
        biases = {(int(i),): float(v) for i, v in zip(s.biases.ids[part], s.biases.values[part], strict=True)}
        if biases:
            scores = processors.SequenceBiasLogitsProcessor(biases)(empty, scores)
    if s.penalties is not None:
        p, begin = s.penalties, int(s.penalties.starts[row])
        history = p.history[begin : p.starts[row + 1]].astype(np.int64)
        if len(history):
            repeat = processors.RepetitionPenaltyLogitsProcessor(float(p.repetition[row]))
            scores = repeat(torch.from_numpy(history)[None], scores)
        counts = np.bincount(history[p.prompt_lens[row] :], minlength=VOCAB).astype(np.float32)
        scores -= torch.from_numpy(counts * p.frequency[row])[None]  # as OpenAI's reference has them
        scores -= torch.from_numpy((counts > 0) * p.presence[row])[None]
    if s.temperature[row] == 0:
        return scores[0].numpy()
    chain = [processors.TemperatureLogitsWarper(float(s.temperature[row]))]
    if s.min_p is not None:
        chain.append(processors.MinPLogitsWarper(float(s.min_p[row])))
    if s.top_k[row]:
        chain.append(processors.TopKLogitsWarper(int(s.top_k[row])))
    if s.top_p[row] < 1:
        chain.append(processors.TopPLogitsWarper(float(s.top_p[row])))
    if s.typical_p is not None:
        chain.append(processors.TypicalLogitsWarper(mass=float(s.typical_p[row])))
    for processor in chain:
        scores = processor(empty, scores)
    return scores[0].numpy()


def walk_order(scores: npt.NDArray[np.float64], s: Sampling, row: int) -> npt.NDArray[np.int64]:
    """Tokens that are left, in the order of the walk."""
    ids = np.flatnonzero(scores > -np.inf)
    if s.top_k[row] or s.top_p[row] < 1:
        ids = ids[np.lexsort((ids, -scores[ids]))]
    return ids


def reference(logits: F32, s: Sampling, row: int) -> tuple[int, float]:
    scores = expected_scores(logits, s, row).astype(np.float64)
    if s.temperature[row] == 0:
        return int(scores.argmax()), 1.0
    ids = walk_order(scores, s, row)
    if s.typical_p is not None:  # by distance from the entropy of what the filters before it left
        before = expected_scores(logits, dataclasses.replace(s, typical_p=None), row).astype(np.float64)
        known = np.flatnonzero(before > -np.inf)
        log_p = before[known] - before[known].max()
        log_p -= np.log(np.exp(log_p).sum())
        distance = dict(zip(known.tolist(), np.abs(-log_p - -(np.exp(log_p) * log_p).sum()), strict=True))
        ids = np.array(sorted(ids.tolist(), key=lambda i: (distance[i], i)))
    weights = np.exp(scores[ids] - scores[ids].max())
    reached = np.cumsum(weights) / weights.sum()
    u = uniform(int(s.seed[row]), int(s.counter[row, 0]), int(s.counter[row, 1]))
    token = int(ids[min(int(np.searchsorted(reached, u, side="right")), len(ids) - 1)])
    return token, float(np.abs(reached - u).min())


NAMES = ["n", "y", "nk", "np", "nkp", "ky", "py", "nkpy", "r", "f", "s", "rfs", "b", "x", "bxm", "gr", "gfsb", "gxm",
         "nkpyrfsbxm"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_that_transformers_leaves(name: str) -> None:
    """On every level, with any number of threads."""
    logits, s = make(name)
    results = set()
    for level in LEVELS:
        for threads in (1, 3):
            with Context(threads, level) as context:
                found = sample_logits(context, logits, s)
            results.add(found.ids.tobytes() + found.logprobs.tobytes())
    assert len(results) == 1
    expected = [reference(logits, s, row) for row in range(ROWS)]
    wrong = [row for row, (token, margin) in enumerate(expected) if found.ids[row] != token and margin > 1e-5]
    assert not wrong


@pytest.mark.parametrize("name", ["t", "n", "y", "p", "kp", "rfsb"])
def test_tokens_have_the_distribution_of_the_scores(name: str, context: Context) -> None:
    """Pearson's chi-square over 20,000 draws from one row, seeds and positions mixed; fixed, so it cannot flicker."""
    logits, s = make(name)
    scores = expected_scores(logits, s, 3).astype(np.float64)
    p = np.exp(scores - scores.max())
    p /= p.sum()
    num = 20000
    repeat = np.full(num, 3)
    changes: dict[str, Any] = {
        field: np.ascontiguousarray(getattr(s, field)[repeat])
        for field in ("temperature", "top_k", "top_p", "min_p", "typical_p")
        if getattr(s, field) is not None
    }
    counter = np.stack([np.arange(num) % 7, np.arange(num) // 7], axis=1)
    changes |= {"seed": np.arange(num, dtype=np.uint64) // 100, "counter": counter}
    if s.penalties is not None and s.biases is not None:
        edited = dataclasses.replace(s, temperature=np.zeros(ROWS, np.float32))
        one = expected_scores(logits, edited, 3)
    else:
        one = logits[3]
    found = sample_logits(context, np.tile(one, (num, 1)), sampling(num, **changes)).ids
    common = np.flatnonzero(p * num >= 8)
    counts = np.bincount(found, minlength=VOCAB)
    observed = np.append(counts[common], num - counts[common].sum())
    wanted = np.append(p[common], max(1e-12, 1 - p[common].sum())) * num
    chi_square = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-3)).sum())
    freedom = len(common) + (wanted[-1] > 1) - 1
    # The 99.9 % point of chi-square by Wilson and Hilferty's approximation.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit + 1e-6
    assert p[found].min() > 0


def test_a_row_does_not_depend_on_its_company(context: Context) -> None:
    logits, s = make("nkpyrfsbxm")
    together = sample_logits(context, logits, s)
    for row in range(0, ROWS, 5):
        one = slice(row, row + 1)
        rows = {f: getattr(s, f)[one] for f in ("temperature", "top_k", "top_p", "seed", "counter", "mask", "min_p")}
        p, b = s.penalties, s.biases
        assert p is not None
        assert b is not None
        inside = slice(p.starts[row], p.starts[row + 1])
        biased = slice(b.starts[row], b.starts[row + 1])
        single = Sampling(
            **rows,
            typical_p=None if s.typical_p is None else s.typical_p[one],
            penalties=Penalties(
                p.repetition[one], p.presence[one], p.frequency[one], starts_of([inside.stop - inside.start]),
                p.prompt_lens[one], p.history[inside],
            ),
            biases=Biases(starts_of([biased.stop - biased.start]), b.ids[biased], b.values[biased]),
        )  # fmt: skip
        found = sample_logits(context, logits[one], single)
        assert (found.ids[0], found.logprobs[0]) == (together.ids[row], together.logprobs[row])


def test_logprobs_ranks_and_lists_are_those_of_the_logits(context: Context) -> None:
    logits, s = make("kprfsbx")
    wanted = (np.arange(ROWS) % 5 - 1).astype(np.int32)
    found = sample_logits(context, logits, dataclasses.replace(s, num_logprobs=wanted))
    exact = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), dim=1).numpy()
    assert found.top_ids.shape == (ROWS, 3)
    for row, num in enumerate(wanted.tolist()):
        if num < 0:
            assert np.isnan(found.logprobs[row])
            assert found.ranks[row] == 0
            continue
        order = np.argsort(-exact[row], kind="stable")
        assert found.logprobs[row] == pytest.approx(exact[row, found.ids[row]], abs=1e-5)
        assert order[found.ranks[row] - 1] == found.ids[row]
        assert found.top_ids[row].tolist() == [*order[:num].tolist(), *[-1] * (3 - num)]
        assert found.top_logprobs[row, :num] == pytest.approx(exact[row, order[:num]], abs=1e-5)
        assert np.isnan(found.top_logprobs[row, num:]).all()


def test_a_target_is_scored_and_not_sampled(context: Context) -> None:
    logits, s = make("gxm")
    target = np.where(np.arange(ROWS) % 2, np.arange(ROWS) * 7, -1).astype(np.int32)
    plain = sample_logits(context, logits, s)
    found = sample_logits(context, logits, dataclasses.replace(s, target=target))
    exact = torch.log_softmax(torch.from_numpy(logits), dim=1).numpy()
    for row in range(ROWS):
        assert found.ids[row] == (target[row] if row % 2 else plain.ids[row])
        assert found.logprobs[row] == pytest.approx(exact[row, found.ids[row]], abs=1e-5)


def test_only_rows_that_cannot_be_sampled_fail(context: Context) -> None:
    logits = np.zeros((4, 40), np.float32)
    logits[1, 39] = np.nan
    forbidden = Biases(starts_of([0, 0, 40, 0]), np.arange(40, dtype=np.int32), np.full(40, -np.inf, np.float32))
    s = sampling(4, biases=forbidden, per_row=True, num_logprobs=i32(1, 1, 1, 0))
    found = sample_logits(context, logits, s)
    assert found.status.tolist() == [0, 1, 2, 0]
    assert found.ids.tolist() == [0, -1, -1, 0]
    assert np.isnan(found.logprobs).tolist() == [False, True, True, False]
    assert found.top_ids[:, 0].tolist() == [0, -1, -1, -1]
    with raises(InvalidArgumentError, param="logits"):
        sample_logits(context, logits, dataclasses.replace(s, per_row=False))


def penalties(**changes: Any) -> Penalties:
    made = Penalties(f32(1, 1), f32(0, 0), f32(0, 0), i32(0, 1, 3), i32(1, 1), i32(5, 6, 7))
    return dataclasses.replace(made, **changes)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "min_p": ({"min_p": f32(0, 1.5)}, "min_p[1]", r"expected 0 \(off\) to 1, got 1.5"),
    "min_p_nan": ({"min_p": f32(np.nan, 0)}, "min_p[0]", "got nan"),
    "typical_p": ({"typical_p": f32(1, 0)}, "typical_p[1]", "expected more than 0 and at most 1, got 0"),
    "repetition": ({"penalties": penalties(repetition=f32(1, 0))}, "repetition_penalty[1]", "expected a positive"),
    "presence": ({"penalties": penalties(presence=f32(np.nan, 0))}, "presence_penalty[0]", "expected a number"),
    "frequency": ({"penalties": penalties(frequency=f32(0, np.inf))}, "frequency_penalty[1]", "expected a number"),
    "history": ({"penalties": penalties(history=i32(5, 40, 7))}, "history[1]", "expected a token below 40, got 40"),
    "slot": ({"penalties": penalties(history=i32(5, -1, 7))}, "history[1]", "expected a token or a slot .* got -1"),
    "starts": ({"penalties": penalties(starts=i32(0, 4, 3))}, "history_starts[2]", "expected at least 4, got 3"),
    "starts_0": ({"penalties": penalties(starts=i32(1, 1, 3))}, "history_starts[0]", "expected 0, got 1"),
    "prompt_lens": ({"penalties": penalties(prompt_lens=i32(2, 1))}, "prompt_lens[0]", "expected 0 to 1, got 2"),
    "bias_id": ({"biases": Biases(i32(0, 1, 1), i32(-1), f32(1))}, "bias_ids[0]", "expected .* below 40, got -1"),
    "bias": ({"biases": Biases(i32(0, 1, 1), i32(1), f32(np.inf))}, "bias[0]", "expected a number or minus infinity"),
    "bias_nan": ({"biases": Biases(i32(0, 0, 1), i32(1), f32(np.nan))}, "bias[0]", "expected a number or minus"),
    "bias_starts": ({"biases": Biases(i32(0, 1, -1), i32(), f32())}, "bias_starts[2]", ".* at least 1, got -1"),
    "target": ({"target": i32(-1, -2)}, "target[1]", "expected a token below 40, got -2"),
    "num_logprobs": ({"num_logprobs": i32(0, -2)}, "num_logprobs[1]", r"expected -1 to 0 \(num_top\), got -2"),
    "too_many_logprobs": ({"num_logprobs": i32(0, 41)}, "num_top", "expected 0 to 40, got 41"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_sampling_is_refused_by_field_and_row(name: str, context: Context) -> None:
    changes, param, message = REFUSED[name]
    with raises(InvalidArgumentError, param=param, match=message):
        sample_logits(context, np.zeros((2, 40), np.float32), sampling(2, **changes))
