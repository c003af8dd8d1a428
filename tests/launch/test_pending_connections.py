"""Connections at the address where launchers meet: of other users, idle ones, and with text that is no text."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import shutil
import socket
import struct
import subprocess
from contextlib import suppress
from typing import Any

import pytest

from penstock.errors import InvalidArgumentError, UnavailableError
from penstock.launch import rendezvous
from penstock.launch.pending_connections import MAX_PENDING, PendingServer
from penstock.launch.rendezvous import NodePlace, Rendezvous, host, join
from penstock.processes import peer_user
from tests.support.errors import raises

SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin")
TOKEN = b"a token of both machines"


def settings(number: int | None, token: bytes = b"", timeout_s: float = 60.0) -> Rendezvous:
    return Rendezvous("", token, 2, 1, number, 1000, timeout_s)


async def ended(hosting: asyncio.Future[Any]) -> None:
    """Cancel a host, and wait until it has closed its connections."""
    hosting.cancel()
    with suppress(asyncio.CancelledError):
        await hosting
    await asyncio.sleep(0)


async def both(listener: socket.socket, token: bytes = b"") -> list[NodePlace]:
    """The places of a host and of a guest."""
    address = listener.getsockname()
    results = await asyncio.gather(host(listener, settings(0, token), "127.0.0.1"), join(address, settings(1, token)))
    await asyncio.gather(*(link.finish() for _, link in results))
    return [place for place, _ in results]


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_user_of_a_peer_is_known(family: socket.AddressFamily, address: str) -> None:
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with (
        socket.create_server((address, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as own,
        listener.accept()[0] as other,
    ):
        assert peer_user.user_of_peer(own) == peer_user.user_of_peer(other) == os.geteuid()
        own.shutdown(socket.SHUT_WR)
        assert peer_user.user_of_peer(other) is None  # half closed: no user is certain


def test_the_user_of_a_peer_of_the_other_family_is_known() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as own,
        listener.accept()[0] as other,
    ):
        assert peer_user.user_of_peer(own) == peer_user.user_of_peer(other) == os.geteuid()


def test_another_user_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first connection is another user's; the second one is of this user."""
    users = iter([os.geteuid() + 1])
    monkeypatch.setattr(peer_user, "user_of_peer", lambda _: next(users, os.geteuid()))

    async def run() -> tuple[dict[str, Any], list[NodePlace]]:
        listener = socket.create_server(("127.0.0.1", 0))
        hosting = asyncio.ensure_future(host(listener, settings(0), "127.0.0.1"))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        message = json.loads(await reader.readline())
        assert await reader.read() == b""
        writer.close()
        (place, link), (own, own_link) = await asyncio.gather(hosting, join(listener.getsockname(), settings(1)))
        await asyncio.gather(link.finish(), own_link.finish())
        return message, [place, own]

    message, places = asyncio.run(run())
    assert message.keys() == {"refused"}
    assert [place.node_rank for place in places] == [0, 1]


def test_a_host_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter([os.geteuid()])  # as the host sees the guest
    monkeypatch.setattr(peer_user, "user_of_peer", lambda _: next(users, os.geteuid() + 1))

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        hosting = asyncio.ensure_future(host(listener, settings(0), "127.0.0.1"))
        try:
            await join(listener.getsockname(), settings(1))
        finally:
            await ended(hosting)

    with raises(InvalidArgumentError, param="rdzv", match="--rdzv-token-file"):
        asyncio.run(run())


def test_a_token_suffices_for_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_user, "user_of_peer", lambda _: os.geteuid() + 1)
    places = asyncio.run(both(socket.create_server(("127.0.0.1", 0)), TOKEN))
    assert [place.node_rank for place in places] == [0, 1]


@pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM_PYTHON, reason="needs root, and a Python that each user may run")
def test_a_process_of_another_user_is_refused() -> None:
    script = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); print(s.recv(9999))"

    async def run(listener: socket.socket) -> bytes:
        hosting = asyncio.ensure_future(host(listener, settings(0), "127.0.0.1"))
        command = (SYSTEM_PYTHON, "-I", "-S", "-c", script, str(listener.getsockname()[1]))
        done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, user=65534, check=True)
        await ended(hosting)
        return done.stdout

    assert b"refused" in asyncio.run(run(socket.create_server(("127.0.0.1", 0))))


