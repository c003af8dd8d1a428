"""Workers of other machines: TLS, a token and equal weights let them join; they share load and may leave."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import ssl
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from penstock.engine.params import SamplingParams
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnavailableError
from penstock.processes.supervision import SupervisionPolicy
from penstock.serving.arrivals import Arrivals
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers import handshake
from penstock.serving.workers.machines import remote_worker_server
from penstock.serving.workers.machines.remote_worker_client import join_primary, read_token
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import WorkerConfig
from penstock.serving.workers.worker_connection import WorkerConnection
from tests.support.errors import raises
from tests.support.joining_worker import TOKEN, joining_worker
from tests.support.worker_processes import DEMO, OPTIONS, faulty, pids, service, still, tokens_of, until

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
def remote(certificate: tuple[Path, Path]) -> RemoteWorkerSettings:
    return RemoteWorkerSettings("127.0.0.1", 0, *certificate, TOKEN)


def test_a_worker_joins_shares_load_and_leaves(remote, certificate, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "penstock.serving")

    async def main() -> None:
        async with service(remote=remote) as running:
            backend = await running.models.load(str(DEMO))
            alone = await tokens_of(backend, [5, 6], GREEDY)
            with joining_worker(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: len(backend.workers()) == 2)
                assert [worker.pid for worker in backend.workers()][1] == 0
                assert [worker.node for worker in backend.workers()] == ["", "127.0.0.1"]
                found = await asyncio.gather(*(tokens_of(backend, [5, 6], GREEDY) for _ in range(16)))
                assert found == [alone] * 16
                await until(lambda: all(worker.figures.num_finished for worker in backend.workers()))
                process.send_signal(signal.SIGTERM)
                await until(lambda: len(backend.workers()) == 1)
                assert await tokens_of(backend, [5, 6], GREEDY) == alone
                await until(lambda: process.poll() == 0)
            with joining_worker(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: len(backend.workers()) == 2)
                await running.models.unload("demo")
                await until(lambda: process.poll() == 0)

    asyncio.run(main())
    told = [record.facts for record in caplog.records if "event" in getattr(record, "facts", {})]
    assert [(fact["event"], fact["node"]) for fact in told if fact["event"].startswith("worker_")] == [
        ("worker_ready", ""),
        *[("worker_joined", "127.0.0.1"), ("worker_left", "127.0.0.1")] * 2,
    ]


def test_a_worker_opens_no_port_and_shows_no_token(remote, certificate, tmp_path, caplog) -> None:
    """Neither in the arguments and the environment of its processes, nor in what it and the service say."""
    caplog.set_level("DEBUG")

    async def main() -> None:
        async with service(num_workers=0, remote=remote) as running:
            await running.models.load(str(DEMO))
            backend = running.models.get("demo")
            with joining_worker(running.primary.port, tmp_path, certificate[0]) as worker:
                await until(lambda: len(pids(backend)) == 1)
                root = psutil.Process(worker.pid)
                for process in (root, *root.children(recursive=True)):
                    assert [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN] == []
                    for name in ("cmdline", "environ"):
                        assert TOKEN.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes()
                worker.terminate()
                await asyncio.to_thread(worker.wait)
                assert TOKEN not in worker.stderr.read()

    asyncio.run(main())
    assert TOKEN not in caplog.text


@pytest.mark.long
def test_an_operator_drains_a_worker_that_joined(remote, certificate, tmp_path) -> None:
    async def main() -> None:
        async with service(remote=remote) as running:
            backend = await running.models.load(str(DEMO))
            with joining_worker(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: len(backend.workers()) == 2)
                name = backend.workers()[1].name
                with pytest.raises(InvalidArgumentError, match=r"replace: .* joined from another machine"):
                    await running.models.drain_worker("demo", name, replaces=True)
                await running.models.drain_worker("demo", name)
                await until(lambda: process.poll() == 0)
                await until(lambda: len(backend.workers()) == 1)

    asyncio.run(main())


def test_an_untrusted_primary_is_reported_in_a_line(remote, other_certificate, tmp_path) -> None:
    async def main() -> None:
        async with service(remote=remote) as running:
            with joining_worker(running.primary.port, tmp_path, other_certificate[0]) as process:
                await until(lambda: process.poll() is not None)
                told = process.stderr.read()
                assert process.returncode == 1
                assert "certificate is not trusted" in told
                assert len(told.splitlines()) == 1

    asyncio.run(main())


def test_a_ca_file_without_certificates_is_refused(tmp_path) -> None:
    for text in ("", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "\u00e4"):
        with raises(InvalidFileError, param="ca_file"):
            asyncio.run(join_primary(WorkerConfig("localhost:1", TOKEN, "demo", str(DEMO)), text.encode()))


def test_the_certificate_must_name_the_host(remote, certificate, tmp_path) -> None:
    """The certificate is for localhost and 127.0.0.1; 127.0.0.2 reaches the same port."""

    async def main() -> None:
        async with service(remote=replace(remote, host="")) as running:  # any address
            config = WorkerConfig(f"127.0.0.2:{running.primary.port}", TOKEN, "demo", str(DEMO))
            with raises(UnavailableError, param="address", match=r"certificate .*127.0.0.2"):
                await join_primary(config, certificate[0].read_bytes(), again=False)

    asyncio.run(main())


def frame(message: pb.FromWorker) -> bytes:
    data = message.SerializeToString()
    return struct.pack("<I", len(data)) + data


class Stranger:
    """A TLS connection to the port for workers."""

    def __init__(self, port: int, certificate: Path) -> None:
        context = ssl.create_default_context(cafile=str(certificate))
        self._connecting = asyncio.open_connection("localhost", port, ssl=context)

    async def __aenter__(self) -> Stranger:
        self.reader, self.writer = await self._connecting
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def answer(self, data: bytes) -> pb.ToWorker | None:
        """Send bytes; the primary's one message before it ends the connection, None if there is none."""
        self.writer.write(data)
        received = await self.reader.read()
        return pb.ToWorker.FromString(received[4:]) if received else None


