"""``penstock launch``: one command as several ranks, with torchrun's variables; one rank's end ends all.

Across machines, launchers meet at one address (``rendezvous.py``); none of the ranks' own messages go through it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.launch.environment import LAUNCHER_VARIABLES, RankEnvironment, variables_of
from penstock.launch.local_group import GRACE_S, LocalGroup, describe_end
from penstock.launch.rendezvous import Link, NodePlace, Rendezvous, host, is_host, join

__all__ = ["LaunchSettings", "launch"]

_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True)
class LaunchSettings:
    """The settings of a launch.

    ``command``: the program and its arguments.  ``nproc``: ranks on this machine.  ``nnodes``: machines.  ``rdzv``:
    where their launchers meet, or None for one machine; the machine that has the address is the host.  ``node_rank``:
    the number of this machine, or None.  ``token``: known to the launchers of all machines.  ``master_port``:
    MASTER_PORT of the ranks, or 0 for a free one.  ``timeout_s``: how long to wait for the other machines.
    ``log_dir``: where the output of each rank is also written, or None.
    """

    command: tuple[str, ...]
    nproc: int = 1
    nnodes: int = 1
    rdzv: tuple[str, int] | None = None
    run_id: str = ""
    node_rank: int | None = None
    token: bytes = b""
    master_port: int = 0
    timeout_s: float = 300.0
    is_prefixed: bool = True
    log_dir: Path | None = None


def launch(settings: LaunchSettings) -> int:
    """Run the command as ranks; return 0 if all ended with status 0, else the status of the first that did not.

    128 + N for a rank that signal N killed, and for a signal that this process got.  Raises FileAccessError if the
    command or an address cannot be used, UnavailableError if other machines do not come.
    """
    return asyncio.run(_launch(settings))


async def _launch(settings: LaunchSettings) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, signals.put_nowait, number)
    port = _reserve(settings.master_port)
    link: Link | None = None
    try:
        if settings.rdzv is None:
            place = NodePlace(0, 1, 0, settings.nproc, _LOOPBACK, port.getsockname()[1])
        else:
            met = await _unless_signalled(_meet(settings, settings.rdzv, port.getsockname()[1]), signals)
            if isinstance(met, int):
                return 128 + met
            place, link = met
        return await _run(settings, place, link, signals)
    finally:
        port.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _unless_signalled(
    work: Awaitable[tuple[NodePlace, Link]], signals: asyncio.Queue[int]
) -> tuple[NodePlace, Link] | int:
    """Return the result, or the number of a signal that came before."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(signals.get())
    done, _ = await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
    if working in done:
        waiting.cancel()
        return working.result()
    working.cancel()
    return waiting.result()


def _reserve(number: int) -> socket.socket:
    """Return a socket that keeps MASTER_PORT for rank 0.

    It does not listen, so that rank 0 can open the port with SO_REUSEADDR, as PyTorch's store does; the system gives
    the port to nobody else meanwhile.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(("", number))
    except OSError as error:
        reserved.close()
        message = f"--master-port: failed to bind port {number}: {error.strerror}"
        raise FileAccessError(message, param="master_port") from None
    return reserved


async def _meet(settings: LaunchSettings, rdzv: tuple[str, int], master_port: int) -> tuple[NodePlace, Link]:
    rendezvous = Rendezvous(
        run_id=settings.run_id,
        token=settings.token,
        num_nodes=settings.nnodes,
        nproc=settings.nproc,
        node_rank=settings.node_rank,
        master_port=master_port,
        timeout_s=settings.timeout_s,
    )
    server = _listen(rdzv) if settings.node_rank in (None, 0) else None
    if server is not None:
        return await host(server, rendezvous, rdzv[0], _say)
    if settings.node_rank == 0 and _is_local(rdzv) and not await is_host(rdzv):
        message = f"--rdzv: failed to listen at {rdzv[0]}:{rdzv[1]}: another program has the port"
        raise FileAccessError(message, param="rdzv")
    return await join(rdzv, rendezvous, _say)


def _listen(address: tuple[str, int]) -> socket.socket | None:
    """Return a socket at the address; None if it is another machine's, or another program of this machine has it."""
    listener, where = _socket_for(address)
    try:
        listener.bind(where)
        listener.listen()
    except OSError:
        listener.close()
        return None
    return listener


