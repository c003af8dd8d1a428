"""``penstock serve MODEL [MODEL ...]``: models as a service, over OpenAI's routes."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.options import add_cache_option, add_limit_options, add_ops_option, add_verify_option, limits_of
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.serving.service_settings import ServiceSettings
    from penstock.serving.settings import GatewaySettings
    from penstock.serving.workers.remote_worker_server import RemoteWorkerSettings
    from penstock.serving.workers.worker_config import ModelOptions

MAX_THREADS: Final = 1024

__all__ = ["add_parser", "add_run_options", "named_model", "options_of", "run", "settings_of"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="answer requests over HTTP, as OpenAI's API has it, and gRPC",
        description="Serve models over OpenAI's routes, with a web page at / and metrics. The lines that it begins "
        "with say its address and a request to try. Ctrl-C lets open requests end, a second one does not. SIGHUP "
        "reloads the files of API keys and of TLS. HTTP and gRPC have up to 4,096 connections each, fewer where the "
        "limit on open files (ulimit -n) is low; the service raises its soft limit to the hard one, at most 65,536.",
    )
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="a .psm bundle or a checkpoint folder, or NAME=PATH (else the name is the file's); or a folder of "
        "servables (NAME/servable.py)",
    )
    _add_door_options(parser)
    add_run_options(parser)
    _add_folder_options(parser)
    _add_process_options(parser)
    _add_worker_door_options(parser)
    add_ops_option(parser)
    parser.set_defaults(run=run)


def _add_worker_door_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workers of other machines (penstock worker), over TLS with --tls-certificate")
    group.add_argument("--worker-port", type=int, metavar="N", help="let them join there; 0 takes a free one")
    group.add_argument("--worker-host", metavar="HOST", help="the address to listen on (127.0.0.1)")
    group.add_argument("--worker-token-file", type=Path, metavar="FILE", help="the secret that they share, a line")


def _add_door_options(parser: argparse.ArgumentParser) -> None:
    door = parser.add_argument_group("where it listens, and to whom it answers")
    door.add_argument("--host", default="127.0.0.1", help="127.0.0.1 (default): this machine alone")
    door.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    door.add_argument(
        "--grpc-port",
        type=int,
        metavar="N",
        help="speak gRPC there, the Open Inference Protocol v2; 0 takes a free one; off unless given",
    )
    door.add_argument("--api-key-file", type=Path, metavar="FILE", help="API keys, one a line")
    door.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="keys of those who may load and unload servables, one a line",
    )
    door.add_argument("--insecure", action="store_true", help="let others in without a key")
    door.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="further Host names; * for any"
    )
    door.add_argument("--allowed-origin", action="append", default=[], metavar="URL", help="pages that may call it")
    door.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM; with --tls-key")
    door.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM")
    door.add_argument(
        "--max-body-bytes", type=int, default=8 << 20, metavar="N", help="of a request; larger ones get 413 (8 MiB)"
    )
    door.add_argument("--max-open", type=int, default=1024, metavar="N", help="requests at once; more get 429 (1024)")
    door.add_argument(
        "--max-seconds", type=float, default=3600.0, metavar="S", help="of a whole answer; longer ones get 504 (3600)"
    )
    door.add_argument(
        "--admin-socket",
        type=Path,
        metavar="PATH",
        help="a unix socket for you alone, over which models are loaded, updated and unloaded; off unless given",
    )
    door.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="send a span of each request there, OpenTelemetry over HTTP (needs penstock[otel])",
    )
    door.add_argument(
        "--log", choices=("info", "warning"), default="info", help="info (default): one line of JSON per request"
    )


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="per model; they share its load (1)")
    group.add_argument(
        "--hang-seconds", type=float, default=30.0, metavar="S", help="an engine that stands so long is replaced (30)"
    )
    group.add_argument(
        "--drain-seconds", type=float, default=30.0, metavar="S", help="open requests get so long at the end (30)"
    )


def _add_folder_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints' folders")
    group.add_argument("--scheme", help="the checkpoint's own type unless given")
    group.add_argument("--no-cache", action="store_true", help="do not keep the bundle that a folder makes")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """How a worker runs its model."""
    group = parser.add_argument_group("how models run")
    group.add_argument("--threads", type=int, default=0, metavar="N", help="of each worker; 0: the cores shared out")
    group.add_argument("--max-requests", type=int, default=32, metavar="N", help="requests in a step (32)")
    group.add_argument("--max-waiting", type=int, default=256, metavar="N", help="requests that may wait (256)")
    group.add_argument(
        "--weights", choices=("auto", "mmap", "huge"), default="auto",
        help="mmap: the file's own pages; huge: a copy in huge pages; auto (default): huge where memory is to spare",
    )  # fmt: skip
    add_verify_option(group)
    add_limit_options(parser)
    add_cache_option(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    import asyncio
    import os
    import signal

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the service takes it to reload its keys
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else it writes lines of its own between those of JSON
    from penstock.logs import JsonLines
    from penstock.serving.service import run_service

    settings = settings_of(args)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=args.log.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return asyncio.run(run_service(settings))


def settings_of(args: argparse.Namespace) -> ServiceSettings:
    """What the command line asks for."""
    from penstock.processes.supervision import SupervisionPolicy
    from penstock.serving.service_settings import ServiceSettings

    if not 1 <= args.workers <= 256:
        raise InvalidArgumentError(f"--workers must be a whole number from 1 to 256, not {args.workers}")
    for name in ("hang_seconds", "drain_seconds"):
        if not 0 < getattr(args, name) <= 86400:
            raise InvalidArgumentError(f"--{name.replace('_', '-')} must be above 0 and up to 86400")
    models, servables = _parted(args.models)
    return ServiceSettings(
        models=models,
        servables=servables,
        num_workers=args.workers,
        options=options_of(args, args.workers),
        gateway=_door(args),
        supervision=SupervisionPolicy(hang_s=args.hang_seconds, drain_s=args.drain_seconds),
        worker_listener=_worker_door(args),
        admin_socket=args.admin_socket,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )


def _worker_door(args: argparse.Namespace) -> RemoteWorkerSettings | None:
    from penstock.serving.workers.remote_worker_client import read_token
    from penstock.serving.workers.remote_worker_server import RemoteWorkerSettings

    if args.worker_port is None:
        for name in ("worker_token_file", "worker_host"):
            if getattr(args, name) is not None:
                raise InvalidArgumentError(f"--{name.replace('_', '-')} goes with --worker-port")
        return None
    if not 0 <= args.worker_port <= 65535:
        raise InvalidArgumentError(f"--worker-port must be from 0 to 65535, not {args.worker_port}")
    if args.worker_token_file is None or args.tls_certificate is None or args.tls_key is None:
        raise InvalidArgumentError("--worker-port goes with --worker-token-file, --tls-certificate and --tls-key")
    host = "127.0.0.1" if args.worker_host is None else args.worker_host
    return RemoteWorkerSettings(
        host, args.worker_port, args.tls_certificate, args.tls_key, read_token(args.worker_token_file)
    )


def _parted(given: list[str]) -> tuple[tuple[tuple[str, str], ...], tuple[Path, ...]]:
    """Models with their names, and folders of servables."""
    from penstock.servables.lifecycle.folder_scan import holds_servables

    models, servables = [], []
    for one in given:
        name, path = named_model(one)
        _check_kind(one, Path(path))
        if not holds_servables(Path(path)):
            models.append((name, path))
        elif name:
            raise InvalidArgumentError(f"{one}: servables have the names of their folders, so NAME= is for models")
        else:
            servables.append(Path(path))
    return tuple(models), tuple(servables)


def _check_kind(given: str, path: Path) -> None:
    """InvalidArgumentError for a folder that is of neither kind; of GGUF's files there is more to say, elsewhere."""
    from penstock.servables.lifecycle.folder_scan import holds_servables

    if not path.is_dir() or holds_servables(path) or (path / "config.json").exists() or any(path.glob("*.gguf")):
        return
    raise InvalidArgumentError(
        f"{given}: expected a checkpoint's folder (config.json) or a folder of servables (NAME/servable.py), found "
        "neither file"
    )


