"""Checks how the costs of steps are taken from measured times."""

import os

import pytest

from penstock.bench.measure import Bench
from penstock.bench.step_costs import fit, measure_steps
from penstock.cli.measure.worker_steps import WorkerSteps, step_s
from penstock.errors import FileAccessError, InternalError
from tests.support.command import DEMO
from tests.support.errors import raises


def test_a_fit_finds_the_factors() -> None:
    rows = [(1, n, n * n) for n in (32, 128, 512)]
    assert fit(rows, [0.001 + 2e-4 * n + 1e-7 * n * n for _, n, _ in rows]) == pytest.approx([0.001, 2e-4, 1e-7])


def test_no_factor_is_below_0() -> None:
    rows = [(1, n) for n in (32, 128, 512)]
    assert fit(rows, [2e-4 * n - 0.001 for _, n in rows])[0] == 0.0
    assert fit(rows, [1.0, 0.5, 0.25]) == [pytest.approx(0.35, rel=0.2), 0.0]


class _Worker:
    """Steps whose times are known."""

    def prefill(self, prompt_tokens: int) -> float:
        return 0.002 + 1e-4 * prompt_tokens + 1e-7 * prompt_tokens * (prompt_tokens - 1) / 2

    def decode(self, batch: int, prompt_tokens: int, num_steps: int) -> tuple[float, float]:
        context = batch * (prompt_tokens + (num_steps - 1) / 2)
        return 0.001 + 0.0002 * batch + 1e-6 * context, context

    def added_request(self, batch: int, prompt_tokens: int) -> float:
        assert batch == 4, "beside the middle batch"
        return 0.0007 + self.prefill(prompt_tokens) - self.prefill(0)


def test_steps_and_contexts_are_told_apart() -> None:
    steps = measure_steps(_Worker(), (1, 4), 512, 33, 512)
    assert (steps.prefill_step_s, steps.prefill_token_s) == (pytest.approx(0.002), pytest.approx(1e-4))
    assert steps.prefill_context_s == pytest.approx(1e-7)
    assert steps.decode_step_s == {1: pytest.approx(0.0012), 4: pytest.approx(0.0018)}
    assert steps.decode_context_s == pytest.approx(1e-6)
    assert steps.request_s == pytest.approx(0.0007)


def test_short_prompts_have_no_cost_of_context() -> None:
    steps = measure_steps(_Worker(), (4,), 40, 4, 512)
    assert (steps.decode_context_s, steps.prefill_context_s) == (0.0, 0.0)
    assert steps.decode_step_s[4] == pytest.approx(0.0018 + 1e-6 * 4 * 41.5)


def test_tokens_that_come_together_count_as_steps() -> None:
    at_once = [0.0, *(0.002 * (step // 2) for step in range(2, 34))]  # two steps arrive at a time
    assert step_s(at_once) == pytest.approx(0.001)
    stalled = [time + 0.5 * (step > 20) for step, time in enumerate(at_once)]
    assert step_s(stalled) == pytest.approx(0.001), "a stall is not the worker's"
    assert step_s([1.0, 1.25]) == 0.25
    with pytest.raises(InternalError, match="ended during the measurement"):
        step_s([1.0])


def test_a_worker_runs_the_steps() -> None:
    settings = Bench(DEMO, prompt_tokens=16, new_tokens=80, batches=(1, 2, 3), threads=1)
    with WorkerSteps(settings) as steps:
        (worker,) = steps._backend.workers()
        os.kill(worker.pid, 0)
        assert worker.pid != os.getpid()
        assert steps.prefill(16) > 0
        seconds, context = steps.decode(3, 16, 20)
        assert seconds > 0
        assert 3 * (16 + 9.5) <= context < 3 * (16 + 60)
        assert steps.added_request(2, 4) != 0, "there is room to measure it"
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_a_worker_that_cannot_load_says_why(tmp_path) -> None:
    with raises(FileAccessError, param="model"), WorkerSteps(Bench(tmp_path / "none.psm")):
        pass