def _is_local(address: tuple[str, int]) -> bool:
    """Return True if the address is one of this machine, whether its port is free or not."""
    listener, where = _socket_for(address)
    with listener:
        try:
            listener.bind((where[0], 0, *where[2:]))
        except OSError:
            return False
    return True


def _socket_for(address: tuple[str, int]) -> tuple[socket.socket, tuple[Any, ...]]:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidArgumentError(f"--rdzv: unknown host {address[0]}: {error.strerror}", param="rdzv") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener, where


async def _run(settings: LaunchSettings, place: NodePlace, link: Link | None, signals: asyncio.Queue[int]) -> int:
    outputs = (sys.stdout.buffer, sys.stderr.buffer)
    group = LocalGroup(secrets.token_hex(8), *outputs, is_prefixed=settings.is_prefixed, log_dir=settings.log_dir)
    try:
        group.start(settings.command, _environments(settings, place))
    except FileAccessError as error:
        await group.end(grace_s=0)
        if link is not None:
            await link.fail(str(error))
        raise
    waits: dict[str, asyncio.Task[object]] = {
        "ranks": asyncio.ensure_future(group.wait()),
        "signal": asyncio.ensure_future(signals.get()),
    }
    if link is not None:
        waits["machines"] = asyncio.ensure_future(link.lost())
    try:
        await asyncio.wait(waits.values(), return_when=asyncio.FIRST_COMPLETED)
        if waits["signal"].done():
            return await _end_by_signal(group, link, signals, int(str(waits["signal"].result())))
        if link is not None and waits["machines"].done():
            _say(f"{waits['machines'].result()}. The ranks of this machine were ended.")
            await group.end()
            return 1
        first = waits["ranks"].result()
        return await _settle(group, link, waits, place.world, first if isinstance(first, tuple) else None)
    finally:
        for wait in waits.values():
            wait.cancel()


async def _settle(
    group: LocalGroup,
    link: Link | None,
    waits: Mapping[str, asyncio.Task[object]],
    world: int,
    first: tuple[int, int] | None,
) -> int:
    """Return the exit status after the ranks of this machine have ended, or the ``first`` of them has failed."""
    if first is not None:
        rank, status = first
        others = f" The other {'rank was' if world == 2 else 'ranks were'} ended." if world > 1 else ""
        reason = f"rank {rank} {describe_end(status)}"
        _say(f"{reason}.{others}")
        if link is not None:
            await link.fail(reason)
        await group.end()
        return status if status > 0 else 128 - status
    reason = ""
    if link is not None:
        waits["machines"].cancel()
        reason = await link.finish()
    await group.end(grace_s=0)  # what the ranks left running
    if reason:
        _say(f"{reason}. The ranks of this machine had ended.")
    return 1 if reason else 0


async def _end_by_signal(group: LocalGroup, link: Link | None, signals: asyncio.Queue[int], number: int) -> int:
    """Pass a signal on; a second one kills."""
    if link is not None:
        await link.fail(f"the launcher of another machine got {signal.Signals(number).name}")
    ending = asyncio.ensure_future(group.end(number, 10.0 if number == signal.SIGINT else GRACE_S))
    again = asyncio.ensure_future(signals.get())
    await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        ending.cancel()
        await group.end(signal.SIGKILL, 0)
    again.cancel()
    return 128 + number


def _environments(settings: LaunchSettings, place: NodePlace) -> dict[int, dict[str, str]]:
    base = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    base |= {"MASTER_ADDR": place.master_addr, "MASTER_PORT": str(place.master_port)}
    if settings.nproc > 1:
        base.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: ranks must not all use all cores
    environments = {}
    for local in range(settings.nproc):
        rank = RankEnvironment(place.first_rank + local, place.world, local, settings.nproc)
        environments[rank.rank] = base | variables_of(rank, place.node_rank, place.num_nodes, settings.run_id or "none")
    return environments


def _say(text: str) -> None:
    print(f"penstock: {text}", file=sys.stderr, flush=True)
