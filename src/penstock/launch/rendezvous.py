"""Launchers of several machines meet at one address, get their ranks, and watch each other.

Messages are lines of JSON.  The launcher that can open the address is the host; the others join it.  Both sides prove
that they know the token, if there is one: each answers the other's nonce with an HMAC (RFC 2104).  Without one, both
ends of a connection within a machine must belong to the same user.  Nothing is encrypted: the messages contain numbers
of ranks and how they ended.  Text of another machine is made printable before it is shown.  A beat every half second
shows that a machine is there; without one for BEAT_LIMIT_S, it counts as lost.  While the group is not whole, a
machine that is lost only gives back its place: it may join again, and machines whose host is lost connect to the next
one.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.config import is_integer
from penstock.errors import InternalError, InvalidArgumentError, UnavailableError
from penstock.launch.pending_connections import PendingServer
from penstock.processes import peer_user
from penstock.processes.silence import comes_in_time
from penstock.validation import printable
from penstock.version import __version__

__all__ = ["BEAT_LIMIT_S", "Link", "NodePlace", "Rendezvous", "host", "is_host", "join"]

BEAT_LIMIT_S: Final = 2.0
_BEAT_S: Final = 0.5
_RETRY_S: Final = 0.2
_SAY_S: Final = 2.0
"""The host says which machines are missing after this time, and then whenever that changes."""
_LINE: Final = 1 << 16
_MAX_TEXT_CHARS: Final = 2000
_MAX_PLACE: Final = 2**31 - 1


@dataclass(frozen=True)
class NodePlace:
    """The place of a machine: its number, its first rank, and what all machines know."""

    node_rank: int
    num_nodes: int
    first_rank: int
    world: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class Rendezvous:
    """The settings that a launcher brings to the rendezvous.  ``node_rank`` None lets the host choose it."""

    run_id: str
    token: bytes
    num_nodes: int
    nproc: int
    node_rank: int | None
    master_port: int
    timeout_s: float


@dataclass(frozen=True)
class _JoiningMember:
    """A machine as the host knows it; ``peer`` is None for the host itself.

    ``wanted``: its --node-rank, or None.  ``address``: where rank 0 listens if it is there.
    """

    peer: _Peer | None
    wanted: int | None
    nproc: int
    address: tuple[str, int]


class _LostError(UnavailableError):
    """A connection that ended, or a peer that sends nothing."""


class Link(Protocol):
    """The other machines."""

    async def lost(self) -> str:
        """Wait until a machine reports a failure or is lost; return what happened."""

    async def finish(self) -> str:
        """Report that the ranks here have ended with status 0; wait for the others.  Returns "" or a failure."""

    async def fail(self, reason: str) -> None:
        """Report a failure here to the other machines."""


class _Peer:
    """One connection: lines of JSON, and a beat in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.name = "?"
        self.is_done = False
        self._beating: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[str] | None = None
        self.on_done: Callable[[], None] = lambda: None

    def send(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        """Return the next message.  UnavailableError if the connection ends or the line is not one."""
        try:
            line = await self.reader.readuntil(b"\n")
            message = json.loads(line)
            json.dumps(message, ensure_ascii=False).encode()  # a ValueError for surrogates
        except (asyncio.IncompleteReadError, OSError):
            raise _LostError(f"{self.name} closed the connection") from None
        except (asyncio.LimitOverrunError, ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise UnavailableError(f"{self.name} sent a malformed message")
        return message

    async def prove(self, token: bytes, *, is_host: bool) -> bool:
        """Exchange nonces and answers; True if the peer knows the token.

        An answer contains the role, so that an answer of the host cannot be sent back to it.
        """
        own = secrets.token_hex(32)
        self.send(nonce=own)
        first = await self.receive()
        if "refused" in first and not is_host:
            raise InvalidArgumentError(f"{self.name} refused this machine: {_printable_text(first['refused'])}")
        if not is_host and (problem := self.token_error(token)):
            raise InvalidArgumentError(f"--rdzv: {self.name} {problem}", param="rdzv")
        peer_nonce = str(first.get("nonce"))
        self.send(answer=_answer(token, is_host, peer_nonce, own))
        answer = str((await self.receive()).get("answer"))
        return hmac.compare_digest(answer.encode(), _answer(token, not is_host, own, peer_nonce).encode())

    def token_error(self, token: bytes) -> str:
        """Return why the peer is not trusted without a token; empty if it is, or if there is one.

        The table of connections has the user of a peer within this machine.  Another machine is trusted: the user has
        passed --trusted-network.
        """
        connection = self.writer.get_extra_info("socket")
        if token or connection is None:
            return ""
        peername = self.writer.get_extra_info("peername")
        if peername is None:
            raise _LostError(f"{self.name} closed the connection")
        user = peer_user.user_of_peer(connection)
        if user == os.geteuid() or (user is None and not _is_loopback(peername[0])):
            return ""
        return "does not show that it belongs to your user. Pass --rdzv-token-file, or use another port"

    async def refuse(self, reason: str) -> None:
        self.send(refused=reason)
        await self.close()

    def start_beats(self) -> None:
        if self._beating is None:
            self._beating = asyncio.ensure_future(self._beat())

    def watch(self) -> asyncio.Task[str]:
        """Send beats from now on; return the task whose result is how the peer failed."""
        self.start_beats()
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._failure())
        return self._watching

    async def _beat(self) -> None:
        while True:
            self.send(beat=True)
            await asyncio.sleep(_BEAT_S)

    async def receive_in_time(self) -> dict[str, Any]:
        """Return the next message of a peer that sends beats."""
        receiving = asyncio.ensure_future(self.receive())
        try:
            if not await comes_in_time(receiving, BEAT_LIMIT_S):
                raise _LostError(f"no message for {BEAT_LIMIT_S:g} s")
            return receiving.result()
        finally:
            receiving.cancel()

    async def _failure(self) -> str:
        """Return the failure that the peer reports; a silent peer is a failure too."""
        while True:
            try:
                message = await self.receive_in_time()
            except UnavailableError as error:
                return f"{self.name} is lost: {error}"
            if "failed" in message:
                return _printable_text(message["failed"])
            if "done" in message:
                self.is_done = True
                self.on_done()

    async def close(self) -> None:
        for task in (self._beating, self._watching):
            if task is not None:
                task.cancel()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self.writer.drain(), 0.5)
        self.writer.close()