def named_model(text: str) -> tuple[str, str]:
    """NAME=PATH, or a path alone; what exists as it stands, or begins as a path does, is a path."""
    name, separator, path = text.partition("=")
    if separator and name and path and name[0] not in "./~" and not Path(text).exists():
        return name, str(Path(path).absolute())
    return "", str(Path(text).absolute())


def options_of(args: argparse.Namespace, num_workers: int) -> ModelOptions:
    """How each of so many workers runs its model."""
    from penstock.engine.options import EngineOptions
    from penstock.runtime.machine import affinity
    from penstock.serving.workers.worker_config import ModelOptions

    if not 0 <= args.threads <= MAX_THREADS:
        raise InvalidArgumentError(f"--threads must be from 0 to {MAX_THREADS}, not {args.threads}")
    weights = args.weights
    if weights == "auto" and num_workers > 1:
        weights = "mmap"  # which they share
    args.weights = "mmap"
    limits = limits_of(args, max_requests=args.max_requests, max_tokens=max(512, args.max_requests))
    threads = args.threads
    if threads == 0 and num_workers > 1:
        threads = max(1, len(affinity()) // num_workers)
    engine = EngineOptions(prefix_cache=not args.no_prefix_cache, max_waiting=args.max_waiting)
    return ModelOptions(
        scheme=args.scheme,
        threads=threads,
        weights=weights,
        limits=limits,
        engine=engine,
        use_cache=not args.no_cache,
        verify=args.verify,
    )


def _door(args: argparse.Namespace) -> GatewaySettings:
    from penstock.serving.settings import GatewayLimits, GatewaySettings

    for name in ("max_body_bytes", "max_open", "max_seconds"):
        if not 0 < getattr(args, name) <= 1 << 40:
            raise InvalidArgumentError(f"--{name.replace('_', '-')} must be above 0, not {getattr(args, name)}")
    limits = GatewayLimits(body_bytes=args.max_body_bytes, num_open=args.max_open, request_s=args.max_seconds)
    return GatewaySettings(
        host=args.host,
        port=args.port,
        grpc_port=args.grpc_port,
        keys_file=args.api_key_file,
        admin_keys_file=args.admin_key_file,
        insecure=args.insecure,
        hosts=tuple(args.allowed_host),
        origins=tuple(args.allowed_origin),
        tls_certificate=args.tls_certificate,
        tls_key=args.tls_key,
        limits=limits,
    )
