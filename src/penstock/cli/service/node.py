"""``penstock node``: make this machine a node of a cluster that runs the workers of services."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.options import add_parser_of
from penstock.cli.service.process_state import kept_signals
from penstock.config import check_integer
from penstock.errors import FileAccessError, InvalidArgumentError, UnavailableError
from penstock.processes.reconnect import RetryLines

if TYPE_CHECKING:
    from penstock.cluster.placement.ray_node import NodeSettings

__all__ = ["add_parser", "run"]

_PROCESS: Final = (sys.executable, "-P", "-m", "penstock.cluster.placement.ray_node")
_PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0)
_TEMPORARY: Final = "/tmp"  # noqa: S108 - mkdtemp makes a new folder in it for this user only
"""Not TMPDIR: the kernel limits the length of a socket's path, and Ray's names are long."""
_LASTING_S: Final = 60.0
"""After a node that lasted so long, the pauses begin again with the first one."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "node",
        "Make this machine a node of a cluster, which runs the workers of `penstock serve --cluster`. The first node "
        "is the head. Ray places the workers, with token authentication on, and without its web pages and its client "
        "proxy. Ray ends a node a minute after its head was lost; the node then joins again when there is a head. "
        "Ctrl-C ends the node and its workers. Needs penstock[cluster].",
        "penstock node --address 10.0.0.5 --token-file token.txt\n"
        "penstock node --join 10.0.0.5:6379 --token-file token.txt",
    )
    parser.add_argument(
        "--join", metavar="HOST:PORT", help="join the cluster of this head (default: be the head of a new cluster)"
    )
    parser.add_argument(
        "--address",
        metavar="IP",
        help="address of this machine in its private network (default: the one that reaches the head; required there)",
    )
    parser.add_argument("--port", type=int, metavar="N", help="port of the head, without --join (default: 6379)")
    parser.add_argument(
        "--first-port",
        type=int,
        default=20_000,
        metavar="N",
        help="first of the 200 ports that the node uses (default: 20000)",
    )
    parser.add_argument(
        "--token-file", type=Path, required=True, metavar="FILE", help="file with the cluster's token (required)"
    )
    parser.add_argument("--cpus", type=int, default=0, metavar="N", help="cores for workers; 0 (default): all")
    parser.add_argument(
        "--memory", type=int, default=0, metavar="BYTES", help="memory for workers in bytes; 0 (default): what is free"
    )
    parser.add_argument(
        "--trusted-network",
        action="store_true",
        help="accept an address that is not private (default: refuse it)",
    )
    parser.add_argument(
        "--temp-folder",
        default="",
        metavar="PATH",
        help="folder for sockets and logs, which only you can access (default: a new one in /tmp, removed at the end)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="with --join: exit with status 1 when Ray has ended the node or the head does not answer (default: try "
        "again)",
    )
    parser.set_defaults(run=run)


@kept_signals(*_SIGNALS, signal.SIGINT)
def run(args: argparse.Namespace) -> int:
    """Run the node until a signal ends it; UnavailableError if it does not start, and if a head has ended."""
    from penstock.cluster.placement.ray_setup import check_ray
    from penstock.serving.workers.machines.remote_worker_client import read_token

    read_token(args.token_file)
    _check_options(args)
    if args.join is None:
        _check_ports(_settings(args))
    check_ray()
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    is_temporary = not args.temp_folder
    if is_temporary:
        args.temp_folder = tempfile.mkdtemp(prefix="penstock-ray-", dir=_TEMPORARY)
    try:
        reason = _run_node(args.token_file, _settings(args)) if args.join is None else _stay_joined(args)
    except KeyboardInterrupt:
        if is_temporary:
            shutil.rmtree(args.temp_folder, ignore_errors=True)
        return 0
    finally:
        if is_temporary:
            with suppress(OSError):  # after a failure the logs stay
                os.rmdir(args.temp_folder)
    raise UnavailableError(reason)


def _stay_joined(args: argparse.Namespace) -> str:
    """Join while the head does not answer, and again when Ray has ended the node; with --once return why it ended.

    Raises UnavailableError if the node cannot be started at first, for another reason than the head.
    """
    lines, settings = RetryLines("node", args.join, _PAUSES_S), None
    while True:
        start, reason = time.monotonic(), _problem_of_head(args.join)
        if not reason and settings is None:
            settings = _settings(args)
            _check_ports(settings)
            reason = _run_node(args.token_file, settings)
        elif not reason and settings is not None:
            try:
                reason = _run_node(args.token_file, settings)
            except UnavailableError as error:
                reason = str(error)
        if args.once:
            return f"{args.join}: {reason}"
        if time.monotonic() - start > _LASTING_S:
            lines.reset()
        time.sleep(lines.next_pause_s(reason))


def _run_node(token_file: Path, settings: NodeSettings) -> str:
    """Run the node until Ray ends it and return why; UnavailableError if it does not start."""
    from penstock.cluster.placement.ray_setup import environment

    process = subprocess.Popen(
        _PROCESS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(token_file),
        start_new_session=True,  # Ctrl-C is for this process, which then ends the node
    )
    if process.stdin is None or process.stdout is None:
        raise UnavailableError("the node has no standard streams")
    try:
        print(settings.to_json(), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline() or '{"error": "its process ended"}')
        if "error" in answer:
            raise UnavailableError(f"failed to start the node: {answer['error']}")
        _tell_started(settings)
        end = json.loads(process.stdout.readline() or "{}")
        cause = f"Ray's process {end['lost']} ended, and with it the node" if end else "the node ended"
        return f"{cause}; see the logs in {settings.folder}"
    except KeyboardInterrupt:
        for number in (*_SIGNALS, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _tell_started(settings: NodeSettings) -> None:
    head = settings.join or f"{_bracketed(settings.address)}:{settings.port}"
    print(f"penstock node: {settings.address} is a node of the cluster {head}.", flush=True)
    if not settings.join:
        print(f"Join from other machines: penstock node --join {head} --token-file FILE", flush=True)
        serve = f"penstock serve MODEL --cluster {head} --cluster-token-file FILE --threads N"
        print(f"Serve a model: {serve}", flush=True)


def _problem_of_head(address: str) -> str:
    """Return why the head does not answer, "" if it does: Ray would wait for it for long."""
    from penstock.cluster.placement.ray_setup import local_address, split_address

    host, port = split_address(address, "join")
    try:
        local_address(host.strip("[]"), port)
    except UnavailableError as error:
        return str(error).removeprefix(f"{address}: ")
    return ""


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _check_options(args: argparse.Namespace) -> None:
    from penstock.cluster.placement.ray_node import NUM_PORTS
    from penstock.cluster.placement.ray_setup import split_address

    if args.join is None and args.once:
        raise InvalidArgumentError("--once requires --join", param="once")
    if args.join is not None:
        split_address(args.join, "join")
        if args.port is not None:
            text = "--port: expected none with --join, which names the port of the head"
            raise InvalidArgumentError(text, param="port")
    check_integer("port", 6379 if args.port is None else args.port, 1, 65_535)
    check_integer("first_port", args.first_port, 1024, 65_536 - NUM_PORTS)
    check_integer("cpus", args.cpus, 0, 65_536)
    check_integer("memory", args.memory, 0, 2**60)
    if args.address is None and args.join is None:
        raise InvalidArgumentError(
            "--address: required for the head, the address by which other machines reach it", param="address"
        )
    if args.address is not None:
        _check_address(args)
    if args.temp_folder:
        _check_folder(Path(args.temp_folder).absolute())


def _check_folder(path: Path) -> None:
    """Make the folder if it is not there; refuse one that others can access, because Ray gives them access to its own.

    Raises InvalidArgumentError and FileAccessError.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise FileAccessError(f"--temp-folder: {path}: {error.strerror}", param="temp_folder") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InvalidArgumentError(
            f"--temp-folder: {path}: expected a folder of yours that others cannot access. Run `chmod 700 PATH`, or "
            "name another one",
            param="temp_folder",
        )


def _settings(args: argparse.Namespace) -> NodeSettings:
    from penstock.cluster.placement.ray_node import NodeSettings
    from penstock.cluster.placement.ray_setup import local_address, split_address

    if args.address is None:  # of a node that joins
        host, port = split_address(args.join, "join")
        args.address = local_address(host.strip("[]"), port)
        _check_address(args)
    port_of_head, join = 6379 if args.port is None else args.port, args.join or ""
    return NodeSettings(args.address, port_of_head, join, args.first_port, args.cpus, args.memory, args.temp_folder)


def _check_address(args: argparse.Namespace) -> None:
    """Refuse an address that is not one of this machine in a private network; InvalidArgumentError."""
    from penstock.cluster.placement.ray_setup import LOOPBACK

    address = args.address
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise InvalidArgumentError(
            f"--address: expected an IP address, got {address!r:.100}", param="address"
        ) from None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    if mapped is not None:  # the checks below would take ::ffff:127.0.0.9 for an address of another machine
        raise InvalidArgumentError(f"--address: expected {mapped}, got {address}", param="address")
    if ip.is_unspecified:
        raise InvalidArgumentError(
            f"--address: expected the address of this machine in its network, got {address}. To try it on one machine, "
            "use 127.0.0.1",
            param="address",
        )
    if ip.is_loopback and address != LOOPBACK:
        raise InvalidArgumentError(
            f"--address: expected {LOOPBACK} or an address that other machines reach, got {address}, for which Ray "
            "would listen on all addresses of this machine",
            param="address",
        )
    if not ip.is_private and not args.trusted_network:
        raise InvalidArgumentError(
            f"--address: {address} is not private; anyone with the token could run code on the node. Pass "
            "--trusted-network if a firewall protects it",
            param="address",
        )


def _check_ports(settings: NodeSettings) -> None:
    """Refuse an address of another machine and ports that are in use; Ray's own message is long."""
    from penstock.cluster.placement.ray_node import NUM_OWN_PORTS

    own = [("first-port", settings.first_port + number) for number in range(NUM_OWN_PORTS)]
    for option, port in own if settings.join else [("port", settings.port), *own]:
        with socket.socket(socket.AF_INET6 if ":" in settings.address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.address, port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    text = f"--address: expected an address of this machine, got {settings.address}"
                    raise InvalidArgumentError(text, param="address") from None
                text = f"--{option}: {_bracketed(settings.address)}:{port}: {error.strerror}"
                raise UnavailableError(text) from None


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
