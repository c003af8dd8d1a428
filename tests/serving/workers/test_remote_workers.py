"""Workers of other machines: over TLS, with a token, with the same weights; they share load and may go at any time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from penstock.engine.params import SamplingParams
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.processes.supervision import SupervisionPolicy
from penstock.serving.workers.messages import JOIN, bearer
from penstock.serving.workers.primary import Primary, WorkerListener
from penstock.serving.workers.remote_worker_client import read_token
from tests.support.command import environment
from tests.support.worker_processes import DEMO, faulty, pids, service, still, tokens_of, until

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
TOKEN = "0123456789abcdef" * 3


@pytest.fixture
def door(certificate: tuple[Path, Path]) -> WorkerListener:
    return WorkerListener("127.0.0.1", 0, certificate[0].read_bytes(), certificate[1].read_bytes(), TOKEN)


@contextmanager
def joining(port: int, folder: Path, ca: Path, *more: str, token: str = TOKEN, model: Path = DEMO):
    (folder / "token").write_text(token + "\n")
    (folder / "token").chmod(0o600)
    command = [
        sys.executable,
        "-m",
        "penstock",
        "worker",
        str(model),
        "--primary",
        f"localhost:{port}",
        "--threads",
        "1",
    ]
    command += ["--token-file", str(folder / "token"), "--ca-file", str(ca), "--once", *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_worker_joins_shares_load_and_goes(door, certificate, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "penstock.serving")

    async def main() -> None:
        async with service(door=door) as running:
            backend = await running.models.load(str(DEMO))
            alone = await tokens_of(backend, [5, 6], GREEDY)
            with joining(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: len(backend.workers()) == 2)
                assert [worker.pid for worker in backend.workers()][1] == 0
                found = await asyncio.gather(*(tokens_of(backend, [5, 6], GREEDY) for _ in range(16)))
                assert found == [alone] * 16
                await until(lambda: all(worker.figures.num_finished for worker in backend.workers()))
                process.send_signal(signal.SIGTERM)
                await until(lambda: len(backend.workers()) == 1)
                assert await tokens_of(backend, [5, 6], GREEDY) == alone
                await until(lambda: process.poll() == 0)
            with joining(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: len(backend.workers()) == 2)
                await running.models.unload("demo")
                await until(lambda: process.poll() == 0)

    asyncio.run(main())
    told = [record.facts["event"] for record in caplog.records if "event" in getattr(record, "facts", {})]
    assert [event for event in told if event.startswith("worker_")] == [
        "worker_ready", "worker_joined", "worker_left", "worker_joined", "worker_left",
    ]  # fmt: skip


def test_a_primary_that_is_not_believed_is_told_in_a_line(door, tmp_path) -> None:
    async def main() -> None:
        async with service(door=door) as running:
            (tmp_path / "none.pem").write_text("")
            with joining(running.primary.port, tmp_path, tmp_path / "none.pem") as process:
                await until(lambda: process.poll() is not None)
                told = process.stderr.read()
                assert process.returncode == 1
                assert "is not there" in told
                assert len(told.splitlines()) == 1

    asyncio.run(main())


def test_nothing_is_read_of_who_does_not_know_the_token(door, certificate) -> None:
    """A message may have 256 MB: a stranger's is not taken, whatever it says."""

    async def main() -> None:
        async with service(door=door) as running:
            credentials = grpc.ssl_channel_credentials(certificate[0].read_bytes())
            async with grpc.aio.secure_channel(f"localhost:{running.primary.port}", credentials) as channel:
                for metadata in ((), (("authorization", bearer("x" * 64)),), (("authorization", TOKEN),)):
                    call = channel.stream_stream(JOIN)(metadata=metadata)
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call.read()  # although nothing was sent
                    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(main())


def test_a_port_where_workers_join_is_not_shared(door) -> None:
    async def main() -> None:
        async with service(door=door) as running:
            second = Primary(door=replace(door, port=running.primary.port))
            with pytest.raises(FileAccessError, match=str(running.primary.port)):
                await second.open()

    asyncio.run(main())


