"""Ranks as processes: the same answers as one process, and what happens when one of them ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock import env
from penstock.core.comm import SharedComm
from penstock.core.context import Context
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, InvalidFileError, UnavailableError, UnsupportedError
from penstock.llm.llm import LLM
from penstock.runtime.ranks import rank_group
from tests.support.errors import raises
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.rank_processes import (
    DEMO,
    LIMITS,
    PROMPTS,
    ROOT,
    SHARED_MEMORY,
    change_rank,
    left_in_shared_memory,
    rank_pids,
    tokens_of,
)
from tests.support.waiting import until


def open_llm(world: int, **options: object) -> LLM:
    return LLM(DEMO, threads=1, limits=LIMITS, tensor_parallel_size=world, **options)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with open_llm(1) as llm:
        yield llm


@pytest.mark.parametrize("world", [2, 4])
def test_answers_equal_those_of_one_process(world: int, one: LLM) -> None:
    """Four ranks share two key-value heads.  Prompts are cut into chunks, repeated, and answered together."""
    greedy = SamplingParams(max_tokens=40, temperature=0.0, logprobs=3)
    sampled = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9, seed=3, n=2, repetition_penalty=1.2)
    long_prompt = [7, 8, 9, 10] * 40
    with open_llm(world) as llm:
        assert len(rank_pids()) == world - 1
        for _ in range(2):  # the second time from cached pages
            assert tokens_of(llm, PROMPTS, greedy) == tokens_of(one, PROMPTS, greedy)
        assert tokens_of(llm, [*PROMPTS, long_prompt], sampled) == tokens_of(one, [*PROMPTS, long_prompt], sampled)
        assert llm.logits(PROMPTS[0]).tobytes() == one.logits(PROMPTS[0]).tobytes()
        assert llm.score(PROMPTS, 2) == one.score(PROMPTS, 2)
        assert list(llm.embed(PROMPTS[1]).vector) == list(one.embed(PROMPTS[1]).vector)
    assert rank_pids() == []


def test_a_rank_that_is_killed_ends_the_request_at_once() -> None:
    before = set(os.listdir(SHARED_MEMORY))
    with open_llm(2) as llm:
        (pid,) = rank_pids()
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(pid, signal.SIGKILL)
        with raises(UnavailableError, match=r"rank 1 .*SIGKILL"):
            list(stream)
        with raises(UnavailableError, match=r"rank 1 .*SIGKILL"):
            llm.generate(PROMPTS[1], SamplingParams(max_tokens=2))
    assert rank_pids() == []
    assert not left_in_shared_memory(before)


@pytest.mark.parametrize(
    ("looks", "options"),
    [
        pytest.param(False, {"tensor_parallel_size": 2}),
        pytest.param(True, {"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param(False, {"pipeline_parallel_size": 2}, marks=pytest.mark.long),
    ],
)
def test_close_does_not_wait_for_a_rank_that_hangs(
    looks: bool, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread is in a step, whose exchange has a timeout of 60 s; with and without the looks at ranks."""
    if not looks:
        monkeypatch.setattr(rank_group, "_LOOK_S", 600.0)
    llm = LLM(DEMO, threads=1, limits=LIMITS, **options)
    errors: list[Any] = []

    def request() -> None:
        try:
            llm.generate(PROMPTS[0], SamplingParams(max_tokens=2**20, ignore_eos=True))
        except Exception as error:
            errors.append(error)

    for pid in rank_pids():
        os.kill(pid, signal.SIGSTOP)
    thread = threading.Thread(target=request)
    thread.start()
    until(lambda: llm.engine.num_steps)  # it waits in its first step, or is about to
    llm.close()
    thread.join()
    assert [type(error) for error in errors] == [UnavailableError]
    assert errors[0].code in ("group_closed", "unavailable")  # the latter if the close came before the step
    assert rank_pids() == []


def test_an_idle_rank_that_is_killed_is_noticed() -> None:
    with open_llm(3) as llm:
        os.kill(rank_pids()[1], signal.SIGKILL)
        with raises(UnavailableError, match=r"rank . .*SIGKILL"):
            llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))


def test_ranks_end_with_the_process_that_started_them() -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = (
        "import sys\nfrom tests.ranks.test_rank_processes import open_llm, rank_pids\n"
        "llm = open_llm(3)\nprint(*rank_pids(), flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env.child_environment() | {"PYTHONPATH": path},
    ) as child:
        assert child.stdout is not None
        pids = [int(pid) for pid in child.stdout.readline().split()]
        assert len(pids) == 2
        child.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the ranks")


def test_a_group_that_is_closed_leaves_nothing_behind() -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), {*threading.enumerate()}
    for _ in range(3):
        with open_llm(2) as llm:
            llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))
    assert rank_pids() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # fewer if garbage of an earlier test went
    assert {*threading.enumerate()} <= threads  # those of earlier tests may end meanwhile


def test_ranks_of_another_instruction_level_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    others = lambda: env.child_environment() | {"PENSTOCK_CPU": "generic"}  # noqa: E731
    monkeypatch.setattr(rank_group, "child_environment", others)
    with pytest.raises((InvalidArgumentError, UnavailableError), match=r"^cpu_level: "):
        open_llm(2)
    assert rank_pids() == []


@pytest.mark.parametrize(("world", "found"), [(0, "got 0"), (65, "got 65"), (5, "at most 4 ranks"), (True, "True")])
def test_impossible_numbers_of_ranks_are_refused(world: int, found: str) -> None:
    with raises(InvalidArgumentError, match=f"tensor_parallel_size: .*{found}"):
        open_llm(world)