def join_with(token: str, protocol: int = handshake.PROTOCOL) -> pb.FromWorker:
    return pb.FromWorker(join=pb.Join(protocol=protocol, token=token, model="demo"))


def test_a_stranger_without_the_token_is_refused(remote, certificate) -> None:
    async def main() -> None:
        async with service(remote=remote) as running:
            for first in (
                pb.FromWorker(),
                pb.FromWorker(heartbeat=pb.Heartbeat()),
                join_with(""),
                join_with("x" * 64),
                join_with(TOKEN[:-1]),
                join_with(TOKEN + "0"),
                join_with("x" * 64, protocol=1),
            ):
                async with Stranger(running.primary.port, certificate[0]) as stranger:
                    answer = await stranger.answer(frame(first) + frame(pb.FromWorker(failed=pb.Error())) * 3)
                    assert answer.stop.reason.kind == "InvalidArgumentError"
                    assert "unknown worker token" in answer.stop.reason.text

    asyncio.run(main())


@pytest.mark.parametrize(
    "data",
    [struct.pack("<I", (1 << 16) + 1), struct.pack("<I", 0xFFFFFFFF), struct.pack("<I", 8) + b"\xff" * 8],
    ids=["longer than 64 KiB", "4 GiB", "no message"],
)
def test_a_strangers_invalid_frame_ends_its_connection(remote, certificate, data) -> None:
    """A worker's message may have 256 MB.  A stranger is disconnected at the length, before the message is kept."""

    async def main() -> None:
        async with service(remote=remote) as running:
            async with Stranger(running.primary.port, certificate[0]) as stranger:
                assert await stranger.answer(data) is None
            async with Stranger(running.primary.port, certificate[0]) as stranger:  # the port still works
                assert (await stranger.answer(frame(join_with("")))).HasField("stop")

    asyncio.run(main())


def test_garbage_instead_of_tls_ends_the_connection(remote) -> None:
    async def main() -> None:
        async with service(remote=remote) as running:
            for data in (b"GET / HTTP/1.1\r\n\r\n", frame(join_with(TOKEN)), b"\0" * 200_000, random.randbytes(5000)):
                reader, writer = await asyncio.open_connection("127.0.0.1", running.primary.port)
                writer.write(data)
                received = b""
                with suppress(ConnectionError):
                    received = await asyncio.wait_for(reader.read(), 300)
                assert len(received) <= 16, "a TLS alert at most"
                writer.close()

    asyncio.run(main())


def test_a_stranger_that_sends_nothing_is_disconnected(remote, certificate, monkeypatch) -> None:
    """Before TLS, after it, and in the middle of a frame."""
    monkeypatch.setattr(handshake, "JOIN_S", 0.5)

    async def main() -> None:
        async with service(remote=remote) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.primary.port)
            assert await asyncio.wait_for(reader.read(), 300) == b""
            writer.close()
            for data in (b"", frame(join_with(TOKEN))[:-1]):
                async with Stranger(running.primary.port, certificate[0]) as stranger:
                    assert await asyncio.wait_for(stranger.answer(data), 300) is None

    asyncio.run(main())


