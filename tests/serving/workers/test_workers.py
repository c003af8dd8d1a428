"""Models in worker processes: they give the tokens of an engine in this process, and leave nothing behind."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import psutil
import pytest

from penstock.auto.model import AutoModel
from penstock.engine.options import BeamSettings, EngineOptions, RequestOptions
from penstock.engine.params import SamplingParams
from penstock.engine.prompt_logits import Places
from penstock.errors import (
    DeadlineError,
    FileAccessError,
    InvalidArgumentError,
    InvalidFileError,
    NotFoundError,
    OutOfMemoryError,
    QueueFullError,
    UnavailableError,
)
from penstock.llm.llm import LLM
from penstock.processes.frames import FIRST_BYTES
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers import memory_check
from penstock.serving.workers.handshake import PROTOCOL
from penstock.serving.workers.private_folder import PrivateFolder, remove_stale
from penstock.serving.workers.worker import open_llm, ready
from penstock.serving.workers.worker_config import WorkerConfig
from tests.support.command import environment
from tests.support.errors import raises
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.worker_processes import DEMO, ENDLESS, OPTIONS, faulty, pids, service, tokens_of, until

PROMPTS = ["def fib(n):", "import os\n\n", "class Tree:\n    def __init__(self", "x = [1, 2, 3"]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1, seed=2**63 + 5, top_p=0.9, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.8, seed=7, n=2, stop=["\n\n", "self"], repetition_penalty=1.2),
    SamplingParams(max_tokens=9, seed=1, temperature=1, n=1, best_of=3, prompt_logprobs=2, echo=True),
]


def test_the_reason_of_a_broken_stream_is_logged(caplog) -> None:
    """Otherwise a bug in the handling of a message would look like the end of the worker."""

    def broken(_message: pb.FromWorker) -> None:
        raise RuntimeError("a bug")

    async def main() -> None:
        async with service() as running:
            backend = await running.models.load(str(DEMO))
            link = backend._group.connections[0]
            link._stream._listener = broken
            await until(lambda: backend.deaths()["exit"] == 1 and backend.is_ready)
            assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("a bug",)]
            assert await tokens_of(backend, [5, 6], PARAMS[0])

    asyncio.run(main())


def test_answers_scores_and_embeddings_equal_the_engines() -> None:
    with LLM(DEMO) as llm:
        wanted = [llm.generate(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        score, embedding = llm.score(PROMPTS[0], 2), llm.embed(PROMPTS[1], "last", True)
        best = AutoModel(llm).generate([score.token_ids], num_beams=3, n=2, max_new_tokens=6, do_sample=False)
        pair = sorted(((entry.logprob, entry.token_id) for entry in score.logprobs[2:4]), reverse=True)

    async def one(backend, result, params) -> None:
        text, ids, logprobs, reasons = {}, {}, {}, {}
        async with await backend.submit(result.prompt_token_ids, params) as answer:
            async for delta in answer:
                text[delta.index] = text.get(delta.index, "") + delta.text
                ids[delta.index] = ids.get(delta.index, []) + delta.token_ids
                logprobs[delta.index] = logprobs.get(delta.index, []) + (delta.logprobs or [])
                reasons[delta.index] = delta.finish_reason
        for index, choice in enumerate(result.choices):
            assert (text[index], ids[index]) == (choice.text, choice.token_ids)
            assert logprobs[index] == (choice.logprobs or [])
            assert reasons[index] == choice.finish_reason
        assert answer.prompt_logprobs == result.prompt_logprobs
        assert answer.num_prompt_tokens == len(result.prompt_token_ids)
        seeds = {index: choice.seed for index, choice in enumerate(result.choices)}
        assert params.seed is None or answer.seeds == seeds
        assert answer.timings["total_s"] > 0

    async def main() -> None:
        async with service() as running:
            backend = await running.models.load(str(DEMO))
            assert backend.tokenizer is not None
            await until(lambda: backend.figures() is not None)
            assert (backend.figures().num_steps, backend.figures().num_finished) == (0, {}), "warming up does not count"
            assert backend.tokenizer.encode(PROMPTS[0]) == wanted[0].prompt_token_ids
            await asyncio.gather(*(one(backend, r, p) for r, p in zip(wanted, PARAMS, strict=True)))
            assert (await backend.score(score.token_ids, 2)) == score
            places = Places((1, 2), tuple(sorted({token for _, token in pair})))
            listed = (await backend.score(score.token_ids, 2, places=places)).logprobs[1:]
            for row, entry in zip(listed, score.logprobs[2:4], strict=True):
                assert dict(row.top)[entry.token_id] == pytest.approx(entry.logprob, abs=1e-5)
            params = SamplingParams(n=2, max_tokens=6, temperature=0.0)
            async with await backend.submit(score.token_ids, params, beams=BeamSettings(3)) as answer:
                found = {delta.index: delta.token_ids async for delta in answer}
            assert [score.token_ids + found[index] for index in (0, 1)] == best
            vector = (await backend.embed([embedding.token_ids] * 3, "last", True))[2].vector
            np.testing.assert_array_equal(vector, embedding.vector)
            await until(lambda: backend.figures().num_running == 0 and backend.figures().num_finished.get("stop", 0))
            await until(lambda: backend.heartbeat_age_s < 1.0)

    asyncio.run(main())


def test_refusals_keep_their_error_class() -> None:
    options = replace(OPTIONS, engine=EngineOptions(max_waiting=1), limits=replace(OPTIONS.limits, max_requests=1))

    async def main() -> None:
        async with service(options=options, command=faulty("slow")) as running:
            models = running.models
            backend = await models.load(str(DEMO), "code")
            with raises(NotFoundError, match="'demo'"):
                models.get("demo")
            with raises(InvalidArgumentError, param="prompt", match="got 5000"):
                await backend.submit([5000], ENDLESS)
            with raises(InvalidArgumentError, param="prompt", match="holds 1024"):
                await backend.submit([5] * 2000, ENDLESS)
            with raises(InvalidArgumentError, param="allowed_token_ids"):
                await backend.submit([5], SamplingParams(allowed_token_ids=[100_000]))
            with raises(InvalidArgumentError, param="pooling"):
                await backend.embed([[5]], "sum")
            with pytest.raises(DeadlineError):
                await tokens_of(backend, [5, 6], ENDLESS, RequestOptions(deadline_s=1e-6))
            first = await backend.submit([5], ENDLESS)
            second = asyncio.ensure_future(backend.submit([6], ENDLESS))  # returns with its first token, and waits
            await until(lambda: backend.workers()[0].num_open == 2)
            with pytest.raises(QueueFullError):
                await backend.submit([7], ENDLESS)
            await first.aclose()
            await (await second).aclose()
            await until(lambda: backend.figures().num_finished.get("abort", 0) == 2)
            assert await tokens_of(backend, [5], SamplingParams(max_tokens=3, ignore_eos=True))

    asyncio.run(main())


def test_leaving_and_cancelling_abort_in_the_worker() -> None:
    async def main() -> None:
        async with service(command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))

            def idle() -> bool:
                figures = backend.figures()
                return figures is not None and figures.num_running == 0 and figures.num_finished.get("abort", 0) > 0

            async with await backend.submit([5, 6], replace_tokens(900)) as answer:
                await anext(answer)
            await until(idle)
            task = asyncio.ensure_future(tokens_of(backend, [5, 6], replace_tokens(900)))
            await until(lambda: backend.workers()[0].num_open == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: backend.figures().num_finished.get("abort", 0) == 2 and idle())
            assert backend.workers()[0].num_open == 0

    asyncio.run(main())


def replace_tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def test_a_failed_load_leaves_nothing_behind(tmp_path) -> None:
    (tmp_path / "bad.psm").write_bytes(DEMO.read_bytes()[:5000])
    big = replace(OPTIONS, limits=replace(OPTIONS.limits, num_pages=2**26))
    before = {child.pid for child in psutil.Process().children()}  # of other tests: multiprocessing keeps one

    async def main() -> None:
        async with service() as running:
            models = running.models
            for path, kind in (("bad.psm", InvalidFileError), ("none.psm", FileAccessError)):
                with pytest.raises(kind):
                    await models.load(str(tmp_path / path))
            for name in ("", "../x", "a b", "x" * 200, "-x"):
                with pytest.raises(InvalidArgumentError, match="name"):
                    await models.load(str(tmp_path / "bad.psm") if name else "/", name)
            assert models.list() == []
            backend = await models.load(str(DEMO))
            with raises(InvalidArgumentError, param="name"):
                await models.load(str(DEMO))
            with pytest.raises(InvalidFileError):
                await models.update("demo", str(tmp_path / "bad.psm"))
            assert (backend.state, backend.card.version) == ("ready", 1)
            assert "bad.psm" in backend.error
            assert await tokens_of(backend, [5], replace_tokens(3)), "the old weights go on"
            await models.unload("demo")
            assert models.list() == []
            assert {child.pid for child in psutil.Process().children()} <= before
        async with service(options=big) as running:
            with raises(OutOfMemoryError, code="out_of_memory"):
                await running.models.load(str(DEMO))

    asyncio.run(main())


def test_a_package_in_the_working_folder_is_not_imported(tmp_path, monkeypatch) -> None:
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "__init__.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # as users have it; the tests' own processes are kept safe

    async def main() -> None:
        async with service() as running:
            backend = await running.models.load(str(DEMO))
            assert await tokens_of(backend, [5], replace_tokens(3))

    asyncio.run(main())


def test_a_model_is_planned_beside_other_workers() -> None:
    fits, (plan,) = memory_check.fit_beside(WorkerConfig("", "", "demo", str(DEMO), options=OPTIONS))
    assert (fits.num_pages, plan.total_bytes > plan.kv_bytes > 0) == (1024, True)
    with raises(OutOfMemoryError, code="out_of_memory"):
        memory_check.fit_beside(WorkerConfig("", "", "demo", str(DEMO), reserved_bytes=2**50, options=OPTIONS))

    async def main() -> None:
        async with service() as running:
            await running.models.load(str(DEMO))
            ((link, pid),) = running.primary._planned.items()
            assert memory_check.unwritten_bytes(pid, link.plan) >= link.plan.weight_bytes > 0

    asyncio.run(main())


@pytest.mark.long
def test_a_folder_is_planned_beside_other_workers(tmp_path, monkeypatch) -> None:
    """Its bundle is made first; the plan is sent before weights are read, and one that does not fit is refused."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    folder, plans = write_checkpoint(tmp_path / "tiny"), []
    options = replace(OPTIONS, weights="huge", use_cache=False)
    config = WorkerConfig("", "", "tiny", str(folder), reserved_bytes=2**50, options=options)
    with raises(OutOfMemoryError, code="out_of_memory", match="--scheme w8a8"):
        open_llm(config, plans.append)
    assert not plans
    llm, _ = open_llm(replace(config, reserved_bytes=0), plans.append)
    with llm:
        assert [plan.total_bytes for plan in plans] == [llm.info.plan.total_bytes]
        assert ready(llm, config, 1.0).plan.populate_s == llm.populate_s > 0, "weights are copied as asked"
        assert len(llm.generate([5, 6], replace_tokens(3)).token_ids) == 3
    llm, _ = open_llm(replace(config, reserved_bytes=0, options=replace(options, scheme="w8a8")), plans.append)
    with llm:
        assert llm.info.scheme == "w8a8"


