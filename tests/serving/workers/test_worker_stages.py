"""A worker whose stages are on other machines: it answers, drains and is replaced as one process is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.params import SamplingParams
from penstock.env import child_environment
from penstock.errors import FileAccessError, UnavailableError
from penstock.llm.llm import LLM
from penstock.runtime.program import ProgramLimits
from penstock.runtime.ranks.stage_server import StageServer, listen_for_stages, reserved_port
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import WorkerConfig
from tests.support.errors import raises
from tests.support.marks import mostly_long
from tests.support.services import certificate, versions
from tests.support.stage_processes import Stages, stages
from tests.support.worker_processes import DEMO, HASTY, OPTIONS, Service, service, tokens_of, until

__all__ = ["certificate", "stages", "versions"]

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=200, temperature=1, seed=5, ignore_eos=True)
LONG = replace(SEEDED, max_tokens=900)
PROMPTS = [[number, 7, 9] for number in range(8)]


@asynccontextmanager
async def running(stages: Stages, num_stages: int = 2, num_workers: int = 1) -> AsyncIterator[Service]:
    """A service whose workers have two stages each; ``num_stages`` processes are started for them."""
    with reserved_port(stages.server()) as server:
        assert server is not None
        stages.port = server.port
        for _ in range(num_stages):
            stages.start()
        options = replace(OPTIONS, pipeline_parallel_size=2, stage_server=server)
        async with service(options=options, supervision=HASTY, num_workers=num_workers) as found:
            yield found
            await found.models.close()
            stages.close()  # those that were started within the block would count as left behind


async def answers(backend: RemoteBackend, params: SamplingParams) -> list[list[int]]:
    return await asyncio.gather(*(tokens_of(backend, prompt, params) for prompt in PROMPTS))


async def read(backend: RemoteBackend, prompt: list[int], begun: list[int]) -> list[int]:
    """Return the tokens of a long answer; add to ``begun`` when its first tokens have come."""
    ids: list[int] = []
    async with await backend.submit(prompt, LONG) as answer:
        async for delta in answer:
            ids += delta.token_ids
            if delta.token_ids and prompt[0] not in begun:
                begun.append(prompt[0])
    return ids


def answers_of_one(path: Path, params: SamplingParams) -> list[list[int]]:
    with LLM(path, threads=1, limits=ProgramLimits(max_requests=16)) as llm:
        return [result.token_ids for result in llm.generate(PROMPTS, params)]


@pytest.mark.long
@pytest.mark.parametrize("number", mostly_long([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL))
def test_a_service_goes_on_when_a_stage_is_lost(number: int, stages: Stages) -> None:
    """The worker and the other stage meet again, with a new one, and go on with the answers."""

    async def main() -> None:
        async with running(stages) as service:
            backend = await service.models.load(str(DEMO))
            assert await answers(backend, SEEDED) == expected
            assert backend.plans()[0].num_ranks == 2
            assert backend.plans()[0].weight_bytes == 0  # those of this machine
            begun: list[int] = []
            asked = [asyncio.ensure_future(read(backend, prompt, begun)) for prompt in PROMPTS]
            await until(lambda: len(begun) == len(PROMPTS))
            stages.processes[0].send_signal(number)
            await until(lambda: not backend.is_ready)
            with pytest.raises(UnavailableError):
                await tokens_of(backend, [5], GREEDY)
            stages.start()
            await until(lambda: backend.is_ready)
            assert await asyncio.gather(*asked) == long
            assert await answers(backend, SEEDED) == expected

    expected, long = answers_of_one(DEMO, SEEDED), answers_of_one(DEMO, LONG)
    asyncio.run(main())


@pytest.mark.long
def test_weights_are_replaced_and_drained(stages: Stages, versions: list[Path]) -> None:
    """The stages of the new weights join the new worker, while those of the old ones still compute."""

    async def main() -> None:
        async with running(stages, num_stages=0) as service:
            for _ in range(2):
                stages.start(model=versions[0])
            backend = await service.models.load(str(versions[0]), "model")
            expected = [answers_of_one(path, SEEDED) for path in versions]
            asked = asyncio.ensure_future(answers(backend, SEEDED))
            await until(lambda: backend.workers()[0].num_open > 0)
            for _ in range(2):
                stages.start(model=versions[1])
            await service.models.update("model", str(versions[1]))
            assert await asked == expected[0]
            assert await answers(backend, SEEDED) == expected[1]
            assert all(process.poll() is None for process in stages.processes)  # the old ones wait for another group

    asyncio.run(main())


@pytest.mark.long
def test_workers_share_the_port_of_their_stages(stages: Stages) -> None:
    async def main() -> None:
        async with running(stages, num_stages=4, num_workers=2) as service:
            backend = await service.models.load(str(DEMO))
            assert len(backend.workers()) == 2
            assert await answers(backend, SEEDED) == expected
            os.kill(backend.workers()[0].pid, signal.SIGKILL)  # its stages join the next worker
            await until(lambda: len(backend.workers()) < 2)
            await until(lambda: [worker.status for worker in backend.workers()] == ["ready", "ready"])
            assert await answers(backend, SEEDED) == expected

    expected = answers_of_one(DEMO, SEEDED)
    asyncio.run(main())


def test_a_port_is_kept_for_the_pipelines_of_a_service(certificate: tuple[Path, Path]) -> None:
    server = StageServer("localhost", 0, *certificate, "ab" * 32, on_listen=print)
    with reserved_port(server) as kept:
        assert kept is not None
        config = WorkerConfig("", "", "demo", str(DEMO), options=replace(OPTIONS, stage_server=kept))
        passed = WorkerConfig.from_json(config.to_json()).options.stage_server
        assert passed is not None
        assert (passed.port, passed.token, passed.on_listen) == (kept.port, kept.token, None)
        with listen_for_stages(passed), listen_for_stages(passed):
            pass
        with raises(
            FileAccessError,
            param="stage_port",
            match=f"stage_port: failed to listen for stages at localhost:{kept.port}: ",
        ):
            listen_for_stages(replace(kept, shared=False))
    with reserved_port(None) as nothing:
        assert nothing is None


def penstock(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=child_environment()
    )


def stage_options(stages: Stages, port: int = 0) -> list[object]:
    token = stages.folder / "service-token"
    token.write_text("ab" * 32 + "\n")
    token.chmod(0o600)
    options = ["--pp", 2, "--stage-port", port, "--stage-host", "localhost", "--stage-token-file", token]
    return [*options, "--stage-certificate", stages.certificate, "--stage-key", stages.key]


def port_of(process: subprocess.Popen[str]) -> int:
    """Read the output of a command until it says at which port it waits for stages."""
    assert process.stdout is not None
    while " stages" not in (line := process.stdout.readline()):
        assert line, "the command ended"
    return int(line.rstrip().rpartition(":")[2])


@pytest.mark.long
def test_serve_and_a_remote_worker_have_stages(stages: Stages) -> None:
    """One group of the service's machine, and one of another's, whose worker comes back after a stage was lost."""
    options = [*stage_options(stages), "--threads", 1, "--context-len", 256]
    token = stages.folder / "service-token"
    serve = penstock(
        "serve", f"demo={DEMO}", "--port", 0, "--worker-port", 0, "--worker-token-file", token,
        "--tls-certificate", stages.certificate, "--tls-key", stages.key, "--worker-host", "localhost",
        "--log-format", "text", *options,
    )  # fmt: skip
    worker = None
    try:
        stages.port = port_of(serve)
        stages.start(), stages.start()
        assert serve.stdout is not None
        while "workers of other machines connect to port" not in (line := serve.stdout.readline()):
            assert line, "the service ended"
        address = f"localhost:{line.split()[-1]}"
        worker = penstock(
            "worker", DEMO, "--name", "demo", "--primary", address, "--token-file", token, "--ca-file",
            stages.certificate, *options,
        )  # fmt: skip
        stages.port = port_of(worker)
        own = [stages.start(), stages.start()]
        assert worker.stdout is not None
        while "is loaded and joins" not in (line := worker.stdout.readline()):
            assert line, "the worker ended"
        own[0].kill()
        stages.port = port_of(worker)  # of the command that was started again
        stages.start(), stages.start()
        while "is loaded and joins" not in (line := worker.stdout.readline()):
            assert line, "the worker ended"
    finally:
        for process in (worker, serve):
            if process is not None:
                process.terminate()
                process.communicate(timeout=300)


@pytest.mark.long
def test_bench_measures_over_stages(stages: Stages) -> None:
    bench = penstock("bench", DEMO, "-p", 16, "-n", 4, "-b", "1,2", "--json", *stage_options(stages))
    stages.port = port_of(bench)
    stages.start("--once"), stages.start("--once")
    text, _ = bench.communicate(timeout=120)
    assert bench.returncode == 0, text
    assert '"num_ranks": 2' in text
