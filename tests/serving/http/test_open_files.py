"""Descriptors never run out: the limit is raised, connections are bounded by it, and ``accept`` backs off."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.serving.http.acceptor import Acceptor
from penstock.serving.http.open_files import fitting_connections
from penstock.serving.http.transport import Transport
from tests.support.command import DEMO
from tests.support.serve_command import serving
from tests.support.waiting import eventually, until

LIMITED = """
import resource, sys
from penstock.cli.main import main
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
sys.exit(main(["serve", *sys.argv[1:]]))
"""
REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n\r\n"


def status_of(url: str, timeout_s: float = 60) -> int:
    host, _, port = url.partition("//")[2].rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=timeout_s)) as connection:
        connection.request("GET", "/health/live")
        response = connection.getresponse()
        response.read()
        return response.status


def test_idle_connections_leave_descriptors_to_the_service(tmp_path: Path) -> None:
    program = ("-c", LIMITED.format(soft=200, hard=256))
    with serving(DEMO, "--grpc-port", "0", cwd=tmp_path, program=program) as (process, url, said):
        assert "up to 64 connections each; limit on open files: 256" in said
        grpc = re.search(r"v2\) at \S+:(\d+)\n", said)
        assert grpc is not None
        host, _, port = url.partition("//")[2].rpartition(":")
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(socket.create_connection((host, int(port)), 60))
                stack.enter_context(socket.create_connection((host, int(grpc[1])), 60))
            assert {status_of(url) for _ in range(5)} == {503}
            assert psutil.Process(process.pid).num_fds() < 256
        until(lambda: status_of(url) == 200)
        assert (tmp_path / "log").stat().st_size < 20_000
        limit = psutil.Process(process.pid).children()[0].rlimit(psutil.RLIMIT_NOFILE)
        assert limit[0] == 256  # a worker has the raised limit


def test_the_bound_follows_the_limit() -> None:
    assert fitting_connections(4096, 65_536, 2, 100) == 4096
    assert fitting_connections(4096, 1024, 1, 8) == 824
    assert fitting_connections(4096, 1024, 2, 8) == 412
    assert fitting_connections(10, 1024, 2, 8) == 10
    assert fitting_connections(4096, 100, 1, 1000) == 50
    assert fitting_connections(4096, 1, 2, 8) == 1


class Exhausted(socket.socket):
    """A listening socket whose ``accept`` fails for some time."""

    code = errno.EMFILE
    num_failures = 0

    def accept(self):
        if self.code:
            self.num_failures += 1
            raise OSError(self.code, os.strerror(self.code))
        return super().accept()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPERM])
def test_accept_backs_off_and_comes_back(
    caplog: pytest.LogCaptureFixture, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "penstock.serving")

    class Echo(asyncio.Protocol):
        def __init__(self, connected: Callable[[], None]) -> None:
            self.connected = connected

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.write(b"hello")
            transport.close()

    async def go() -> None:
        listener = Exhausted()
        listener.code = code
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        acceptor = Acceptor(listener, Echo, lambda _: False, REFUSED, None, 10)
        loop, pauses = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def at_once(delay: float, callback: Callable[..., object], *args: Any, **options: Any) -> asyncio.TimerHandle:
            if callback == acceptor._resume:
                pauses.append(delay)
                delay = 0.0
            return call_later(delay, callback, *args, **options)

        monkeypatch.setattr(loop, "call_later", at_once)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await eventually(lambda: listener.num_failures >= 5)
        assert pauses[:4] == [0.05, 0.1, 0.2, 0.4]
        listener.code = 0
        assert await reader.read() == b"hello"
        writer.close()
        acceptor.close()
        await acceptor.wait_closed()
        listener.close()

    asyncio.run(go())
    lines = [record.facts for record in caplog.records]
    assert 1 <= len(lines) <= 2  # one a second at most
    assert lines[0]["message"] == f"Failed to accept a connection: {os.strerror(code)}. Retrying."


def test_a_connection_is_counted_once() -> None:
    """It counts as a handshake until its protocol has it, and the protocol counts it from then on."""
    opened, counts = [], []

    class Counted(asyncio.Protocol):
        def __init__(self, connected: Callable[[], None]) -> None:
            self.connected = connected

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.connected()
            opened.append(transport)
            counts.append(len(opened) + acceptor._num_opening)

    async def go() -> None:
        nonlocal acceptor
        with socket.create_server(("127.0.0.1", 0)) as listener:
            acceptor = Acceptor(listener, Counted, lambda _: False, REFUSED, None, 10)
            clients = await asyncio.gather(*(asyncio.open_connection(*listener.getsockname()) for _ in range(5)))
            await eventually(lambda: len(opened) == 5)
            for transport in opened:
                transport.close()
            for _, writer in clients:
                writer.close()
            acceptor.close()
            await acceptor.wait_closed()

    acceptor: Acceptor
    asyncio.run(go())
    assert len(counts) == 5
    assert max(counts) <= 5


def test_a_full_listener_says_so_at_once() -> None:
    async def go() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            acceptor = Acceptor(listener, asyncio.Protocol, lambda _: True, REFUSED, None, 10)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == REFUSED
            writer.close()
            acceptor.close()

    asyncio.run(go())


def test_a_client_that_has_gone_is_refused_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """It closed its connection while that waited in the system's queue: the refusal's first bytes reset it."""
    num_lost = 0

    class Refusing(asyncio.Protocol):
        def __init__(self, connected: Callable[[], None]) -> None:
            self.connected = connected

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.connected()
            assert isinstance(transport, asyncio.Transport)
            self.way = Transport(transport, lambda: True, 30, 30)
            self.way.write(REFUSED)
            self.way.close()

        def connection_lost(self, error: Exception | None) -> None:
            nonlocal num_lost
            num_lost += 1
            self.way.ended()

    async def go() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for _ in range(5):
                socket.create_connection(listener.getsockname()).close()
            acceptor = Acceptor(listener, Refusing, lambda _: False, REFUSED, None, 10)
            async with asyncio.timeout(10):
                await eventually(lambda: num_lost == 5)
            acceptor.close()

    asyncio.run(go())
    assert not caplog.records


def test_a_refused_client_reads_why_after_it_sent_its_request(serve) -> None:
    from penstock.serving.settings import GatewayLimits, GatewaySettings

    service = serve(settings=GatewaySettings(limits=GatewayLimits(num_connections=1)))
    with service.connect():
        until(lambda: len(service.listener.connections) == 1)
        for _ in range(20):
            body = json.dumps({"prompt": "x" * 200_000}).encode()
            status, headers, data = service.ask("POST", "/tokenize", body)
            assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
            assert json.loads(data)["error"]["message"] == "Too many open connections. Retry later."
