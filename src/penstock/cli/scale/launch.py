"""``penstock launch -- COMMAND``: run a command as several ranks, on one machine or several."""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from pathlib import Path
from typing import Final

from penstock.cli.options import add_parser_of, host_and_port, refuse_without, spellings
from penstock.config import check_integer, check_number
from penstock.errors import FileAccessError, InvalidArgumentError, UnsupportedError

__all__ = ["add_parser", "run"]

_MSRUN: Final[dict[str, tuple[str, str, str]]] = {
    "bind_core": (
        "False",
        "ranks run on the launcher's cores",
        "Start the launcher under taskset to choose them.",
    ),
    "sim_level": ("-1", "ranks are not simulated", "`penstock plan MODEL --tp N` says what each rank would have."),
    "sim_rank_id": ("-1", "ranks are not simulated", "`penstock plan MODEL --tp N` says what each rank would have."),
    "rank_table_file": ("", "ranks find each other without a table", "Pass --master-addr for several machines."),
    "worker_log_name": ("", "the files are named worker_RANK.log", "Pass --log-dir to choose their folder."),
    "tail_worker_log": ("-1", "all ranks are printed", "Select lines by their rank, as with grep '^.0.' for rank 0."),
}
"""Options of msrun that have one value here: the value, why, and what to do for another one."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "launch",
        "Run a command several times, once per rank, with the environment variables of torchrun (RANK, WORLD_SIZE, "
        "LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...). Each line of output begins with its rank. If a rank fails, the "
        "others are ended, on all machines, and the exit status is that of the rank.",
        "penstock launch --nproc 2 -- python predict.py\n"
        "penstock launch --nproc 2 --nnodes 2 --rdzv 10.0.0.1:29400 --rdzv-token-file token -- python predict.py\n"
        "penstock launch --worker_num=2 --local_worker_num=2 --join=True -- python predict.py",
    )
    parser.add_argument(
        "--nproc",
        *spellings("--local-worker-num"),
        type=int,
        metavar="N",
        help="ranks on this machine (default: --worker-num, else 1)",
    )
    parser.add_argument(
        *spellings("--worker-num"),
        type=int,
        metavar="N",
        help="ranks on all machines, as for msrun (default: --nproc times --nnodes)",
    )
    parser.add_argument("--nnodes", type=int, metavar="N", help="machines (default: 1)")
    _add_machines(parser)
    parser.add_argument(
        *spellings("--log-dir"),
        metavar="DIR",
        help="also write the output of each rank to DIR/worker_RANK.log (default: none)",
    )
    parser.add_argument(
        "--join",
        type=str.lower,
        choices=("true", "false"),
        metavar="True",
        help="as for msrun; only True, because the launcher waits for the ranks (default: True)",
    )
    parser.add_argument(
        "--timeout",
        *spellings("--cluster-time-out"),
        type=float,
        metavar="S",
        help="seconds to wait for the other machines (default: 300)",
    )
    _add_msrun(parser)
    parser.add_argument(
        "--no-prefix",
        action="store_true",
        help="print the output without the rank (default: each line begins with it)",
    )
    parser.add_argument("command_line", nargs="+", metavar="COMMAND", help="the command and its arguments, after --")
    parser.option_hint = "Put -- before the command if the option is the command's"
    parser.is_ended_by_script = True
    parser.set_defaults(run=run)


def _add_msrun(parser: argparse.ArgumentParser) -> None:
    """Declare the options of msrun that have one value here."""
    for name, (value, why, _) in _MSRUN.items():
        parser.add_argument(
            *spellings("--" + name.replace("_", "-")),
            metavar=value or "EMPTY",
            help=f"as for msrun; only {value or 'empty'}, because {why} (default: {value or 'empty'})",
        )


def _add_machines(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say where the machines meet."""
    parser.add_argument(
        "--rdzv",
        metavar="HOST:PORT",
        help="address of one of the machines, with a free port; all launchers connect to it (default: none, for one "
        "machine)",
    )
    parser.add_argument(
        *spellings("--master-addr"),
        metavar="HOST",
        help="as for msrun: with --master-port, the address of --rdzv (default: none)",
    )
    parser.add_argument(
        "--rdzv-id", default="", metavar="TEXT", help="a name of the run; all machines need the same (default: none)"
    )
    parser.add_argument(
        "--rdzv-token-file",
        metavar="FILE",
        help="a file with a secret that the launchers of all machines know (default: none)",
    )
    parser.add_argument(
        "--trusted-network",
        action="store_true",
        help="allow a rendezvous without a token at an address that other machines reach (default: refuse it)",
    )
    parser.add_argument(
        *spellings("--node-rank"),
        type=int,
        metavar="K",
        help="the number of this machine, from 0 (default: the host chooses)",
    )
    parser.add_argument(
        *spellings("--master-port"),
        type=int,
        default=0,
        metavar="PORT",
        help="MASTER_PORT of the ranks; 0 (default): a free port of the host. With --master-addr and several machines "
        "it is the port where the launchers meet (default: 8118)",
    )