def _printable_text(value: object) -> str:
    """Return a text of another machine as a terminal may show it."""
    return printable(str(value)[:_MAX_TEXT_CHARS])


def _is_loopback(host: str) -> bool:
    ip = ipaddress.ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _answer(token: bytes, is_host: bool, peer_nonce: str, own_nonce: str) -> str:
    text = f"{'host' if is_host else 'member'}\n{peer_nonce}\n{own_nonce}"
    return hmac.new(token, text.encode(), "sha256").hexdigest()


class _Links:
    """The connections of a host to all other machines, or of another machine to the host."""

    def __init__(self, peers: list[_Peer], server: PendingServer | None = None) -> None:
        self._peers = peers
        self._server = server  # of a host
        self._all_done = asyncio.Event()
        for peer in peers:
            peer.on_done = self._count
        self._watches = [peer.watch() for peer in peers]

    def _count(self) -> None:
        if all(peer.is_done for peer in self._peers):
            self._all_done.set()

    async def lost(self) -> str:
        done, _ = await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        reason = next(iter(done)).result()
        await self.fail(reason)
        return reason

    async def finish(self) -> str:
        """Wait for the other machines.  The host finishes last and notifies them."""
        if self._server is None:
            self._peers[0].send(done=True)
        waiting = asyncio.ensure_future(self._all_done.wait())
        await asyncio.wait([waiting, *self._watches], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            return next(watch.result() for watch in self._watches if watch.done())
        if self._server is not None:
            for peer in self._peers:
                peer.send(done=True)
        await self._end()
        return ""

    async def fail(self, reason: str) -> None:
        for peer in self._peers:
            peer.send(failed=reason)
        await self._end()

    async def _end(self) -> None:
        for watch in self._watches:
            watch.cancel()
        for peer in self._peers:
            await peer.close()
        if self._server is not None:
            self._server.close()


async def host(
    listener: socket.socket, rendezvous: Rendezvous, address: str, tell: Callable[[str], None] = lambda _: None
) -> tuple[NodePlace, Link]:
    """Wait for the other machines; return the place of this one and the links.  ``address``: by which others reach it.

    ``tell`` gets a sentence about each machine that joined and was lost; its place is free again.  UnavailableError if
    the machines do not come in time.
    """
    changes: asyncio.Queue[_JoiningMember | None] = asyncio.Queue()  # a machine that joined; None: one may be lost

    async def greet(connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=_LINE)
        try:
            member = await _admit(_Peer(reader, writer), rendezvous)
        except BaseException:
            writer.transport.abort()
            raise
        if member is not None and len(members) == rendezvous.num_nodes:
            await _refuse_late(member, rendezvous)
        elif member is not None:
            changes.put_nowait(member)

    server = PendingServer(listener, greet)
    members = [_JoiningMember(None, rendezvous.node_rank, rendezvous.nproc, (address, rendezvous.master_port))]
    try:
        await _gather(members, changes, rendezvous, tell)
        while not changes.empty():  # machines that came at the same time as the last one
            await _refuse_late(changes.get_nowait(), rendezvous)
    except BaseException:
        server.close()
        for member in members:
            if member.peer is not None:
                await member.peer.close()
        raise
    return _places(members, server)


async def _gather(
    members: list[_JoiningMember],
    changes: asyncio.Queue[_JoiningMember | None],
    rendezvous: Rendezvous,
    tell: Callable[[str], None],
) -> None:
    """Add machines to ``members`` until all have come.  UnavailableError if they do not come in time."""
    deadline = time.monotonic() + rendezvous.timeout_s
    say_at, num_said = time.monotonic() + _SAY_S, 0
    while len(members) < rendezvous.num_nodes:
        if num_said != len(members) and time.monotonic() >= say_at:
            num_said = len(members)
            tell(f"{num_said} of {rendezvous.num_nodes} machines have joined; {_who_is_missing(members, rendezvous)}")
        try:
            until = deadline if num_said else min(say_at, deadline)
            member = await asyncio.wait_for(changes.get(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            if time.monotonic() < deadline:
                continue
            came = f"{len(members)} of {rendezvous.num_nodes} machines joined within {rendezvous.timeout_s:g} s"
            reason = f"--nnodes: {came}; {_who_is_missing(members, rendezvous)}"
            for member in members:
                if member.peer is not None:
                    member.peer.send(missing=reason)
            raise UnavailableError(reason) from None
        members[:] = await _without_lost(members, tell)
        if member is None or member.peer is None:
            continue
        if member.wanted is not None and any(member.wanted == other.wanted for other in members):
            await member.peer.refuse(f"another machine has --node-rank {member.wanted}")
        else:
            members.append(member)
            member.peer.watch().add_done_callback(lambda _: changes.put_nowait(None))


async def _refuse_late(member: _JoiningMember | None, rendezvous: Rendezvous) -> None:
    """Refuse a machine that comes when the group is whole."""
    if member is not None and member.peer is not None:
        reason = f"the group is whole: all {rendezvous.num_nodes} machines have joined. Is --nnodes right?"
        await member.peer.refuse(reason)


async def _without_lost(members: list[_JoiningMember], tell: Callable[[str], None]) -> list[_JoiningMember]:
    """Return the machines that are still there; close the connections of the others."""
    present = []
    for member in members:
        if member.peer is None or not member.peer.watch().done():
            present.append(member)
            continue
        tell(f"{member.peer.watch().result()}. Its place is free again.")
        await member.peer.close()
    return present


def _who_is_missing(members: list[_JoiningMember], rendezvous: Rendezvous) -> str:
    """Return which machines have not joined.  Their numbers are known if all that came have one."""
    wanted = {member.wanted for member in members}
    if None not in wanted:
        missing = [number for number in range(rendezvous.num_nodes) if number not in wanted]
        return f"missing: --node-rank {', '.join(map(str, missing[:20]))}{' ...' * (len(missing) > 20)}"
    came = ", ".join(member.address[0] for member in members[:20])
    return f"only these came: {came}{' ...' * (len(members) > 20)}"


async def _admit(peer: _Peer, rendezvous: Rendezvous) -> _JoiningMember | None:
    """Check what a machine brings; return it, or None after it was refused."""
    peername = peer.writer.get_extra_info("peername")
    if peername is None:  # it has closed the connection
        peer.writer.close()
        return None
    host, port, *_ = peername
    peer.name = f"the machine at {host}:{port}"
    if problem := peer.token_error(rendezvous.token):
        await peer.refuse(f"its connection {problem}")
        return None
    try:
        proved = await asyncio.wait_for(peer.prove(rendezvous.token, is_host=True), 10.0)
        message = await asyncio.wait_for(peer.receive(), 10.0) if proved else {}
    except (TimeoutError, UnavailableError):
        peer.writer.close()
        return None
    reason = _misfit(message, rendezvous) if proved else "the token is not that of the host"
    if reason:
        await peer.refuse(reason)
        return None
    return _JoiningMember(peer, message.get("node_rank"), message["nproc"], (host, message["master_port"]))


def _places(members: list[_JoiningMember], server: PendingServer) -> tuple[NodePlace, Link]:
    """Number the machines and tell each its place; return that of the host, and the links."""
    free = iter(sorted(set(range(len(members))) - {member.wanted for member in members}))
    ordered = sorted(
        (next(free) if member.wanted is None else member.wanted, index) for index, member in enumerate(members)
    )
    world = sum(member.nproc for member in members)
    master = members[ordered[0][1]].address
    own, peers, first = None, [], 0
    for number, index in ordered:
        place = NodePlace(number, len(members), first, world, *master)
        first += members[index].nproc
        peer = members[index].peer
        if peer is None:
            own = place
        else:
            peer.send(place=vars(place))
            peers.append(peer)
    if own is None:
        raise InternalError("the host is not among its members")
    return own, _Links(peers, server)


def _misfit(message: Mapping[str, Any], rendezvous: Rendezvous) -> str:
    """Return why a machine cannot join; empty if it can."""
    for name, own, theirs in (
        ("version", __version__, message.get("version")),
        ("--rdzv-id", rendezvous.run_id, message.get("run_id")),
        ("--nnodes", rendezvous.num_nodes, message.get("num_nodes")),
    ):
        if own != theirs:
            return f"{name}: this machine has {_printable_text(theirs)[:100]}, the host has {own}"
    nproc, wanted, port = message.get("nproc"), message.get("node_rank"), message.get("master_port")
    if type(port) is not int or not 1 <= port <= 65535:
        return "--master-port: expected an integer from 1 to 65535"
    if type(nproc) is not int or not 1 <= nproc <= 4096:
        return "--nproc: expected an integer from 1 to 4096"
    if wanted is not None and (type(wanted) is not int or not 0 <= wanted < rendezvous.num_nodes):
        return f"--node-rank: expected an integer from 0 to {rendezvous.num_nodes - 1}"
    return ""


async def join(
    address: tuple[str, int], rendezvous: Rendezvous, tell: Callable[[str], None] = lambda _: None
) -> tuple[NodePlace, Link]:
    """Join the host; return the place of this machine and the link.

    A host that is lost before the group is whole may start again: ``tell`` gets a sentence, and this machine joins the
    next host at the address.  UnavailableError if no host answers in time, InvalidArgumentError if it refuses.
    """
    deadline = time.monotonic() + rendezvous.timeout_s
    where = f"{address[0]}:{address[1]}"
    while True:
        peer = await _connect(address, rendezvous, deadline)
        has_joined = False
        try:
            await _introduce(peer, rendezvous, deadline)
            has_joined = True
            return await _await_place(peer, rendezvous, deadline), _Links([peer])
        except _LostError as error:
            await peer.close()
            if time.monotonic() > deadline:
                text = f"--rdzv: no host at {where} within {rendezvous.timeout_s:g} s ({error})"
                raise UnavailableError(text, param="rdzv") from None
            if has_joined:
                tell(f"{peer.name} is lost before all machines joined: {error}. Waiting for it to start again.")
            await asyncio.sleep(_RETRY_S)
        except BaseException:
            await peer.close()
            raise


async def is_host(address: tuple[str, int]) -> bool:
    """Return True if a launcher, rather than another program, answers at the address."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address, limit=_LINE), BEAT_LIMIT_S)
    except OSError:
        return False
    peer = _Peer(reader, writer)
    try:
        return "nonce" in await peer.receive_in_time()
    except UnavailableError:
        return False
    finally:
        await peer.close()


async def _connect(address: tuple[str, int], rendezvous: Rendezvous, deadline: float) -> _Peer:
    where = f"{address[0]}:{address[1]}"
    while True:
        try:  # with a limit, because packets to a host that drops them are sent again for minutes
            connecting = asyncio.open_connection(*address, limit=_LINE)
            reader, writer = await asyncio.wait_for(connecting, max(_RETRY_S, deadline - time.monotonic()))
            if writer.get_extra_info("sockname") != writer.get_extra_info("peername"):
                break
            writer.transport.abort()
            raise ConnectionRefusedError("no answer")  # TCP can connect a free port of this machine to itself
        except OSError as error:  # TimeoutError is one
            if time.monotonic() > deadline:
                text = f"--rdzv: no host at {where} within {rendezvous.timeout_s:g} s ({str(error) or 'no answer'})"
                raise UnavailableError(text, param="rdzv") from None
            await asyncio.sleep(_RETRY_S)
    peer = _Peer(reader, writer)
    peer.name = f"the host at {where}"
    return peer


async def _introduce(peer: _Peer, rendezvous: Rendezvous, deadline: float) -> None:
    """Prove the token to the host, and send it the settings of this machine."""
    try:
        is_proved = await asyncio.wait_for(
            peer.prove(rendezvous.token, is_host=False), max(1.0, deadline - time.monotonic())
        )
    except TimeoutError:
        raise UnavailableError(f"--rdzv: {peer.name} did not answer within {rendezvous.timeout_s:g} s") from None
    if not is_proved:
        raise InvalidArgumentError(f"--rdzv-token-file: {peer.name} has another token", param="rdzv_token_file")
    peer.send(
        version=__version__,
        run_id=rendezvous.run_id,
        num_nodes=rendezvous.num_nodes,
        nproc=rendezvous.nproc,
        node_rank=rendezvous.node_rank,
        master_port=rendezvous.master_port,
    )


async def _await_place(peer: _Peer, rendezvous: Rendezvous, deadline: float) -> NodePlace:
    """Return the place that the host gives this machine when all have come."""
    peer.start_beats()
    # A second more, so that the host, which knows who is missing, says it first.
    while time.monotonic() < deadline + 1.0:
        message = await peer.receive_in_time()
        if "missing" in message:
            raise UnavailableError(_printable_text(message["missing"]))
        if "refused" in message:
            raise InvalidArgumentError(f"{peer.name} refused this machine: {_printable_text(message['refused'])}")
        if "beat" not in message:
            return _place_of(message.get("place"), peer.name)
    raise UnavailableError(
        f"--nnodes: not all {rendezvous.num_nodes} machines joined within {rendezvous.timeout_s:g} s"
    )


def _place_of(values: object, name: str) -> NodePlace:
    """Return the place that a host sent, after a check of each value.  UnavailableError if one is not right."""
    try:
        place = NodePlace(**values) if isinstance(values, dict) else None
    except TypeError:
        place = None
    if place is None or not all(
        is_integer(number, 0, _MAX_PLACE)
        for number in (place.node_rank, place.num_nodes, place.first_rank, place.world, place.master_port)
    ):
        raise UnavailableError(f"{name} sent a malformed reply")
    address = place.master_addr
    if not isinstance(address, str) or not address.isprintable() or not 0 < len(address) < 256:
        raise UnavailableError(f"{name} sent a malformed reply")
    return place
