"""The primary's side of the workers: the socket that they dial, and starting them."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import grpc

from penstock.engine.text import Tokenizer
from penstock.errors import FileAccessError, InvalidArgumentError, PenstockError, UnavailableError
from penstock.serving import wire_pb2 as pb
from penstock.serving.fleet import Patience
from penstock.serving.link import LostWorkerError, WorkerLink
from penstock.serving.own_folder import OwnFolder
from penstock.serving.process import COMMAND, WorkerProcess, not_started, start_process, unwritten_bytes
from penstock.serving.wire import MESSAGE_OPTIONS, PROTOCOL, error_to

if TYPE_CHECKING:
    from penstock.serving.config import WorkerConfig

__all__ = ["Primary", "WorkerDoor"]

_METHOD: Final = "penstock.v1.Primary"
_LAST_WORDS_S: Final = 1.0
_JOIN_S: Final = 10.0
_MOST_STREAMS: Final = 1024
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # else two services share the workers of a port, and nobody is told
    # of workers far away, who want to know that this machine is there
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True)
class WorkerDoor:
    """Where workers of other machines join: TLS with the certificate and key in PEM, and a token that they share."""

    host: str
    port: int
    certificate: bytes
    key: bytes
    token: str


class Primary:
    """Listens for workers on a unix socket in a folder of its own, which nobody else may enter.

    ``command`` starts a worker.
    """

    def __init__(
        self, patience: Patience | None = None, command: Sequence[str] = COMMAND, door: WorkerDoor | None = None
    ) -> None:
        self._command = command
        self._door = door
        self.patience = patience or Patience()
        self.address = ""
        self.port = 0
        """Of the door for workers of other machines, once it is open."""
        self.adopt: Callable[[WorkerLink], None] = _nobody
        """Takes a worker of another machine that is ready; InvalidArgumentError when there is no place for it."""
        self._folder: OwnFolder | None = None
        self._server: Any = None
        self._planning = asyncio.Lock()  # one at a time: each plans its memory with what the others left
        self._expected: dict[bytes, asyncio.Future[WorkerLink]] = {}
        self._planned: dict[WorkerLink, int] = {}
        self._tokenizers: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()

    async def open(self) -> None:
        """Begin to listen."""
        self._folder = OwnFolder()
        self.address = f"unix:{self._folder.socket}"
        self._server = grpc.aio.server(options=(*MESSAGE_OPTIONS, *_OPTIONS), maximum_concurrent_rpcs=_MOST_STREAMS)
        join = grpc.stream_stream_rpc_method_handler(
            self._join, request_deserializer=pb.FromWorker.FromString, response_serializer=pb.ToWorker.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_METHOD, {"Join": join}),))
        self._server.add_insecure_port(self.address)
        if self._door is not None:
            await self._open_door(self._door)
        await self._server.start()

    async def _open_door(self, door: WorkerDoor) -> None:
        address = f"[{door.host}]:{door.port}" if ":" in door.host else f"{door.host}:{door.port}"
        try:
            credentials = grpc.ssl_server_credentials([(door.key, door.certificate)])
            self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            await self.close()
            raise FileAccessError(f"{address}: cannot listen for workers there: {error}") from error

    async def close(self) -> None:
        """Stop listening; workers that are left end with their streams."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

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
        return WorkerProcess(process, link, self.patience.hang_s)

    async def _loaded(
        self,
        process: asyncio.subprocess.Process,
        joined: asyncio.Future[WorkerLink],
        path: str,
        has_planned: asyncio.Event,
    ) -> WorkerLink:
        """The link of a process whose model is loaded; else the process is gone."""

        def note_planned() -> None:
            self._planned[link] = process.pid
            has_planned.set()

        exited = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(self.patience.load_s):
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
                raise UnavailableError(f"{path}: not loaded within {self.patience.load_s:g} s") from None
            raise
        finally:
            exited.cancel()

    def _forget_plan(self, link: WorkerLink) -> None:
        self._planned.pop(link, None)

    async def _join(self, _requests: AsyncIterator[pb.FromWorker], context: Any) -> None:
        """One worker's stream."""
        try:
            first = await asyncio.wait_for(context.read(), _JOIN_S)
        except TimeoutError:
            first = grpc.aio.EOF
        join = first.join if first is not grpc.aio.EOF else pb.Join()
        expected = self._find(join.token)
        is_remote = expected is None and self._is_shared(join.token)
        if expected is None and not is_remote:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the token is not known here")
        if join.protocol != PROTOCOL:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"protocol {join.protocol} is not spoken here, but {PROTOCOL}"
            )
        link = WorkerLink(join.model, 0 if is_remote else join.pid)
        if expected is not None:
            expected.set_result(link)
        reader = asyncio.ensure_future(self._read(link, context, is_remote))
        writer = asyncio.ensure_future(self._write(link, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            refusal = reader.exception() if reader.done() else None
        finally:
            link.fail("the worker's stream ended")
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if isinstance(refusal, PenstockError):
            await self._refuse(context, refusal)

    async def _refuse(self, context: Any, why: PenstockError) -> None:
        """Tell a worker why, and let it go first: a stream that is broken off in the middle of a write says nothing."""
        await context.write(pb.ToWorker(stop=pb.Stop(why=error_to(why))))
        with suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_S):
                while await context.read() is not grpc.aio.EOF:
                    pass

    async def _read(self, link: WorkerLink, context: Any, is_remote: bool) -> None:
        """What the worker says, until its stream ends."""
        watch: asyncio.Future[None] | None = None
        try:
            while (message := await context.read()) is not grpc.aio.EOF and not link.gone.is_set():
                if not message.HasField("ready"):
                    link.hear(message)
                    continue
                tokenizer = await asyncio.to_thread(self._tokenizer, dict(message.ready.files))
                link.get_ready(message.ready, tokenizer)
                if is_remote:
                    self.adopt(link)
                    watch = asyncio.ensure_future(link.watch(self.patience.hang_s))
        finally:
            if watch is not None:
                watch.cancel()

    def _is_shared(self, token: str) -> bool:
        return self._door is not None and hmac.compare_digest(_digest(self._door.token), _digest(token))

    async def _write(self, link: WorkerLink, context: Any) -> None:
        async for message in link.outgoing():
            await context.write(message)

    def _find(self, token: str) -> asyncio.Future[WorkerLink] | None:
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


def _nobody(link: WorkerLink) -> None:
    raise InvalidArgumentError(f"there is no model {link.model!r:.140} here")


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


async def _first(wanted: asyncio.Future[WorkerLink], exited: asyncio.Future[int]) -> WorkerLink:
    """What is wanted, unless the process ends first or its stream does, which is the same a moment earlier."""
    await asyncio.wait((wanted, exited), return_when=asyncio.FIRST_COMPLETED)
    if not wanted.done():  # its last words may be on their way; that its stream broke off says less than its status
        await asyncio.wait((wanted,), timeout=_LAST_WORDS_S)
    if wanted.done() and not isinstance(wanted.exception(), LostWorkerError):
        return wanted.result()
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(exited), _LAST_WORDS_S)
    raise not_started(exited.result() if exited.done() else None)
