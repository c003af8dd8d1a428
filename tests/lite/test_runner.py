"""Several programs over one copy of the weights: threads get the rows that they would get alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock import lite
from penstock.errors import InvalidArgumentError
from penstock.lite.affinity import BoundContext
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, IDS, ask, build, tensors


def made(workers: int, **config: object) -> lite.ModelParallelRunner:
    context = lite.Context(thread_num=1)
    context.parallel.workers_num = workers
    runner = lite.ModelParallelRunner()
    runner.build_from_file(BUNDLE, lite.ModelType.PENSTOCK, context, config)
    return runner


def num_mappings() -> int:
    return sum(str(BUNDLE) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_concurrent_threads_match_single_calls() -> None:
    prompts = [IDS[: 2 + i % 9] for i in range(24)]
    with build() as model:
        expected = [ask(model, [prompt])[0] for prompt in prompts]
    before = num_mappings()
    with made(3, batch_size=2) as runner:
        assert runner.workers_num == 3
        assert num_mappings() == before + 1  # one copy of the weights
        found: dict[int, np.ndarray] = {}
        entered = threading.Barrier(6)

        def work(first: int) -> None:
            entered.wait()
            for index in range(first, len(prompts), 6):
                both = runner.predict(tensors([prompts[index], prompts[index][:1]]))[0].get_data_to_numpy()
                found[index] = both[0]

        threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(np.array_equal(found[index], row) for index, row in enumerate(expected))


def test_workers_run_at_the_same_time() -> None:
    """Two are in the middle of a step at once: each waits there for the other."""
    with made(2) as runner:
        both = threading.Barrier(2, timeout=60)
        for worker in runner._workers:
            run = worker.sequences._program.run
            worker.sequences._program.run = lambda batch, run=run: (both.wait(), run(batch))  # type: ignore[method-assign]
        threads = [threading.Thread(target=lambda: runner.predict(tensors([IDS]))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not both.broken


def test_wrong_arguments_are_refused() -> None:
    with made(1) as runner:
        assert [one.shape for one in runner.get_outputs()] == [[1, 4096]]
        with raises(InvalidArgumentError, param="reset", match=r"got 0 at \[0\]"):
            runner.predict(tensors([IDS], 0))
        with raises(InvalidArgumentError, param="token_ids", match="1 to 1 .*got 2"):
            runner.predict(tensors([IDS, IDS]))
        with raises(InvalidArgumentError, param="num_tokens", match="got 1025"):
            runner.predict(tensors([[1] * 1025]))
        with raises(InvalidArgumentError, param="runner", match="already"):
            runner.build_from_file(BUNDLE, lite.ModelType.PENSTOCK)
        assert runner.predict(runner.get_inputs())  # a worker came back from each
    with raises(InvalidArgumentError, param="runner", match="closed"):
        runner.predict(tensors([IDS]))
    runner.close()


def test_closing_waits_for_calls_and_refuses_those_that_wait() -> None:
    runner = made(1)
    inside, go_on = threading.Event(), threading.Event()
    program = runner._workers[0].sequences._program
    run = program.run
    program.run = lambda batch: (inside.set(), go_on.wait(300), run(batch))  # type: ignore[method-assign,func-returns-value]
    outcomes: list[object] = []

    def work() -> None:
        try:
            outcomes.append(runner.predict(tensors([IDS]))[0].shape)
        except InvalidArgumentError as error:
            outcomes.append(str(error))

    first = threading.Thread(target=work)
    first.start()
    assert inside.wait(300)
    closing = threading.Thread(target=runner.close)
    closing.start()
    go_on.set()
    first.join()
    closing.join()
    assert outcomes == [[1, 4096]]


def test_workers_share_out_the_cores_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers of two threads over four cores: the third begins again."""
    given: list[tuple[int, list[int]]] = []

    def bound(num_threads: int, cores: list[int]) -> BoundContext:
        given.append((num_threads, cores))
        return BoundContext(num_threads)

    monkeypatch.setattr("penstock.lite.open_model.chosen_cores", lambda _: [4, 5, 6, 7])
    monkeypatch.setattr("penstock.lite.open_model.BoundContext", bound)
    context = lite.Context(thread_num=2)
    context.parallel.workers_num = 3
    with lite.ModelParallelRunner() as runner:
        runner.build_from_file(BUNDLE, lite.ModelType.PENSTOCK, context)
    assert given == [(2, [4, 5, 6, 7]), (2, [6, 7, 4, 5]), (2, [4, 5, 6, 7])]


def test_each_worker_runs_on_a_core_of_its_own() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core")
    context = lite.Context(thread_num=1, thread_affinity_core_list=cores)
    context.parallel.workers_num = 2
    during: list[set[int]] = []
    with lite.ModelParallelRunner() as runner:
        runner.build_from_file(BUNDLE, lite.ModelType.PENSTOCK, context)
        for worker in runner._workers:
            run = worker.sequences._program.run
            worker.sequences._program.run = lambda batch, run=run: (  # type: ignore[method-assign]
                during.append(os.sched_getaffinity(0)), run(batch)
            )  # fmt: skip
        for _ in range(2):  # the free ones take turns
            runner.predict(tensors([IDS]))
    assert during == [{cores[0]}, {cores[1]}]