def test_idle_connections_are_bounded_and_a_guest_joins() -> None:
    num_idle = 200

    async def run() -> list[NodePlace]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=num_idle)
        hosting = asyncio.ensure_future(host(listener, settings(0, TOKEN), "127.0.0.1"))
        idle = [await asyncio.open_connection(*listener.getsockname()) for _ in range(num_idle)]
        (place, link), (own, own_link) = await asyncio.gather(hosting, join(listener.getsockname(), settings(1, TOKEN)))
        for reader, _ in idle[: num_idle - MAX_PENDING]:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # the host has closed it
                await reader.readexactly(1 << 20)
        await asyncio.gather(link.finish(), own_link.finish())
        for _, writer in idle:
            writer.close()
        return [place, own]

    assert [place.node_rank for place in asyncio.run(run())] == [0, 1]


class _Exhausted(socket.socket):
    """A listening socket whose first calls of accept find no file descriptor."""

    num_failures = 3

    def accept(self) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_accept_pauses_when_no_descriptor_is_left(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
        listener = _Exhausted()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = PendingServer(listener, accepted.put, pause_s=0)
        with socket.create_connection(listener.getsockname()), await accepted.get():
            server.close()
        assert listener.num_failures == 0
        await asyncio.sleep(0)

    asyncio.run(run())
    assert caplog.records == []


@pytest.mark.parametrize("how", ["reset", "nonce", "answer"])
def test_connections_that_cannot_be_answered_are_closed(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A connection that is reset before it is accepted, and text that is half a surrogate pair."""

    async def run() -> list[NodePlace]:
        listener = socket.create_server(("127.0.0.1", 0))
        connection = socket.create_connection(listener.getsockname())
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        else:
            connection.sendall(b'{"nonce": "0"}\n' * (how == "answer") + b'{"%s": "\\ud800"}\n' % how.encode())
        results = await asyncio.gather(
            host(listener, settings(0, TOKEN), "127.0.0.1"), join(listener.getsockname(), settings(1, TOKEN))
        )
        await asyncio.gather(*(link.finish() for _, link in results))
        connection.close()
        return [place for place, _ in results]

    assert [place.node_rank for place in asyncio.run(run())] == [0, 1]
    gc.collect()  # an error of a task that nobody has asked for is logged now
    assert caplog.records == []


def test_an_unexpected_error_of_connections_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def admit(connection: socket.socket) -> None:
        raise ValueError("\x1b[2J\n")

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        server = PendingServer(listener, admit)
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b""
            writer.close()
        server.close()
        await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()
    (record,) = caplog.records
    facts = record.__dict__["facts"]
    assert facts["event"] == "connection_failed"
    assert facts["message"].isprintable()


def test_text_of_other_machines_is_printable() -> None:
    async def run() -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        (_, link), (_, own) = await asyncio.gather(
            host(listener, settings(0), "127.0.0.1"), join(listener.getsockname(), settings(1))
        )
        await own.fail("rank 1 \x1b]0;title\x07\x1b[2Jfailed\u202e")
        return await link.lost()

    assert asyncio.run(run()) == "rank 1 ?]0;title??[2Jfailed?"


@pytest.mark.parametrize(
    "change", [{"master_addr": "a\0b"}, {"master_addr": 5}, {"world": "2"}, {"first_rank": -1}, {"x": 1}]
)
def test_malformed_places_are_refused(change: dict[str, object]) -> None:
    place = {"place": vars(NodePlace(1, 2, 1, 2, "127.0.0.1", 1000)) | change}
    with raises(UnavailableError, match="malformed"):
        asyncio.run(join_one_that_says("0", None, place))


@pytest.mark.parametrize(("nonce", "answer"), [("\ud800", None), ("0", "\ud800")])
def test_text_with_surrogates_is_refused(nonce: str, answer: str | None) -> None:
    with raises(UnavailableError, match="malformed"):
        asyncio.run(join_one_that_says(nonce, answer, {}))


async def join_one_that_says(nonce: str, answer: str | None, last: dict[str, object]) -> None:
    """Join a host that sends these messages.  ``answer`` None: the right one."""

    async def serve(listener: socket.socket) -> None:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        reader, writer = await asyncio.open_connection(sock=connection)
        theirs = json.loads(await reader.readline())["nonce"]
        proof = rendezvous._answer(b"", True, theirs, nonce) if answer is None and nonce.isascii() else answer
        for message in ({"nonce": nonce}, {"answer": proof}, last):
            writer.write(json.dumps(message).encode() + b"\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        serving = asyncio.ensure_future(serve(listener))
        try:
            await join(listener.getsockname(), settings(1))
        finally:
            await serving
