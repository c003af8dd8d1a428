"""The primary's side of the workers: it has them started, and listens for their connections."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError

from penstock.cluster.placement.local import LocalPlacement
from penstock.cluster.placement.placement import Resources
from penstock.errors import InvalidArgumentError, PenstockError, UnavailableError
from penstock.file_kinds import is_gguf
from penstock.graph.bundle_id import bundle_id
from penstock.processes.frames import FIRST_BYTES, FrameStream
from penstock.processes.supervision import SupervisionPolicy
from penstock.runtime.machine import OomKills
from penstock.serving.arrivals import Arrivals
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.servable_machines.machine_port import refuse_machine
from penstock.serving.workers import handshake
from penstock.serving.workers.machines.remote_worker_server import Expected, RemoteWorkerServer, RemoteWorkerSettings
from penstock.serving.workers.memory_check import least_bytes, unwritten_bytes
from penstock.serving.workers.messages import MAX_MESSAGE_BYTES, error_to, merge_steps
from penstock.serving.workers.private_folder import PrivateFolder
from penstock.serving.workers.worker_connection import LostWorkerError, WorkerConnection
from penstock.serving.workers.worker_process import EndedEarlyError, WorkerProcess
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.cluster.placement.placement import PlacedGroup, Placement
    from penstock.serving.servable_machines.machine_port import ServeMachine
    from penstock.serving.workers.worker_config import WorkerConfig

__all__ = ["Primary"]

LOG: Final = logging.getLogger("penstock.serving")
_FLUSH_S: Final = 1.0
_PAUSE_S: Final = 0.2
_BACKLOG: Final = 64


class Primary:
    """Starts workers by its placement and takes their connections on a unix socket in a private folder.

    ``placement``: where workers run, by default on this machine.  ``remote`` says where workers of other machines join;
    None lets none join.  A placement on other machines needs it: its host is the address that they connect to.
    """

    def __init__(
        self,
        supervision: SupervisionPolicy | None = None,
        remote: RemoteWorkerSettings | None = None,
        placement: Placement | None = None,
    ) -> None:
        self._placement = placement or LocalPlacement()
        if remote is None and not self._placement.is_local:
            raise InvalidArgumentError(
                "remote: a placement on other machines needs the port where workers join", param="remote"
            )
        self.supervision = supervision or SupervisionPolicy()
        self.arrivals = Arrivals()
        self.address = ""
        self.port = 0
        """The port for workers of other machines while it is open."""
        self.adopt: Callable[[WorkerConnection], None] = _adopt_none
        """Adds a worker of another machine that is ready to a model; PenstockError if the model cannot use it."""
        self._folder: PrivateFolder | None = None
        self._listener: socket.socket | None = None
        self._settings = remote
        self.serve_machine: ServeMachine = refuse_machine
        """Serves a machine that has joined to run servable workers until its connection ends."""
        self._remote = (
            None
            if remote is None
            else RemoteWorkerServer(
                remote, self._serve_remote, self._find, lambda stream, address: self.serve_machine(stream, address)
            )
        )
        self._tasks: set[asyncio.Future[None]] = set()
        self._oom_kills = OomKills() if self._placement.is_local else None
        self._planning = asyncio.Lock()  # one at a time: each plans its memory with what the others left
        self._expected: dict[bytes, Expected] = {}
        self._planned: dict[WorkerConnection, int] = {}
        self._tokenizers: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()

    async def open(self) -> None:
        """Start to listen.

        Raises FileAccessError and InvalidFileError for the port of ``remote``, and the errors of the placement.
        """
        self._folder = PrivateFolder()
        self.address = f"unix:{self._folder.socket}"
        listener = self._listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._folder.socket))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            self._start_task(self._accept(listener))
            if self._remote is not None:
                self.port = await self._remote.open()
            await self._placement.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop listening, and end the connections and the groups that are left."""
        await self._placement.close()
        if self._remote is not None:
            await self._remote.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        for tokenizer in list(self._tokenizers.values()):
            await asyncio.to_thread(tokenizer.close)

    def reload_tls(self) -> None:
        """Read the certificate and key for workers of other machines again; FileAccessError, InvalidFileError.

        Open connections keep theirs.
        """
        if self._remote is not None:
            self._remote.reload_tls()

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept workers of this machine until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # no file descriptor is left; the connection stays in the queue
                await asyncio.sleep(_PAUSE_S)
            else:
                self._start_task(self._serve_local(connection))

    async def launch(self, config: WorkerConfig, *, is_known: bool = False) -> WorkerProcess:
        """Start a worker and wait until its model is loaded.

        Workers load at the same time but plan their memory one after another, each with what the others left.  With
        ``is_known`` the sizes are fixed and the worker does not wait its turn.  On other machines each plans with its
        share, and one that waits for room there delays no other.  Raises the error of loading, and UnavailableError if
        the process ends first.
        """
        waits = self._placement.is_local and not is_known
        has_planned = asyncio.Event()
        loading: asyncio.Future[WorkerProcess] | None = None
        try:
            async with self._planning if waits else nullcontext():
                loading = asyncio.ensure_future(self._load(config, has_planned))
                planned = asyncio.ensure_future(has_planned.wait())
                try:
                    await asyncio.wait((loading, planned), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    planned.cancel()
            return await loading
        except asyncio.CancelledError:
            if loading is not None:  # the process ends too
                loading.cancel()
                (outcome,) = await asyncio.gather(loading, return_exceptions=True)
                if isinstance(outcome, WorkerProcess):
                    await outcome.stop()
            raise

    async def _load(self, config: WorkerConfig, has_planned: asyncio.Event) -> WorkerProcess:
        """Start a worker and wait until its model is loaded; ``has_planned`` is set once its memory plan is known."""
        token = secrets.token_hex(32)
        reserved = sum(
            unwritten_bytes(pid, connection.plan)
            for connection, pid in self._planned.items()
            if connection.plan is not None
        )
        joined = self._expected[_digest(token)] = asyncio.get_running_loop().create_future()
        try:
            config = replace(self._joining(config), token=token, reserved_bytes=reserved)
            num_bytes = 0 if self._placement.is_local else await asyncio.to_thread(_least_bytes, config)
            process = await self._placement.start(config.to_json(), _resources(config, num_bytes))
            connection = await self._loaded(process, joined, config.path, has_planned)
            connection.node = process.node
        except OSError as error:  # no descriptor, no process, no interpreter
            if isinstance(error, PenstockError):
                raise
            raise UnavailableError(f"failed to start a worker: {error}") from error
        finally:
            self._expected.pop(_digest(token), None)
        return WorkerProcess(process, connection, self.supervision.hang_s, self._oom_kills)

    def _joining(self, config: WorkerConfig) -> WorkerConfig:
        """Return the configuration with the address where the worker joins, and how it trusts it."""
        settings = self._settings
        if self._placement.is_local or settings is None:
            return replace(config, address=self.address)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        ca = settings.certificate.read_text("ascii", "replace")
        return replace(config, address=f"{host}:{self.port}", ca=ca)

    async def _loaded(
        self,
        process: PlacedGroup,
        joined: asyncio.Future[WorkerConnection],
        path: str,
        has_planned: asyncio.Event,
    ) -> WorkerConnection:
        """Return the connection of a process once its model is loaded; if that fails, end the process."""

        def note_planned() -> None:
            if self._placement.is_local:
                self._planned[connection] = process.pid
            has_planned.set()

        exited = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(self.supervision.load_s):
                connection = await self._first(joined, exited)
                if not connection.gone.is_set():
                    connection.on_planned, connection.on_gone = note_planned, partial(self._forget_plan, connection)
                    if connection.plan is not None:
                        note_planned()
                return self._checked(await self._first(connection.ready, exited), path)
        except BaseException as error:
            process.kill()
            await process.wait()
            process.release()
            if isinstance(error, TimeoutError) and not isinstance(error, PenstockError):
                raise UnavailableError(f"{path}: loading took longer than {self.supervision.load_s:g} s") from None
            raise
        finally:
            exited.cancel()

    async def _first(self, connected: Expected, exited: asyncio.Future[int | None]) -> WorkerConnection:
        """Wait for ``connected``; raise UnavailableError if the process exits, or its connection ends, before that."""
        await asyncio.wait((connected, exited), return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():  # its last message may be on its way; a lost connection says less than an exit status
            await asyncio.wait((connected,), timeout=_FLUSH_S)
        if connected.done() and not isinstance(connected.exception(), LostWorkerError):
            return connected.result()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(exited), _FLUSH_S)
        raise EndedEarlyError(exited.result() if exited.done() else None, self._oom_kills)

    def _checked(self, connection: WorkerConnection, path: str) -> WorkerConnection:
        """Return a ready worker; InvalidArgumentError if it has opened another bundle on its machine."""
        if self._placement.is_local or not Path(path).is_file():
            return connection
        if connection.weights_id != bundle_id(path):
            connection.fail("its bundle differs")
            raise InvalidArgumentError(f"{path}: the bundle on the worker's machine differs from the one here")
        return connection

    def _forget_plan(self, connection: WorkerConnection) -> None:
        self._planned.pop(connection, None)

    async def _serve_local(self, own: socket.socket) -> None:
        """Serve one connection of this machine.  A peer without an expected token gets no answer."""
        stream = FrameStream(own, pb.FromWorker.FromString, FIRST_BYTES)
        try:
            async with asyncio.timeout(handshake.JOIN_S):
                request = await handshake.receive_join(stream)
            expected = self._find(request.token)
            if expected is None:
                return
            if request.protocol != handshake.PROTOCOL:
                await handshake.refuse(
                    stream, handshake.protocol_error(handshake.PROTOCOL, request.protocol, request.model)
                )
                return
            handshake.welcome(stream)
            connection = WorkerConnection(request.model, request.pid, self.arrivals)
            connection.role = request.role
            expected.set_result(connection)
            await self._receive(connection, stream, lambda: None)
        except (PenstockError, ValueError, TimeoutError, DecodeError):  # not a worker's messages
            pass
        finally:
            stream.close()

    async def _serve_remote(
        self, connection: WorkerConnection, stream: FrameStream[pb.FromWorker], expected: Expected | None
    ) -> None:
        """Serve a worker of another machine that has joined: the placed one that is expected, or one of its own."""
        watches: list[asyncio.Future[None]] = []
        if expected is not None:
            expected.set_result(connection)

        def on_ready() -> None:
            if expected is None:  # else its WorkerProcess watches the engine
                self.adopt(connection)
                watches.append(asyncio.ensure_future(connection.watch(self.supervision.hang_s)))
            watches.append(asyncio.ensure_future(connection.watch_link()))

        try:
            await self._receive(connection, stream, on_ready)
        finally:
            for watch in watches:
                watch.cancel()

    async def _receive(
        self, connection: WorkerConnection, stream: FrameStream[pb.FromWorker], on_ready: Callable[[], None]
    ) -> None:
        """Pass a worker's messages to its connection until the stream ends.

        If ``on_ready``, which is called once the model is loaded, raises PenstockError, the worker gets the reason.
        """
        stream.max_bytes = MAX_MESSAGE_BYTES
        connection.send_over(stream)
        try:
            while (message := await stream.read()) is not None:
                if not message.HasField("ready"):
                    connection.on_message(message)
                    continue
                await self._get_ready(connection, stream, message.ready)
                try:
                    on_ready()
                except PenstockError as error:
                    await handshake.refuse(stream, error)
                    return
                stream.listen(connection.on_message, merge_steps)
                await stream.ended.wait()
                if stream.error is not None:
                    LOG.error("%s: invalid message from the worker", connection.name, exc_info=stream.error)
                return
        finally:
            connection.fail("the worker closed its connection")

    async def _get_ready(
        self, connection: WorkerConnection, stream: FrameStream[pb.FromWorker], ready: pb.Ready
    ) -> None:
        try:
            tokenizer = await asyncio.to_thread(self._tokenizer, dict(ready.files))
        except PenstockError as error:  # the worker opened these files, but the tokenizer's process failed here
            if not connection.pid:  # it joined by itself: no load reports it
                await handshake.refuse(stream, error)
            connection.on_message(pb.FromWorker(failed=error_to(error)))
            raise
        connection.get_ready(ready, tokenizer)

    def _find(self, token: str) -> Expected | None:
        """Return the launch that expects a token, which is valid once.  The time taken does not depend on the token."""
        offered, match = _digest(token), None
        for expected_token in self._expected:
            if hmac.compare_digest(expected_token, offered):
                match = expected_token
        return None if match is None else self._expected.pop(match)

    def _tokenizer(self, files: dict[str, bytes]) -> Tokenizer | None:
        """Return the tokenizer of some files; workers with equal files share one."""
        if "tokenizer.json" not in files:
            return None
        key = sha256()
        for name, data in sorted(files.items()):
            key.update(f"{name} {len(data)} ".encode() + data)
        tokenizer = self._tokenizers.get(key.digest())
        if tokenizer is None:
            tokenizer = self._tokenizers[key.digest()] = Tokenizer(files)
            if reason := tokenizer.chat_template_error:  # compiled here, not by the first request
                LOG.warning("penstock: the chat template cannot be used, so chat is refused: %s", reason)
        return tokenizer


def _adopt_none(connection: WorkerConnection) -> None:
    raise InvalidArgumentError(f"this service has no model {connection.model!r:.140}")


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


def _least_bytes(config: WorkerConfig) -> int:
    """Return the least memory of a worker of a bundle; 0, not known, for anything else."""
    return least_bytes(config) if Path(config.path).is_file() and not is_gguf(Path(config.path)) else 0


def _resources(config: WorkerConfig, num_bytes: int) -> Resources:
    """Return what a worker needs on its machine, with ``num_bytes`` of memory."""
    options = config.options
    return Resources(options.layout.num_computing, max(1, options.threads), num_bytes)
