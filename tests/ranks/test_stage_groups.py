"""Stages of several ranks each on other machines: the bits of one process, and what happens when a rank is lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.core.rank_layout import RankLayout
from penstock.engine.params import SamplingParams
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnavailableError
from penstock.llm.llm import LLM
from penstock.runtime.export_ranks import export_ranks
from penstock.runtime.program import ProgramLimits
from penstock.runtime.ranks.open_ranks import threads_of
from penstock.runtime.ranks.stage_bundle import find_bundle
from tests.support.errors import raises
from tests.support.link_proxy import LinkProxy
from tests.support.rank_processes import DEMO, LIMITS, PROMPTS, change_rank, rank_pids, tokens_of
from tests.support.services import certificate
from tests.support.stage_processes import Stages, stages
from tests.support.waiting import until

__all__ = ["certificate", "stages"]

BundleOf = Callable[[str, str], Path]
GREEDY = SamplingParams(max_tokens=30, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, seed=3, n=2, logprobs=3)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SQUARE = RankLayout(tp=2, pp=2)


def open_square(stages: Stages, **options: object) -> LLM:
    return stages.open_llm(tensor_parallel_size=2, **options)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(DEMO, threads=1, limits=LIMITS) as llm:
        yield llm


def num_descriptors(stages: Stages) -> list[int]:
    return [len(os.listdir(f"/proc/{process.pid}/fd")) for process in stages.processes]


def check_same(llm: LLM, one: LLM, prompts: list) -> None:
    for params in (GREEDY, SAMPLED):
        assert tokens_of(llm, prompts, params) == tokens_of(one, prompts, params)
    assert llm.logits(prompts[0]).tobytes() == one.logits(prompts[0]).tobytes()
    assert list(llm.embed(prompts[1]).vector) == list(one.embed(prompts[1]).vector)


def test_answers_are_the_same_until_a_rank_is_killed(stages: Stages, one: LLM) -> None:
    """The second rank of the second stage is killed; both machines join the next group by themselves."""
    with open_square(stages) as llm:
        assert (llm.info.num_stages, llm.info.num_ranks) == (2, 4)
        check_same(llm, one, PROMPTS)
        ranks = [rank_pids(process.pid) for process in stages.processes]
        assert [len(pids) for pids in ranks] == [1, 1]
        descriptors = num_descriptors(stages)
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        os.kill(ranks[0][0], signal.SIGKILL)
        with raises(UnavailableError, match=r"rank [24] was killed by SIGKILL") as caught:
            list(stream)
        assert caught.value.code == "unavailable"  # retry later
    with open_square(stages) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == tokens_of(one, PROMPTS, GREEDY)
        assert num_descriptors(stages) == descriptors  # nothing is left of the first group
    assert len(stages.processes) == 2
    stages.processes[0].terminate()
    assert stages.processes[0].wait(300) == 0


@pytest.mark.long
@pytest.mark.parametrize("kv", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("scheme", ["bf16", "w8a8"])
def test_schemes_match(scheme: str, kv: str, stages: Stages, bundle_of: BundleOf) -> None:
    path = bundle_of("llama_head_dim", scheme)
    limits = ProgramLimits(max_tokens=16, max_requests=2, context_len=64, kv_layout=kv)
    prompts = [[5 + i % 40 for i in range(20)], [7, 8]]
    with LLM(path, threads=1, limits=limits) as one, open_square(stages, model=path, limits=limits) as llm:
        check_same(llm, one, prompts)


@pytest.mark.long
def test_three_stages_and_a_slow_link(stages: Stages, one: LLM) -> None:
    """Rows go from one machine to the next through rank 0, over a link that delays and throttles."""
    proxies: list[LinkProxy] = []

    def start() -> None:
        proxies.extend(LinkProxy(stages.port) for _ in range(3))
        for rank, proxy in zip((1, 4, 6), proxies, strict=True):  # of each stage any rank
            stages.start("--rank", rank, port=proxy.port)

    try:
        with open_square(stages, num_stages=3, on_listen=start) as llm:
            check_same(llm, one, PROMPTS)
            for proxy in proxies:
                proxy.delay_s, proxy.bytes_per_s = 0.02, 1_000_000
            assert tokens_of(llm, PROMPTS, GREEDY) == tokens_of(one, PROMPTS, GREEDY)
    finally:
        for proxy in proxies:
            proxy.close()


@pytest.mark.long
@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_is_stopped_ends_the_group(is_first: bool, stages: Stages) -> None:
    with open_square(stages) as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        process = stages.processes[0].pid
        stopped = process if is_first else rank_pids(process)[0]
        os.kill(stopped, signal.SIGSTOP)
        reason = "rank [13] at .* is lost: no message" if is_first else "rank [24] is stopped by a signal"
        with pytest.raises(UnavailableError, match=reason):
            list(stream)
        if is_first:
            os.kill(stopped, signal.SIGCONT)
    until(lambda: not any(rank_pids(process.pid) for process in stages.processes), "the end of the ranks")


@pytest.mark.long
def test_the_ranks_end_with_the_process_of_their_stage(stages: Stages) -> None:
    with open_square(stages) as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        pids = rank_pids(stages.processes[0].pid)
        stages.processes[0].kill()
        with pytest.raises(UnavailableError, match=r"rank [13] at .* closed the connection"):
            list(stream)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the ranks")


@pytest.mark.long
def test_the_rank_that_fails_to_open_is_named_once(stages: Stages, tmp_path: Path) -> None:
    """The second rank of a stage is a child of its first rank, which tells rank 0."""
    path = change_rank(tmp_path, 2, "raise errors.InvalidFileError('weights: damaged')")

    def start() -> None:
        for rank in (1, 3):
            stages.start("--rank", rank, variables={"PYTHONPATH": path})

    with pytest.raises(InvalidFileError, match=r"^Rank 2: weights: damaged$"):
        open_square(stages, on_listen=start)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundles of rank 0 and of two stages of two ranks."""
    out = tmp_path_factory.mktemp("bundles") / "demo"
    export_ranks(DEMO, out, SQUARE)
    return out