def test_models_load_in_parallel_but_plan_in_turn(tmp_path) -> None:
    """Each plan considers the memory that the others planned, even before their weights are read."""
    paths = [tmp_path / f"{name}.psm" for name in ("a", "b")]
    for path in paths:
        path.symlink_to(DEMO)

    async def main() -> None:
        async with service(command=faulty("waits")) as running:
            primary = running.primary
            loading = [asyncio.ensure_future(running.models.load(str(path))) for path in paths]
            await until(lambda: len(primary._planned) == 2)
            assert not any(one.done() for one in loading)
            paths[1].with_suffix(".go").touch()
            assert await tokens_of(await loading[1], [5], replace_tokens(3))
            assert not loading[0].done(), "the second need not wait for the first"
            loading[0].cancel()
            await asyncio.gather(loading[0], return_exceptions=True)
            await until(lambda: len(primary._planned) == 1)
            assert len(running.models.list()) == 1

    asyncio.run(main())


def test_only_folders_without_a_running_owner_are_removed(short_folder, monkeypatch) -> None:
    tmp_path = short_folder
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    living, dead, full, open_to_all = (PrivateFolder() for _ in range(4))
    for folder in (dead, full, open_to_all):
        os.close(folder._lock)  # as the kernel does when a process is killed
    dead.socket.touch()
    (full.path / "more").touch()
    open_to_all.path.chmod(0o755)
    (tmp_path / "penstock-file").touch()
    (tmp_path / "penstock-other").mkdir(0o700)
    (tmp_path / "penstock-link").symlink_to(open_to_all.path)
    before = {path.name for path in tmp_path.iterdir()}
    remove_stale(tmp_path)
    assert before - {path.name for path in tmp_path.iterdir()} == {dead.path.name}
    assert {path.name for path in full.path.iterdir()} == {"owner", "more"}
    living.remove()
    assert not living.path.exists()


