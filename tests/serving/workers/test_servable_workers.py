"""``penstock servable-worker``: processes of servables join over TLS with the token, and leave."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.errors import InvalidArgumentError, UnavailableError
from penstock.processes.silence import SILENT_S
from penstock.servables.machines.joined_machines import JoinedMachines
from penstock.servables.machines.servable_host import find_versions
from penstock.servables.process.pool import Pool
from penstock.serving.servable_machines.join_service import ServableHostConfig, join_service
from penstock.serving.servable_machines.machine_port import refuse_machine
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from penstock.serving.workers.primary import Primary
from tests.support.command import environment
from tests.support.errors import raises
from tests.support.joining_worker import TOKEN
from tests.support.link_proxy import LinkProxy
from tests.support.servable_folders import run, serving, until, write

STAGE = """
    @servable.stage(outputs={"y": "FP32[]"}, batch_size=4)
    def go(x):
        return x

    @servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})
    def it(x):
        return go(x)
"""


@asynccontextmanager
async def service(tmp_path: Path, certificate: tuple[Path, Path]) -> AsyncIterator[tuple[Primary, Pool]]:
    """A primary whose servable other machines may run; a copy of its folder is in "there"."""
    write(tmp_path / "here", "one", STAGE)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    primary = Primary(remote=RemoteWorkerSettings("127.0.0.1", 0, *certificate, TOKEN))
    await primary.open()
    try:
        async with serving(tmp_path / "here") as servables:
            primary.serve_machine = JoinedMachines(servables).serve
            yield primary, servables.all()[0].versions[1].pools[0]
    finally:
        await primary.close()


def test_a_machine_joins_over_tls(tmp_path: Path, certificate, other_certificate) -> None:
    """And not with another token, nor another certificate, nor a service without servables."""

    async def work() -> None:
        async with service(tmp_path, certificate) as (primary, pool):
            sources, ca = find_versions([tmp_path / "there"]), certificate[0].read_bytes()
            config = ServableHostConfig(f"localhost:{primary.port}", TOKEN, sources, 2, ca)
            joined = asyncio.ensure_future(join_service(config, again=False))
            await until(lambda: len(pool.workers) == 3)
            with raises(InvalidArgumentError, param="address", match="refuses this worker: unknown worker token"):
                await join_service(replace(config, token="f" * 48), again=False)
            with raises(UnavailableError, param="address", match="certificate"):
                await join_service(replace(config, ca=other_certificate[0].read_bytes()), again=False)
            joined.cancel()
            await asyncio.gather(joined, return_exceptions=True)
            await until(lambda: len(pool.workers) == 1)
            primary.serve_machine = refuse_machine
            with raises(InvalidArgumentError, param="address", match="this service has no servables"):
                await join_service(config, again=False)

    run(work)


def test_a_silent_machine_is_lost_and_joins_again(tmp_path: Path, certificate: tuple[Path, Path], caplog) -> None:
    """The proxy still acknowledges what both ends send.  A machine without work is not silent.  It joins again."""

    async def work() -> None:
        async with service(tmp_path, certificate) as (primary, pool):
            proxy = LinkProxy(primary.port)
            config = ServableHostConfig(
                f"localhost:{proxy.port}", TOKEN, find_versions([tmp_path / "there"]), ca=certificate[0].read_bytes()
            )
            joined = asyncio.ensure_future(join_service(config))
            try:
                await until(lambda: len(pool.workers) == 2)
                await asyncio.sleep(1.5 * SILENT_S)
                assert len(pool.workers) == 2
                proxy.cut()
                await until(lambda: len(pool.workers) == 1)
                assert pool.deaths["lost"] == 1
                proxy.heal()
                await until(lambda: len(pool.workers) == 2)
            finally:
                joined.cancel()
                await asyncio.gather(joined, return_exceptions=True)
                proxy.close()

    run(work)
    assert "is lost: nothing has come from it for 2 s" in caplog.text


def test_what_it_needs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    options = ["--primary", "localhost:1", "--token-file", str(token), "--once"]
    assert main(["servable-worker", str(tmp_path), *options]) == 2
    assert f"{tmp_path}: expected a folder with servables that have versions" in capsys.readouterr().err
    write(tmp_path, "one", STAGE)
    assert main(["servable-worker", str(tmp_path), *options, "--processes", "0"]) == 2
    assert "processes: expected" in capsys.readouterr().err
    assert main(["servable-worker", str(tmp_path), *options]) == 1
    assert "localhost:1: Connection refused" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_joins_again_and_leaves(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)

    async def work() -> None:
        async with service(tmp_path, certificate) as (primary, pool):
            command = [sys.executable, "-m", "penstock", "servable-worker", str(tmp_path / "there")]
            command += ["--primary", f"localhost:{primary.port}", "--token-file", str(token)]
            command += ["--ca-file", str(certificate[0])]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
            try:
                for _ in range(2):
                    await until(lambda: len(pool.workers) == 2)
                    for connection in [*primary._remote._connections]:
                        connection.cancel()
                    await until(lambda: len(pool.workers) == 1)
                await until(lambda: len(pool.workers) == 2)
                process.send_signal(signal.SIGTERM)
                await until(lambda: process.poll() is not None)
                assert process.returncode == 0
                lines = process.stderr.read()
                assert lines.count("trying again in") == 2
                assert f"joined localhost:{primary.port} with " in lines
                await until(lambda: len(pool.workers) == 1)
            finally:
                process.kill()
                process.wait()
                process.stderr.close()

    run(work)