def test_who_may_not_join_is_told_why(door, certificate, tmp_path) -> None:
    short = ("--context-len", "512")

    async def refused(port: int, *more: str, **options) -> str:
        with joining(port, tmp_path, certificate[0], *more, **options) as process:
            await until(lambda: process.poll() is not None)
            assert process.returncode == 2
            return process.stderr.read()

    async def main() -> None:
        async with service(door=door) as running:
            backend = await running.models.load(str(DEMO))
            port = running.primary.port
            assert "the token is not known here" in await refused(port, token="x" * 64)
            assert "no model 'other'" in await refused(port, "--name", "other")
            assert "up to 1024 tokens" in await refused(port, *short)
            assert len(backend.workers()) == 1

    asyncio.run(main())


def test_other_weights_may_not_join(door, certificate, tmp_path) -> None:
    async def main() -> None:
        async with service(door=door) as running:
            backend = await running.models.load(str(DEMO))
            backend._fleet.weights_id = "another"
            with joining(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: process.poll() is not None)
                assert "its own is another one" in process.stderr.read()

    asyncio.run(main())


def test_a_worker_joins_while_the_own_one_is_gone(door, certificate, tmp_path) -> None:
    """Which weights run is known from the load on, whatever became of the process that told it."""
    model = tmp_path / "demo.psm"
    model.symlink_to(DEMO)
    go = model.with_suffix(".go")
    go.touch()

    async def main() -> None:
        async with service(door=door, command=faulty("waits")) as running:
            backend = await running.models.load(str(model))
            go.unlink()
            os.kill(*pids(backend), signal.SIGKILL)
            await until(lambda: not pids(backend))
            with joining(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: backend.is_ready or process.poll() is not None)
                assert len(await tokens_of(backend, [5, 6], GREEDY)) == 8
            go.touch()

    asyncio.run(main())


def test_an_update_that_nobody_waits_for_still_dismisses_a_worker_that_joined(door, certificate, tmp_path) -> None:
    """Whoever asked for new weights leaves while a request of the old ones is open far away: that one ends whole, then
    its worker."""

    async def main() -> None:
        async with service(door=door, supervision=SupervisionPolicy(hang_s=600.0, drain_s=600.0)) as running:
            backend = await running.models.load(str(DEMO), "demo")
            with joining(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: len(backend.workers()) == 2)
                joined, far = backend._joined[0], psutil.Process(process.pid)
                asked: list[asyncio.Future[list[int]]] = []
                joined.weights_id = "those before"
                assert still(far)
                while not joined.num_open:
                    assert len(asked) < 50
                    asked.append(asyncio.ensure_future(tokens_of(backend, [5, 6], GREEDY)))
                    await asyncio.sleep(0)
                updating = asyncio.ensure_future(running.models.update("demo", str(DEMO)))
                await until(lambda: still(far) and backend.card.version == 2)
                assert not updating.done()
                updating.cancel()
                await asyncio.gather(updating, return_exceptions=True)
                assert (joined.status, joined.num_open) == ("draining", 1)
                far.resume()
                found = await asyncio.gather(*asked)
                assert found == [found[0]] * len(asked)
                assert len(found[0]) == 8
                await until(lambda: process.poll() == 0)
                await until(lambda: [worker.version for worker in backend.workers()] == [2])

    asyncio.run(main())


def test_tokens_that_can_be_guessed_are_refused(tmp_path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).touch(0o600)
    (tmp_path / "good").write_text(TOKEN + "\nmore\n")
    assert read_token(tmp_path / "good") == TOKEN
    for text in ("", "\n", "secret", "x" * 31, "x y" * 16, "\u00e4" * 40):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(InvalidArgumentError, match="at least 32"):
            read_token(tmp_path / "bad")
    (tmp_path / "good").chmod(0o644)
    with pytest.raises(InvalidFileError, match="chmod 600"):
        read_token(tmp_path / "good")
    with pytest.raises(FileAccessError, match="gone"):
        read_token(tmp_path / "gone")
