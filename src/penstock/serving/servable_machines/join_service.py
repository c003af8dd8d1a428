"""The machine's side: it joins a service over TLS and runs servable workers of its servables."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import InvalidArgumentError, InvalidFileError, UnavailableError
from penstock.processes.frames import FrameStream
from penstock.processes.tls import client_context, connect_tls
from penstock.servables.machines.servable_host import ServableHost, offer_of
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.worker_main import MAX_FRAME_BYTES
from penstock.serving.servable_machines.machine_port import PROTOCOL
from penstock.serving.workers import handshake
from penstock.serving.workers.machines.remote_worker_client import serve_once, stay_joined
from penstock.serving.workers.worker import CONNECT_S

if TYPE_CHECKING:
    import ssl

    from penstock.servables.lifecycle.open_version import VersionSource

__all__ = ["ServableHostConfig", "join_service"]


@dataclass(frozen=True)
class ServableHostConfig:
    """The settings of a machine that joins a service.

    ``address``: HOST:PORT of the service's port for workers.  ``token``: the secret that they share.  ``sources``: the
    versions whose files it has.  ``num_processes``: how many processes it runs of each model, and of the Python stages
    of each servable.  ``ca``: trusted certificates in PEM; None trusts those of the system.
    """

    address: str
    token: str
    sources: Sequence[VersionSource]
    num_processes: int = 1
    ca: bytes | None = None


async def join_service(config: ServableHostConfig, *, again: bool = True) -> int:
    """Run processes for a service until a signal, and return the exit status.

    ``again``: connect again, after growing pauses, when the service cannot be reached or the connection ends; without
    it that is an UnavailableError.  Raises InvalidArgumentError if the service refuses this machine, FileAccessError
    for a file that cannot be read, and InvalidFileError for a ``ca`` that is not PEM.
    """
    try:
        context = client_context(config.ca, [handshake.STAGE_ALPN])
    except InvalidFileError as error:
        raise InvalidFileError(f"--ca-file: {error}") from error
    offer = await asyncio.to_thread(offer_of, config.sources, socket.gethostname(), config.num_processes)

    async def serve(stopped: asyncio.Event, hurry: asyncio.Event) -> int | str:
        hosts: list[ServableHost] = []

        def leave() -> bool:
            for host in hosts:
                host.leave()
            return bool(hosts)

        serving = _serve(config, offer, context, stopped, hosts.append)
        return await serve_once(config.address, serving, leave, stopped, hurry)

    return await stay_joined(config.address, serve, "servable-worker", again=again)


def _tell_joined(config: ServableHostConfig) -> None:
    versions = ", ".join(f"{source.name} {source.version}" for source in config.sources)
    text = f"joined {config.address} with {versions}; processes of each: {config.num_processes}"
    print(f"penstock servable-worker: {text}", file=sys.stderr, flush=True)


async def _serve(
    config: ServableHostConfig,
    offer: pb.Offer,
    context: ssl.SSLContext,
    stopped: asyncio.Event,
    on_join: Callable[[ServableHost], None],
) -> int:
    """Serve over one connection; return 0 if it ended after ``stopped``, otherwise 1.  Raises OSError and refusals."""
    connection, tls = await connect_tls(config.address, context, CONNECT_S)
    try:
        if tls.protocol != handshake.STAGE_ALPN:
            raise InvalidArgumentError("it takes no servables' processes. Install the same version of Penstock there")
        stream = FrameStream(connection, pb.ToMachine.FromString, MAX_FRAME_BYTES, tls)
        try:
            stream.send(pb.FromMachine(join=pb.Join(protocol=PROTOCOL, token=config.token)))
            async with asyncio.timeout(handshake.JOIN_S):
                answer = await stream.read()
            if answer is None:
                raise UnavailableError("the service closed the connection")
            if not answer.HasField("welcome"):
                raise InvalidArgumentError(answer.refusal.text or "it did not answer as a service does")
            host = ServableHost(stream, config.sources)
            on_join(host)
            await host.run(offer, lambda: _tell_joined(config))
            return 0 if stopped.is_set() else 1
        finally:
            stream.close()
    finally:
        connection.close()