def test_strangers_cannot_use_up_the_descriptors(remote, monkeypatch) -> None:
    monkeypatch.setattr(remote_worker_server, "MAX_CONNECTIONS", 3)

    async def main() -> None:
        async with service(remote=remote) as running:
            silent = [await asyncio.open_connection("127.0.0.1", running.primary.port) for _ in range(3)]
            reader, writer = await asyncio.open_connection("127.0.0.1", running.primary.port)
            assert await asyncio.wait_for(reader.read(), 300) == b""
            for _, other in (*silent, (reader, writer)):
                other.close()

    asyncio.run(main())


def test_strangers_cannot_take_the_places_of_workers(remote, certificate, monkeypatch) -> None:
    """Two connections may lack authentication.  Those of workers do not count, and strangers' places become free."""
    monkeypatch.setattr(remote_worker_server, "MAX_UNAUTHENTICATED", 2)

    async def main() -> None:
        async with service(remote=remote) as running:
            port = running.primary.port
            async with Stranger(port, certificate[0]) as first, Stranger(port, certificate[0]) as second:
                for worker in (first, second):
                    worker.writer.write(frame(join_with(TOKEN)))
                    (size,) = struct.unpack("<I", await worker.reader.readexactly(4))
                    assert pb.ToWorker.FromString(await worker.reader.readexactly(size)).HasField("welcome")
                silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                assert await asyncio.wait_for(reader.read(), 300) == b""
                for _, other in (*silent, (reader, writer)):
                    other.close()
                await until(lambda: not running.primary._remote._unauthenticated)
                async with Stranger(port, certificate[0]) as stranger:
                    assert (await stranger.answer(frame(join_with("")))).HasField("stop")

    asyncio.run(main())


def test_an_old_worker_reads_both_versions(remote, certificate, caplog) -> None:
    async def main() -> None:
        async with service(remote=remote) as running:
            for protocol in (1, handshake.PROTOCOL + 1):
                async with Stranger(running.primary.port, certificate[0]) as stranger:
                    stranger.writer.write(frame(join_with(TOKEN, protocol)))
                    (size,) = struct.unpack("<I", await stranger.reader.readexactly(4))
                    reason = pb.ToWorker.FromString(await stranger.reader.readexactly(size)).stop.reason
                    assert reason.kind == "InvalidArgumentError"
                    assert f"primary uses worker protocol {handshake.PROTOCOL}" in reason.text
                    assert f"'demo' uses protocol {protocol}" in reason.text

    asyncio.run(main())
    facts = [record.facts for record in caplog.records if "facts" in vars(record)]
    told = [(one["worker_protocol"], one["protocol"]) for one in facts if one["event"] == "worker_refused"]
    assert told == [(1, handshake.PROTOCOL), (handshake.PROTOCOL + 1, handshake.PROTOCOL)]


def test_an_old_worker_over_grpc_reads_both_versions(remote, certificate, caplog) -> None:
    """Workers of protocol 1 report the status of their call."""

    async def main() -> None:
        async with service(remote=remote) as running:
            credentials = grpc.ssl_channel_credentials(certificate[0].read_bytes())
            async with grpc.aio.secure_channel(f"localhost:{running.primary.port}", credentials) as channel:
                call = channel.stream_stream("/penstock.v1.Primary/Join")(metadata=(("authorization", "Bearer x"),))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert refused.value.details() == str(handshake.protocol_error(handshake.PROTOCOL, 1))

    asyncio.run(main())
    assert [record.facts["worker_protocol"] for record in caplog.records if "facts" in vars(record)] == [1]


def test_an_old_primary_over_grpc_is_named(certificate) -> None:
    async def main() -> None:
        server = grpc.aio.server()
        credentials = grpc.ssl_server_credentials([(certificate[1].read_bytes(), certificate[0].read_bytes())])
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        try:
            config = WorkerConfig(f"localhost:{port}", TOKEN, "demo", str(DEMO))
            with raises(InvalidArgumentError, param="address", match=rf"protocol 1.*'demo' .* {handshake.PROTOCOL}"):
                await join_primary(config, certificate[0].read_bytes())
        finally:
            await server.stop(0)

    asyncio.run(main())