def test_a_bundle_of_one_rank_is_no_whole_network(parts_of: Callable[[Path, int], list[Path]]) -> None:
    part = parts_of(DEMO, 2)[1]
    with raises(InvalidArgumentError, param="model", match=r"got that of one rank \(of tp 2\); open the folder"):
        LLM(part)
    with pytest.raises(UnsupportedError, match=r"^tensor_parallel_size: .*whole network"):
        LLM(part, tensor_parallel_size=2)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "context_parallel_size"])
def test_eager_mode_has_no_stages_and_no_partitions(name: str, tmp_path: Path) -> None:
    with raises(UnsupportedError, param=name):
        LLM(tmp_path, mode="eager", **{name: 2})


@pytest.mark.long
def test_a_checkpoint_folder_runs_on_ranks_without_a_cache(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(max_tokens=8, temperature=0.0)
    tokens = []
    for world in (1, 2):
        with LLM(folder, "w4a8", threads=1, limits=LIMITS, use_cache=False, tensor_parallel_size=world) as llm:
            tokens.append(llm.generate(prompt, params).token_ids)
    assert tokens[0] == tokens[1]


def test_more_threads_than_cores_are_noted() -> None:
    num_threads = len(os.sched_getaffinity(0))
    with LLM(DEMO, threads=num_threads, limits=LIMITS, tensor_parallel_size=2) as llm:
        assert [note for note in llm.notes if "ranks have" in note]
        assert llm.info.num_ranks == 2
        assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=3, temperature=0.0)).token_ids


def test_the_command_line_starts_ranks() -> None:
    command = [sys.executable, "-m", "penstock", "run", DEMO, "def add(a, b):", "--max-tokens", "20", "--seed", "4"]
    texts = [
        subprocess.run(
            [*command, *more], capture_output=True, text=True, check=True, env=env.child_environment()
        ).stdout
        for more in ([], ["--tp", "2", "--threads", "1"])
    ]
    assert texts[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("killed_at", [0, 1])
def test_a_rank_that_is_killed_while_programs_are_made_is_named(
    killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks agree before and after they make their programs; the reason comes, whichever agreement fails."""
    agree, calls = Context.agree, iter(range(2))

    def kill_and_agree(context: Context, text: str) -> None:
        if next(calls) == killed_at:
            os.kill(rank_pids()[0], signal.SIGKILL)
            time.sleep(0.2)
        agree(context, text)

    monkeypatch.setattr(Context, "agree", kill_and_agree)
    descriptors = len(os.listdir("/proc/self/fd"))
    with raises(UnavailableError, match=r"rank 1 .*SIGKILL"):
        open_llm(2)
    assert rank_pids() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # fewer if garbage of an earlier test went


@pytest.mark.parametrize("is_ready", [False, True])
def test_the_rank_that_fails_to_open_is_named_once(
    is_ready: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 1 fails too, because rank 2 ended the group: it is not the one that is reported."""
    call = "on_opened()\n" if is_ready else ""
    opening = f"{call}raise errors.InvalidFileError('weights: damaged')"
    monkeypatch.setenv("PYTHONPATH", change_rank(tmp_path, 2, opening))
    with pytest.raises(InvalidFileError, match=r"^Rank 2: weights: damaged$"):
        open_llm(3)
    assert rank_pids() == []


def test_ranks_wait_for_one_that_opens_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The limit on a wait within a step does not hold while they open."""
    monkeypatch.setattr(rank_group, "SharedComm", partial(SharedComm, timeout_s=0.05))
    monkeypatch.setenv("PYTHONPATH", change_rank(tmp_path, 1, "time.sleep(0.5)\nreturn open_rank(*arguments)"))
    with open_llm(2) as llm:
        assert len(rank_pids()) == 1
        assert llm.info.num_ranks == 2


def test_a_rank_that_never_opens_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_RANK_OPEN_SECONDS", "0.2")
    monkeypatch.setenv("PYTHONPATH", change_rank(tmp_path, 1, "time.sleep(600)"))
    expected = r"^Rank 1 ended before it was ready: the ranks did not open within 0\.2 s\.$"
    with pytest.raises(UnavailableError, match=expected):
        open_llm(2)
    assert rank_pids() == []


@pytest.mark.parametrize("value", ["0", "soon", "inf", "nan"])
def test_a_wrong_limit_on_opening_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RANK_OPEN_SECONDS", value)
    with raises(
        InvalidArgumentError,
        param="PENSTOCK_RANK_OPEN_SECONDS",
        match=f"^PENSTOCK_RANK_OPEN_SECONDS: expected seconds above 0, got '{value}'",
    ):
        env.rank_open_s()


def test_a_rank_starts_without_the_modules_of_checkpoints() -> None:
    """They would double the time of its start."""
    script = (
        "import sys, penstock.runtime.ranks.rank_process; print([name for name in sys.modules if 'checkpoint' in name])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env.child_environment())
    assert found.stdout == "[]\n", found.stderr


def kill_a_rank(seconds: float) -> None:
    time.sleep(seconds)
    while not (pids := rank_pids()):
        time.sleep(0.01)
    os.kill(pids[0], signal.SIGKILL)


@pytest.mark.long
def test_fifty_groups_that_are_killed_leave_nothing_behind() -> None:
    """A rank is killed while it loads, in a step, or while it is idle; every request ends."""
    rng = random.Random(5)
    descriptors, shared = len(os.listdir("/proc/self/fd")), set(os.listdir(SHARED_MEMORY))
    for _ in range(50):
        world = rng.choice([2, 3])
        killer = threading.Thread(target=kill_a_rank, args=(rng.uniform(0.2, 1.5),))
        killer.start()
        with suppress(UnavailableError), open_llm(world) as llm:
            while True:
                llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True))
        killer.join()
        assert rank_pids() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # fewer if garbage of an earlier test went
    assert not left_in_shared_memory(shared)
