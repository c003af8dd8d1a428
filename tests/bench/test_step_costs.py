"""Checks how the costs of steps are taken from measured times."""

import pytest

from penstock.bench.step_costs import fit, measure_steps


def test_a_fit_finds_the_factors() -> None:
    rows = [(1, n, n * n) for n in (32, 128, 512)]
    assert fit(rows, [0.001 + 2e-4 * n + 1e-7 * n * n for _, n, _ in rows]) == pytest.approx([0.001, 2e-4, 1e-7])


def test_no_factor_is_below_0() -> None:
    rows = [(1, n) for n in (32, 128, 512)]
    assert fit(rows, [2e-4 * n - 0.001 for _, n in rows])[0] == 0.0
    assert fit(rows, [1.0, 0.5, 0.25]) == [pytest.approx(0.35, rel=0.2), 0.0]


class _Request:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


class _Engine:
    """Steps whose times are known."""

    def __init__(self) -> None:
        self.context = 0

    def prefill(self, prompt_tokens: int) -> float:
        return 0.002 + 1e-4 * prompt_tokens + 1e-7 * prompt_tokens * (prompt_tokens - 1) / 2

    def start(self, batch: int, prompt_tokens: int) -> list[_Request]:
        self.context = batch * prompt_tokens
        return [_Request(prompt_tokens + 1) for _ in range(batch)]

    def decode(self, batch: int) -> float:
        self.context += batch
        return 0.001 + 0.0002 * batch + 1e-6 * (self.context - batch)

    def abort(self, requests: list[_Request]) -> None:
        pass


def test_steps_and_contexts_are_told_apart() -> None:
    steps = measure_steps(_Engine(), (1, 4), 512, 33, 512)
    assert (steps.prefill_step_s, steps.prefill_token_s) == (pytest.approx(0.002), pytest.approx(1e-4))
    assert steps.prefill_context_s == pytest.approx(1e-7)
    assert steps.decode_step_s == {1: pytest.approx(0.0012), 4: pytest.approx(0.0018)}
    assert steps.decode_context_s == pytest.approx(1e-6)


def test_short_prompts_have_no_cost_of_context() -> None:
    steps = measure_steps(_Engine(), (2,), 40, 4, 512)
    assert steps.decode_context_s == 0.0
    assert steps.decode_step_s[2] == pytest.approx(0.0014 + 1e-6 * 83)
