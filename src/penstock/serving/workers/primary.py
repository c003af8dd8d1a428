"""The primary's side of the workers: the socket that they dial, and starting them."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError

from penstock.errors import InvalidArgumentError, PenstockError, UnavailableError
from penstock.processes.frames import FIRST_BYTES, FrameStream
from penstock.processes.supervision import SupervisionPolicy
from penstock.serving.arrivals import Arrivals
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.messages import MAX_MESSAGE_BYTES, PROTOCOL, error_to
from penstock.serving.workers.private_folder import PrivateFolder
from penstock.serving.workers.worker_connection import LostWorkerError, WorkerConnection
from penstock.serving.workers.worker_process import COMMAND, WorkerProcess, not_started, start_process, unwritten_bytes
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.serving.workers.remote_worker_server import RemoteWorkerServer
    from penstock.serving.workers.remote_worker_settings import RemoteWorkerSettings
    from penstock.serving.workers.worker_config import WorkerConfig

__all__ = ["Primary"]

LOG: Final = logging.getLogger("penstock.serving")
_LAST_WORDS_S: Final = 1.0
_JOIN_S: Final = 10.0
_PAUSE_S: Final = 0.2
_BACKLOG: Final = 64


class Primary:
    """Listens for workers on a unix socket in a folder of its own, which nobody else may enter.

    ``command`` starts a worker.
    """

    def __init__(
        self,
        supervision: SupervisionPolicy | None = None,
        command: Sequence[str] = COMMAND,
        door: RemoteWorkerSettings | None = None,
    ) -> None:
        self._command = command
        self._door = door
        self.supervision = supervision or SupervisionPolicy()
        self.arrivals = Arrivals()
        self.address = ""
        self.port = 0
        """Of the door for workers of other machines, once it is open."""
        self.adopt: Callable[[WorkerConnection], None] = _nobody
        """Takes a worker of another machine that is ready; InvalidArgumentError when there is no place for it."""
        self._folder: PrivateFolder | None = None
        self._listener: socket.socket | None = None
        self._far: RemoteWorkerServer | None = None
        self._meeting: set[asyncio.Future[None]] = set()
        self._planning = asyncio.Lock()  # one at a time: each plans its memory with what the others left
        self._expected: dict[bytes, asyncio.Future[WorkerConnection]] = {}
        self._planned: dict[WorkerConnection, int] = {}
        self._tokenizers: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()

    async def open(self) -> None:
        """Begin to listen."""
        self._folder = PrivateFolder()
        self.address = f"unix:{self._folder.socket}"
        listener = self._listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._folder.socket))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            self._hold(self._accept(listener))
            if self._door is not None:
                from penstock.serving.workers.remote_worker_server import (
                    RemoteWorkerServer,  # gRPC: for others' machines alone
                )

                self._far = RemoteWorkerServer(
                    self._door, self._get_ready, lambda link: self.adopt(link), self.supervision.hang_s
                )
                self.port = await self._far.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop listening; workers that are left end with their streams."""
        if self._far is not None:
            await self._far.close()
            self._far = None
        for task in self._meeting:
            task.cancel()
        await asyncio.gather(*self._meeting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        for tokenizer in list(self._tokenizers.values()):
            await asyncio.to_thread(tokenizer.close)

    def replace_tls(self, key: bytes, certificate: bytes) -> None:
        """Use another key and certificate, in PEM, for workers of other machines that join from now on."""
        if self._far is not None:
            self._far.replace_tls(key, certificate)

    def _hold(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._meeting.add(task)
        task.add_done_callback(self._meeting.discard)

    async def _accept(self, listener: socket.socket) -> None:
        """Take workers of this machine until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                own, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left: it stays in the queue
                await asyncio.sleep(_PAUSE_S)
            else:
                self._hold(self._meet(own))

    async def launch(self, config: WorkerConfig, *, is_known: bool = False) -> WorkerProcess:
        """A worker whose model is loaded; raises what loading raised, UnavailableError when it ended instead.

        They load side by side, but plan one at a time: each with what the others left, but for one that ``is_known``.
        """
        has_planned = asyncio.Event()
        loading: asyncio.Future[WorkerProcess] | None = None
        try:
            async with nullcontext() if is_known else self._planning:
                loading = asyncio.ensure_future(self._load(config, has_planned))
                planned = asyncio.ensure_future(has_planned.wait())
                try:
                    await asyncio.wait((loading, planned), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    planned.cancel()
            return await loading
        except asyncio.CancelledError:
            if loading is not None:  # the process goes with it
                loading.cancel()
                (found,) = await asyncio.gather(loading, return_exceptions=True)
                if isinstance(found, WorkerProcess):
                    await found.stop()
            raise

    async def _load(self, config: WorkerConfig, has_planned: asyncio.Event) -> WorkerProcess:
        """Start a worker and wait until its model is loaded; ``has_planned`` is set once its memory is known."""
        token = secrets.token_hex(32)
        reserved = sum(unwritten_bytes(pid, link.plan) for link, pid in self._planned.items() if link.plan is not None)
        config = replace(config, address=self.address, token=token, reserved_bytes=reserved)
        joined = self._expected[_digest(token)] = asyncio.get_running_loop().create_future()
        try:
            process = await start_process(config, self._command)
            link = await self._loaded(process, joined, config.path, has_planned)
        except OSError as error:  # no descriptor, no process, no interpreter
            if isinstance(error, PenstockError):
                raise
            raise UnavailableError(f"a worker cannot be started: {error}") from error
        finally:
            self._expected.pop(_digest(token), None)
        return WorkerProcess(process, link, self.supervision.hang_s)

    async def _loaded(
        self,
        process: asyncio.subprocess.Process,
        joined: asyncio.Future[WorkerConnection],
        path: str,
        has_planned: asyncio.Event,
    ) -> WorkerConnection:
        """The link of a process whose model is loaded; else the process is gone."""

        def note_planned() -> None:
            self._planned[link] = process.pid
            has_planned.set()

        exited = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(self.supervision.load_s):
                link = await _first(joined, exited)
                if not link.gone.is_set():
                    link.on_planned, link.on_gone = note_planned, partial(self._forget_plan, link)
                    if link.plan is not None:
                        note_planned()
                return await _first(link.ready, exited)
        except BaseException as error:
            if process.returncode is None:
                process.kill()
            await process.wait()
            if process.stdin is not None:
                process.stdin.close()
            if isinstance(error, TimeoutError) and not isinstance(error, PenstockError):
                raise UnavailableError(f"{path}: not loaded within {self.supervision.load_s:g} s") from None
            raise
        finally:
            exited.cancel()

    def _forget_plan(self, link: WorkerConnection) -> None:
        self._planned.pop(link, None)

    async def _meet(self, own: socket.socket) -> None:
        """One worker's stream.  Who does not know a token that is expected is told nothing."""
        stream = FrameStream(own, pb.FromWorker.FromString, FIRST_BYTES)
        link: WorkerConnection | None = None
        try:
            async with asyncio.timeout(_JOIN_S):
                first = await stream.read()
            join = pb.Join() if first is None else first.join
            expected = self._find(join.token)
            if expected is None:
                return
            if join.protocol != PROTOCOL:
                why = UnavailableError(f"protocol {join.protocol} is not spoken here, but {PROTOCOL}")
                stream.send(pb.ToWorker(stop=pb.Stop(why=error_to(why))))
                return
            stream.max_bytes = MAX_MESSAGE_BYTES
            link = WorkerConnection(join.model, join.pid, self.arrivals)
            expected.set_result(link)
            link.pour_into(stream)
            while (message := await stream.read()) is not None:
                if not message.HasField("ready"):
                    link.hear(message)
                    continue
                await self._get_ready(link, message.ready)
                stream.listen(link.hear)
                await stream.ended.wait()
                if stream.error is not None:
                    LOG.error("%s: what the worker sent could not be taken", link.name, exc_info=stream.error)
                return
        except (PenstockError, ValueError, TimeoutError, DecodeError):  # it speaks something else: as if it had ended
            pass
        finally:
            if link is not None:
                link.fail("the worker's stream ended")
            stream.close()

    async def _get_ready(self, link: WorkerConnection, ready: pb.Ready) -> None:
        try:
            tokenizer = await asyncio.to_thread(self._tokenizer, dict(ready.files))
        except PenstockError as error:  # the worker opened these files: their process failed or was too slow here
            link.hear(pb.FromWorker(failed=error_to(error)))
            raise
        link.get_ready(ready, tokenizer)

    def _find(self, token: str) -> asyncio.Future[WorkerConnection] | None:
        """Compared by hashes in constant time; a token is good for one worker."""
        offered, found = _digest(token), None
        for known in self._expected:
            if hmac.compare_digest(known, offered):
                found = known
        return None if found is None else self._expected.pop(found)

    def _tokenizer(self, files: dict[str, bytes]) -> Tokenizer | None:
        """One object for all workers of the same files."""
        if "tokenizer.json" not in files:
            return None
        key = sha256()
        for name, data in sorted(files.items()):
            key.update(f"{name} {len(data)} ".encode() + data)
        tokenizer = self._tokenizers.get(key.digest())
        if tokenizer is None:
            tokenizer = self._tokenizers[key.digest()] = Tokenizer(files)
        return tokenizer


def _nobody(link: WorkerConnection) -> None:
    raise InvalidArgumentError(f"there is no model {link.model!r:.140} here")


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


async def _first(wanted: asyncio.Future[WorkerConnection], exited: asyncio.Future[int]) -> WorkerConnection:
    """What is wanted, unless the process ends first or its stream does, which is the same a moment earlier."""
    await asyncio.wait((wanted, exited), return_when=asyncio.FIRST_COMPLETED)
    if not wanted.done():  # its last words may be on their way; that its stream broke off says less than its status
        await asyncio.wait((wanted,), timeout=_LAST_WORDS_S)
    if wanted.done() and not isinstance(wanted.exception(), LostWorkerError):
        return wanted.result()
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(exited), _LAST_WORDS_S)
    raise not_started(exited.result() if exited.done() else None)