def run(args: argparse.Namespace) -> int:
    """Check the options and launch."""
    from penstock.launch.launcher import LaunchSettings, launch

    _apply_msrun(args)
    if args.nnodes is None:
        refuse_without("--nnodes", args, "rdzv", "rdzv_token_file", "trusted_network", "node_rank", "timeout")
    nnodes = 1 if args.nnodes is None else check_integer("nnodes", args.nnodes, 1, 1024)
    if args.node_rank is not None:
        check_integer("node_rank", args.node_rank, 0, nnodes - 1)
    if nnodes > 1 and args.rdzv is None:
        message = f"--rdzv (or --master-addr): expected the address of one of the {nnodes} machines, got none"
        raise InvalidArgumentError(message, param="rdzv")
    rdzv = None if args.rdzv is None else host_and_port("rdzv", args.rdzv)
    token = b"" if args.rdzv_token_file is None else _token(Path(args.rdzv_token_file))
    if rdzv is not None and not token and not args.trusted_network and not _is_loopback(rdzv[0]):
        raise InvalidArgumentError(
            f"--rdzv: {rdzv[0]} may be reached by others. Pass --rdzv-token-file, or --trusted-network.", param="rdzv"
        )
    return launch(
        LaunchSettings(
            command=_command(args.command_line),
            nproc=check_integer("nproc", 1 if args.nproc is None else args.nproc, 1, 4096),
            nnodes=nnodes,
            rdzv=rdzv if nnodes > 1 else None,
            run_id=args.rdzv_id,
            node_rank=args.node_rank,
            token=token,
            master_port=check_integer("master_port", args.master_port, 0, 65535),
            timeout_s=300.0 if args.timeout is None else check_number("timeout", args.timeout, 86_400),
            is_prefixed=not args.no_prefix,
            log_dir=None if args.log_dir is None else Path(args.log_dir),
        )
    )


def _apply_msrun(args: argparse.Namespace) -> None:
    """Replace the options of msrun by those that they stand for, and refuse values that have no meaning here."""
    for name, (value, why, advice) in _MSRUN.items():
        actual = getattr(args, name)
        if actual is not None and actual.lower() != value.lower():
            expected = value or "no value"
            raise UnsupportedError(f"--{name}: expected {expected}, because {why}; got {actual}. {advice}", param=name)
    if args.join == "false":
        raise UnsupportedError(
            "--join: expected True, got False. The launcher waits for the ranks; start it with & to go on.",
            param="join",
        )
    if args.worker_num is not None:
        total = check_integer("worker_num", args.worker_num, 1, 4096 * 1024)
        nproc = total // (args.nnodes or 1) if args.nproc is None else check_integer("nproc", args.nproc, 1, 4096)
        nnodes = args.nnodes or max(1, total // max(1, nproc))
        if nproc * nnodes != total:
            raise InvalidArgumentError(
                f"--worker-num: expected {nproc} ranks of each machine times the machines, got {total}",
                param="worker_num",
            )
        args.nproc, args.nnodes = nproc, nnodes if nnodes > 1 else args.nnodes
    if args.master_addr is None:
        return
    if args.rdzv is not None:
        raise InvalidArgumentError("--master-addr: expected none beside --rdzv", param="master_addr")
    if (args.nnodes or 1) > 1:
        args.rdzv, args.master_port = f"{args.master_addr}:{args.master_port or 8118}", 0
    elif not _is_loopback(args.master_addr):
        raise InvalidArgumentError(
            f"--master-addr: expected 127.0.0.1 for ranks of one machine, got {args.master_addr}", param="master_addr"
        )


def _command(words: list[str]) -> tuple[str, ...]:
    """Return the command; a script of Python that is not executable runs in this interpreter."""
    is_script = words[0].endswith(".py") and not os.access(words[0], os.X_OK)
    return (sys.executable, *words) if is_script else tuple(words)


def _token(path: Path) -> bytes:
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise FileAccessError(f"--rdzv-token-file: {path}: {error.strerror}", param="rdzv_token_file") from None
    if len(token) < 16:
        message = f"--rdzv-token-file: {path}: expected at least 16 bytes, got {len(token)}"
        raise InvalidArgumentError(message, param="rdzv_token_file")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