def test_draining_lets_open_requests_end() -> None:
    async def main() -> None:
        async with service(command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            reading = asyncio.ensure_future(tokens_of(backend, [5, 6], replace_tokens(100)))
            await until(lambda: backend.workers()[0].num_open == 1)
            closing = asyncio.ensure_future(running.models.close())
            await until(lambda: backend.state == "draining")
            assert not backend.is_ready
            with pytest.raises(UnavailableError):
                await backend.submit([5], ENDLESS)
            assert len(await reading) == 100
            await closing
            assert math.isinf(backend.heartbeat_age_s)

    asyncio.run(main())


def test_several_workers_share_load_and_prefixes() -> None:
    async def main() -> None:
        async with service(num_workers=2, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            assert len(set(pids(backend))) == 2
            answers = [await backend.submit([5 + i], replace_tokens(900)) for i in range(6)]
            assert sorted(worker.num_open for worker in backend.workers()) == [3, 3]
            for answer in answers:
                await answer.aclose()
            prompt = list(range(10, 110))
            for _ in range(4):
                await tokens_of(backend, prompt, replace_tokens(2))
            await until(lambda: backend.figures().num_cached_tokens == 3 * 96)
            shares = [worker.figures.num_cached_tokens for worker in backend.workers()]
            assert sorted(shares) == [0, 3 * 96], "one worker keeps the prefix"

    asyncio.run(main())


def test_workers_end_with_a_killed_primary(short_folder) -> None:
    tmp_path = short_folder
    script = (
        "import asyncio, sys\n"
        "from penstock.serving.workers.primary import Primary\n"
        "from penstock.serving.workers.remote_models import RemoteModels\n"
        "async def main():\n"
        "    primary = Primary()\n"
        "    await primary.open()\n"
        "    backend = await RemoteModels(primary).load(sys.argv[1])\n"
        "    print(backend.workers()[0].pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, DEMO],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(tmp_path)),
        cwd=tmp_path,
    )
    assert process.stdout is not None
    worker = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    try:
        worker.wait(600)
    except psutil.TimeoutExpired as error:
        worker.kill()
        raise AssertionError("the worker outlives its primary") from error
    assert len(list(tmp_path.glob("penstock-*"))) == 1
    remove_stale(tmp_path)  # as the next primary does
    assert list(tmp_path.glob("penstock-*")) == []


def test_a_stranger_may_not_join() -> None:
    async def main() -> None:
        async with service() as running:
            for first in (
                pb.FromWorker(join=pb.Join(protocol=PROTOCOL, token="x" * 64, model="demo")).SerializeToString(),
                pb.FromWorker().SerializeToString(),
                b"\xff" * 8,  # not a message
                b"\0" * (FIRST_BYTES + 1),  # larger than a stranger may send
            ):
                reader, writer = await asyncio.open_unix_connection(running.primary.address.removeprefix("unix:"))
                writer.write(struct.pack("<I", len(first)) + first)
                assert await reader.read() == b""
                writer.close()
            assert len((await running.models.load(str(DEMO))).workers()) == 1  # a worker with an expected token joins

    asyncio.run(main())
