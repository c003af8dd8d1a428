"""Messages over a socket: in order, complete, from any thread, bounded, and buffered for a slow reader."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from penstock.errors import InternalError
from penstock.processes.frames import FrameStream
from penstock.processes.tls import TlsSession, client_context, server_context
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.messages import merge_steps
from tests.support.worker_processes import until

MOST = 1 << 22


def framed(message) -> bytes:
    data = message.SerializeToString()
    return struct.pack("<I", len(data)) + data


def step(key: int, text: str = "") -> pb.FromWorker:
    return pb.FromWorker(step=pb.Step(events=[pb.StepEvent(key=key, text=text)]))


def test_messages_arrive_whole_and_in_order_in_any_pieces() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        stream = FrameStream(here, pb.FromWorker.FromString, MOST)
        wanted = [step(1), step(2, "x" * 300_000), pb.FromWorker(), step(3, "ä")]
        data = b"".join(map(framed, wanted))
        cuts = [0, 1, 3, 4, 9, 10, 150_000, len(data) - 1, len(data)]
        for first, last in pairwise(cuts):
            there.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(there, data[first:last])
            await asyncio.sleep(0)
        assert [await stream.read() for _ in wanted] == wanted
        heard: list[pb.FromWorker] = []
        await asyncio.get_running_loop().sock_sendall(there, framed(step(4)))
        await until(lambda: stream._unread)
        stream.listen(heard.append)  # including messages that arrived before
        await asyncio.get_running_loop().sock_sendall(there, framed(step(5)))
        await until(lambda: len(heard) == 2)
        assert heard == [step(4), step(5)]
        there.close()
        await stream.ended.wait()
        assert stream.error is None
        assert await stream.read() is None
        assert stream.send(step(6)) is False, "the stream has ended: nothing happens"
        stream.close()

    asyncio.run(main())


def test_messages_that_arrive_together_are_merged() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        stream = FrameStream(here, pb.FromWorker.FromString, MOST)
        heard: list[pb.FromWorker] = []
        stream.listen(heard.append, merge_steps)
        other = pb.FromWorker(heartbeat=pb.Heartbeat())
        there.sendall(b"".join(map(framed, [step(1, "a"), step(1, "b"), other, step(1, "c"), step(2, "d")])) + b"\3\0")
        await until(lambda: len(heard) == 3)
        both = pb.FromWorker(step=pb.Step(events=[*step(1, "c").step.events, *step(2, "d").step.events]))
        assert heard == [step(1, "ab"), other, both]
        there.sendall(b"\0\0xxx")  # no message: the one before it is delivered
        await stream.ended.wait()
        there.close()
        assert stream.error is not None

    asyncio.run(main())


def test_threads_never_wait_for_a_slow_reader() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        one = FrameStream(here, pb.ToWorker.FromString, MOST)
        other = FrameStream(there, pb.FromWorker.FromString, MOST)
        room: list[bool] = []
        one.on_room = lambda: room.append(one.has_room)
        asyncio.get_running_loop().remove_reader(there)  # it does not read yet
        text, num_each = "x" * 20_000, 50

        def send(start: int) -> None:
            for number in range(start, start + num_each):
                one.send(step(number, text))

        threads = [threading.Thread(target=send, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:  # no thread waits for the reader
            await asyncio.to_thread(thread.join)
        assert not one.has_room
        assert room == []
        asyncio.get_running_loop().add_reader(there, other._read)
        keys = [(await other.read()).step.events[0].key for _ in range(4 * num_each)]
        for i in range(4):
            assert [key for key in keys if key // 1000 == i] == [*range(1000 * i, 1000 * i + num_each)]
        await until(lambda: room)
        assert room == [True]
        one.close()
        other.close()

    asyncio.run(main())


async def tls_pair(certificate: tuple[Path, Path]) -> tuple[FrameStream, FrameStream]:
    """A worker's and a primary's end of a stream with TLS."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    client = TlsSession(client_context(certificate[0].read_bytes(), ["a"]), "localhost")
    server = TlsSession(server_context(*certificate, ["b", "a"]))
    await asyncio.gather(client.handshake(here), server.handshake(there))
    assert client.protocol == server.protocol == "a"
    worker = FrameStream(here, pb.ToWorker.FromString, MOST, client)
    return worker, FrameStream(there, pb.FromWorker.FromString, MOST, server)


def test_tls_carries_messages_both_ways_from_any_thread(certificate) -> None:
    async def main() -> None:
        worker, primary = await tls_pair(certificate)
        text, num_each = "x" * 50_000, 40

        def send(start: int) -> None:
            for number in range(start, start + num_each):
                worker.send(step(number, text))

        threads = [threading.Thread(target=send, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for number in range(num_each):  # at the same time, the other way
            primary.send(pb.ToWorker(abort=pb.Abort(key=number)))
        messages = [await primary.read() for _ in range(4 * num_each)]
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert all(message.step.events[0].text == text for message in messages)
        keys = [message.step.events[0].key for message in messages]
        for i in range(4):
            assert [key for key in keys if key // 1000 == i] == [*range(1000 * i, 1000 * i + num_each)]
        assert [(await worker.read()).abort.key for _ in range(num_each)] == [*range(num_each)]
        worker.close()
        await primary.ended.wait()
        assert primary.error is None
        assert primary.send(pb.ToWorker()) is False
        primary.close()

    asyncio.run(main())


def test_a_changed_byte_ends_a_tls_stream(certificate) -> None:
    async def main() -> None:
        worker, primary = await tls_pair(certificate)
        worker._socket.send(b"\x17\x03\x03\x00\x20" + b"\0" * 32)  # a record that was not encrypted with their keys
        assert await primary.read() is None
        assert primary.ended.is_set()
        worker.close()

    asyncio.run(main())


def test_a_handshake_that_never_ends_is_bounded(certificate) -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        here.setblocking(False)
        there.setblocking(False)
        server = TlsSession(server_context(*certificate, ["a"]))
        record = b"\x16\x03\x01\x00\x04\x01\xff\xff\xff"  # the beginning of a hello of 16 MB
        filler = b"\x16\x03\x01\x40\x00" + b"\0" * 16384
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(there, record + filler * 100))
        with pytest.raises(OSError):  # noqa: PT011 - from OpenSSL or from the limit, whichever comes first
            await server.handshake(here)
        here.close()
        await asyncio.gather(sending, return_exceptions=True)
        there.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "kind"),
    [(struct.pack("<I", 101) + b"x" * 8, InternalError), (struct.pack("<I", 4) + b"\xff" * 4, DecodeError)],
    ids=["too long", "invalid"],
)
def test_an_invalid_message_ends_the_stream(data: bytes, kind: type[Exception]) -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        stream = FrameStream(here, pb.FromWorker.FromString, 100)
        there.sendall(data)
        with pytest.raises(kind):
            await stream.read()
        assert stream.ended.is_set()
        assert there.recv(1) == b""
        there.close()

    asyncio.run(main())


def test_a_listener_that_raises_ends_the_stream() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        stream = FrameStream(here, pb.FromWorker.FromString, 100)
        stream.listen(lambda message: [][message.step.events[0].key])
        there.sendall(framed(step(1)) * 2)
        await stream.ended.wait()
        assert isinstance(stream.error, IndexError)
        there.close()

    asyncio.run(main())