def test_a_replaced_certificate_holds_for_new_workers(remote, certificate, other_certificate, tmp_path) -> None:
    copies = [tmp_path / path.name for path in certificate]
    for source, copy in zip(certificate, copies, strict=True):
        copy.write_bytes(source.read_bytes())

    async def main() -> None:
        async with service(remote=replace(remote, certificate=copies[0], key=copies[1])) as running:
            async with Stranger(running.primary.port, certificate[0]) as old:
                for source, copy in zip(other_certificate, copies, strict=True):
                    copy.write_bytes(source.read_bytes())
                running.primary.reload_tls()
                async with Stranger(running.primary.port, other_certificate[0]) as new:
                    assert (await new.answer(frame(join_with("")))).HasField("stop")
                with pytest.raises(ssl.SSLCertVerificationError):
                    async with Stranger(running.primary.port, certificate[0]):
                        pass
                assert (await old.answer(frame(join_with("")))).HasField("stop"), "open connections stay"
            copies[1].write_text("no key")
            with pytest.raises(InvalidFileError):
                running.primary.reload_tls()
            async with Stranger(running.primary.port, other_certificate[0]):
                pass

    asyncio.run(main())


def test_the_port_for_workers_is_not_shared(remote) -> None:
    async def main() -> None:
        async with service(remote=remote) as running:
            second = Primary(remote=replace(remote, port=running.primary.port))
            with raises(FileAccessError, match=str(running.primary.port)):
                await second.open()

    asyncio.run(main())


def test_a_refused_worker_prints_the_reason(remote, certificate, tmp_path) -> None:
    short = ("--context-len", "512")

    async def refused(port: int, *more: str, **options) -> str:
        with joining_worker(port, tmp_path, certificate[0], *more, **options) as process:
            await until(lambda: process.poll() is not None)
            assert process.returncode == 2
            return process.stderr.read()

    async def main() -> None:
        async with service(remote=remote) as running:
            backend = await running.models.load(str(DEMO))
            port = running.primary.port
            assert "unknown worker token" in await refused(port, token="x" * 64)
            assert "no model 'other'" in await refused(port, "--name", "other")
            assert "up to 1024 tokens" in await refused(port, *short)
            assert len(backend.workers()) == 1

    asyncio.run(main())


def test_a_worker_with_other_weights_is_refused(remote, certificate, tmp_path) -> None:
    async def main() -> None:
        async with service(remote=remote) as running:
            backend = await running.models.load(str(DEMO))
            backend._group.weights_id = "another"
            with joining_worker(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: process.poll() is not None)
                assert "bundle differs" in process.stderr.read()

    asyncio.run(main())


def test_a_worker_that_joins_during_the_load_may_retry() -> None:
    """A refusal with InvalidArgumentError would end its command."""

    async def main() -> None:
        backend = RemoteBackend("demo", Primary(), OPTIONS)
        with pytest.raises(UnavailableError, match=r"^demo is still loading$"):
            backend.adopt(WorkerConnection("demo", 1, Arrivals()))

    asyncio.run(main())


def test_a_worker_joins_while_the_local_one_is_gone(remote, certificate, tmp_path) -> None:
    """The id of the weights stays known after the worker that reported it has ended."""
    model = tmp_path / "demo.psm"
    model.symlink_to(DEMO)
    go = model.with_suffix(".go")
    go.touch()

    async def main() -> None:
        async with service(remote=remote, command=faulty("waits")) as running:
            backend = await running.models.load(str(model))
            go.unlink()
            os.kill(*pids(backend), signal.SIGKILL)
            await until(lambda: not pids(backend))
            with joining_worker(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: backend.is_ready or process.poll() is not None)
                assert len(await tokens_of(backend, [5, 6], GREEDY)) == 8
            go.touch()

    asyncio.run(main())


def test_a_cancelled_update_still_drains_a_joined_worker(remote, certificate, tmp_path) -> None:
    """An update is cancelled while a remote worker of the old weights has a request that has not begun: the new worker
    answers it, and the remote one ends."""

    async def main() -> None:
        async with service(remote=remote, supervision=SupervisionPolicy(hang_s=600.0, drain_s=600.0)) as running:
            backend = await running.models.load(str(DEMO), "demo")
            with joining_worker(running.primary.port, tmp_path, certificate[0]) as process:
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
                assert joined.status == "draining"
                found = await asyncio.gather(*asked)
                far.resume()
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
        with raises(InvalidArgumentError, param="path"):
            read_token(tmp_path / "bad")
    (tmp_path / "good").chmod(0o644)
    with raises(InvalidFileError, param="path", match="chmod 600"):
        read_token(tmp_path / "good")
    with raises(FileAccessError, param="path"):
        read_token(tmp_path / "gone")
