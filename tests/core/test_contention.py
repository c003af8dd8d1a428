"""Steps where cores are short: no more threads than cores, and on without a thread that does not come."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.core import spans
from penstock.core.native import ALL_THREADS, Context, CoreProgram, Model, ProgramOptions
from tests.support.builds import build
from tests.support.core_steps import batch, i32
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "demo.psm"
CORES = sorted(os.sched_getaffinity(0))


def program_of(model: Model, context: Context, flags: int = 0) -> CoreProgram:
    options = ProgramOptions(max_tokens=64, max_requests=1, max_rows=1, num_pages=2, flags=flags)
    program = CoreProgram(model, context, options)
    spans.set_profiling(program, True)
    return program


def run(program: CoreProgram) -> tuple[bytes, list[int]]:
    """Logits after 64 tokens, which is work enough to be shared, and the threads that the step began with."""
    program.run(batch([(0, list(range(64)), (0, 1))], output_rows=i32(63)))
    return program.logits().tobytes(), sorted(set(spans.last_spans(program)["thread"].tolist()))


def test_a_step_has_no_more_threads_than_cores() -> None:
    most = len(CORES) + 3
    with Model.open(DEMO) as model, Context(most) as context:
        with program_of(model, context) as program:
            results = [run(program) for _ in range(20)]
            # as many as there are, once no other process has one
            until(lambda: run(program)[1] == list(range(len(CORES))))
        with program_of(model, context, ALL_THREADS) as program:
            expected, all_threads = run(program)
    assert all(set(threads) <= set(range(len(CORES))) for _, threads in results)
    assert all_threads == list(range(most))
    assert {logits for logits, _ in results} == {expected}


@contextmanager
def starved(context: Callable[[], Context]) -> Iterator[Context]:
    """A context whose worker runs only when a busy process on its core lets it."""
    before = set(os.listdir("/proc/self/task"))
    made = context()
    (worker,) = (int(task) for task in set(os.listdir("/proc/self/task")) - before)
    busy = f"import os\nos.sched_setaffinity(0, [{CORES[-1]}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        try:
            if other.stdout:
                other.stdout.readline()
            os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(worker, {CORES[-1]})
            os.sched_setaffinity(threading.get_native_id(), {CORES[0]})
            yield made
        finally:
            os.sched_setaffinity(threading.get_native_id(), set(CORES))
            other.kill()
            made.close()


@pytest.mark.skipif(len(CORES) < 2, reason="a thread can be starved only where another has a core")
def test_steps_go_on_without_a_thread_that_does_not_come() -> None:
    with Model.open(DEMO) as model:
        with Context(1) as alone, program_of(model, alone) as program:
            expected, _ = run(program)
        with starved(lambda: Context(2)) as context, program_of(model, context) as program:
            results = [run(program) for _ in range(40)]
            os.sched_setaffinity(0, set(CORES))
            until(lambda: run(program)[1] == [0])
    assert {logits for logits, _ in results} == {expected}
    assert sum(threads == [0] for _, threads in results) >= 20


@pytest.mark.long
def test_threads_that_come_late_or_leave_do_everything_once(thread_sanitized_build: Path) -> None:
    build(thread_sanitized_build, "thread_check")
    program = thread_sanitized_build / "core" / "tools" / "thread_check"
    done = subprocess.run([program, "200"], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [int(left) > 0 for left in re.findall(r"(\d+) times a thread left", done.stdout)] == [False] + 4 * [True]