def machine(bundles: Path, folder: Path, *ranks: int) -> Path:
    """A folder with the bundles of some ranks."""
    folder.mkdir()
    for rank in ranks:
        shutil.copy(bundles / f"rank_{rank}.psm", folder)
    return folder


@pytest.mark.long
def test_each_machine_has_the_parts_of_its_ranks(stages: Stages, bundles: Path, one: LLM, tmp_path: Path) -> None:
    first, second = machine(bundles, tmp_path / "first", 1, 2), machine(bundles, tmp_path / "second", 3, 4)
    rank_0 = machine(bundles, tmp_path / "rank_0", 0)
    for path in bundles.iterdir():
        if not path.name.startswith("rank_"):
            shutil.copy(path, rank_0)

    def start() -> None:
        stages.start(model=second)
        stages.start(model=first)

    with open_square(stages, model=rank_0, on_listen=start) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == tokens_of(one, PROMPTS, GREEDY)


def test_the_parts_of_a_stage_are_found(bundles: Path, tmp_path: Path) -> None:
    with find_bundle(bundles, 4) as stage:
        assert (stage.rank, [other.rank for other in stage.others]) == (3, [4])
        assert stage.of(4).path == bundles / "rank_4.psm"
        assert stage.parts(SQUARE)[3:] == [str(bundles / f"rank_{rank}.psm") for rank in (3, 4)]
        with raises(InvalidArgumentError, param="rank"):
            stage.of(1)
    with find_bundle(machine(bundles, tmp_path / "second", 3, 4)) as only:
        assert only.rank == 3
    half = machine(bundles, tmp_path / "half", 3)
    with raises(FileAccessError, param="model", match=r"expected rank_4\.psm of the same stage"), find_bundle(half):
        pass
    with raises(InvalidArgumentError, param="rank"), find_bundle(bundles):
        pass


def test_the_cores_of_a_machine_are_divided() -> None:
    assert [threads_of(threads, 8, SQUARE) for threads in (0, 1, 6)] == [4, 1, 6]
    assert threads_of(0, 1, SQUARE) == 1
