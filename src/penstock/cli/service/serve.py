"""``penstock serve MODEL [MODEL ...]``: serve models over HTTP and gRPC."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.listener import add_listener_options, read_listener
from penstock.cli.options import LIMIT_OPTIONS, add_options, add_parser_of, limits_of
from penstock.cli.service.cluster_options import add_cluster_options, cluster_placement
from penstock.cli.stage_server import SERVICE_JOIN_S, add_stage_options, stage_server
from penstock.config import check_integer, check_number
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.file_kinds import is_gguf
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.cluster.autoscale import ScalePolicy
    from penstock.serving.service_settings import ServiceSettings
    from penstock.serving.settings import GatewaySettings
    from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
    from penstock.serving.workers.worker_config import WorkerModelOptions
    from penstock.serving.workers.worker_roles import WorkerRoles

MAX_THREADS: Final = 1024

__all__ = ["add_parser", "add_run_options", "named_model", "options_of", "run", "settings_of"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "serve",
        "Serve models over OpenAI's API, with a web page at / and metrics. The first lines of output give the address "
        "and a request to try. Ctrl-C waits for open requests, and a second Ctrl-C does not. SIGHUP reloads the files "
        "of API keys and TLS. HTTP and gRPC accept up to 4,096 connections each, fewer if the limit on open files "
        "(ulimit -n) is low. The service raises its soft limit to the hard limit, at most 65,536.",
        "penstock serve demo/demo.psm\n"
        "penstock serve code=demo/demo.psm --port 0 --grpc-port 0 --workers 2\n"
        "penstock serve qwen2.5-0.5b --scheme w8a8 --yes\n"
        "penstock serve my-checkpoint --network my_network.py:Net\n"
        "penstock serve model.psm --host 0.0.0.0 --api-key-file keys.txt\n"
        "penstock serve model.psm --cluster 10.0.0.5:6379 --cluster-token-file token.txt --workers 4 --threads 8",
    )
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="a .psm bundle, a checkpoint folder, a GGUF file, ORG/NAME of a hub, or a folder of servables "
        "(NAME/servable.py); NAME=MODEL sets the name of a model (default: the name of its file or repository)",
    )
    parser.add_operand_flag(parser, "-m", "--model", metavar="MODEL", is_first=True)
    _add_gateway_options(parser)
    add_run_options(parser)
    _add_folder_options(parser)
    _add_process_options(parser)
    _add_remote_worker_options(parser)
    add_stage_options(parser)
    add_cluster_options(parser)
    add_options(parser, "--ops")
    parser.set_defaults(run=run)


def _add_remote_worker_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workers on other machines (penstock worker), over TLS with --tls-certificate")
    add_listener_options(group, "worker", "accept workers")


def _add_gateway_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("addresses and access")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 127.0.0.1 (default): this machine only"
    )
    group.add_argument("--port", type=int, default=8000, help="port for HTTP; 0: a free port (default: 8000)")
    group.add_argument(
        "--grpc-port",
        type=int,
        metavar="N",
        help="port for gRPC (Open Inference Protocol v2); 0: a free port (default: no gRPC)",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with API keys, one per line (default: none)"
    )
    group.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="file with the keys that may load and unload servables, one per line (default: none)",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="accept requests from other machines without a key (default: refuse to start)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="accept this name in the Host header, too; *: any name; may be repeated (default: none)",
    )
    group.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="URL",
        help="let web pages of this origin call the service; may be repeated (default: none)",
    )
    group.add_argument(
        "--tls-certificate",
        type=Path,
        metavar="FILE",
        help="PEM file with the certificate; requires --tls-key (default: no TLS)",
    )
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM file with the private key (default: none)")
    _add_limits(group)
    _add_answer_options(group)
    _add_admin_options(group)


def _add_answer_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tool-format",
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="how models write tool calls: hermes, llama3_json, pythonic, lfm2, mistral, mistral_v11, qwen3_coder, "
        "deepseek_v3, deepseek_v31, harmony, glm4, or none; auto (default): as the chat template shows",
    )
    group.add_argument(
        "--reasoning-format",
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="how models write thoughts: think, mistral, cohere, harmony, or none (leave them in the content); auto "
        "(default): as the chat template shows",
    )


def _add_admin_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--admin-socket",
        type=Path,
        metavar="PATH",
        help="path of a unix socket, for your user only, that loads, updates and unloads models (default: none)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="send a span of each request there by OpenTelemetry over HTTP; needs penstock[otel] (default: none)",
    )
    group.add_argument(
        "--log",
        choices=("info", "warning"),
        default="info",
        help="log level; info (default): one line per request",
    )
    group.add_argument(
        "--log-format",
        choices=("auto", "text", "json"),
        default="auto",
        help="text: lines for people; json: an object per line; auto (default): text on a terminal, otherwise json",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-body-bytes",
        type=int,
        default=8 << 20,
        metavar="N",
        help="largest request body in bytes; a larger one gets 413 (default: 8 MiB)",
    )
    group.add_argument(
        "--max-open", type=int, default=1024, metavar="N", help="open requests; further ones get 429 (default: 1024)"
    )
    group.add_argument(
        "--max-seconds",
        type=float,
        default=3600.0,
        metavar="S",
        help="longest time of a request in seconds; a longer one gets 504 (default: 3600)",
    )


def _add_role_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefill-workers",
        type=int,
        metavar="N",
        help="worker processes per model that compute prompts only and copy their keys and values to the "
        "--decode-workers, which go on with the answers (default: each worker does both)",
    )
    group.add_argument(
        "--decode-workers",
        type=int,
        metavar="N",
        help="worker processes per model that go on with answers (default: 1 if there are --prefill-workers)",
    )


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="worker processes per model, which share its load; with --replicas, how many start at first (default: 1, "
        "or MIN of --replicas)",
    )
    _add_role_options(group)
    group.add_argument(
        "--replicas",
        metavar="MIN..MAX",
        help="change the number of workers with the load, within these limits; with 0..MAX the last one ends while "
        "there is nothing to do, and the next request starts one (default: --workers)",
    )
    group.add_argument(
        "--scale-queue-seconds",
        type=float,
        metavar="S",
        help="with --replicas: add workers when more than S seconds of prefill wait per worker (default: 2)",
    )
    group.add_argument(
        "--scale-down-seconds",
        type=float,
        metavar="S",
        help="with --replicas: end a worker when the others would have had room for S seconds (default: 120)",
    )
    group.add_argument(
        "--route-policy",
        choices=("prefix", "least-loaded", "round-robin"),
        default="prefix",
        help="which worker gets a request; prefix (default): where prefill, queue and answer cost the least time; "
        "least-loaded: the one with the fewest open requests; round-robin: each in turn",
    )
    group.add_argument(
        "--hang-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="restart a worker whose engine makes no progress for S seconds (default: 30)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="wait up to S seconds for open requests when stopping (default: 30)",
    )


def _add_folder_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoint folders and downloads")
    add_options(group, "--scheme")
    group.add_argument(
        "--network",
        action="append",
        metavar="[NAME=]FILE.py:CLASS",
        help="your own network script for the checkpoint folders, or for the model NAME; may be repeated (default: the "
        "built-in network of its model_type)",
    )
    add_options(group, "--no-cache", "--yes")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a worker runs its model."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "-t",
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="threads per worker, and with --tp or --pp per rank; 0 (default): an equal share of the cores",
    )
    add_options(group, "--tp", "--pp", "--cp", "--max-requests")
    group.add_argument(
        "--max-waiting", type=int, default=256, metavar="N", help="requests that may wait in the queue (default: 256)"
    )
    group.add_argument(
        "--weights", choices=("auto", "mmap", "huge"), default="auto",
        help="mmap: map the file; huge: copy the weights into huge pages; auto (default): huge if memory suffices",
    )  # fmt: skip
    add_options(group, "--verify", *LIMIT_OPTIONS, "--no-prefix-cache")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the service."""
    from penstock.cli.service.process_state import service_state
    from penstock.logs import JsonLines, TextLines

    is_text = args.log_format == "text" or (args.log_format == "auto" and sys.stderr.isatty())
    # SIGHUP is ignored until the service handles it by reloading its keys.
    with service_state(args.log.upper(), TextLines() if is_text else JsonLines()):
        return _serve(args, is_text=is_text)


def _serve(args: argparse.Namespace, *, is_text: bool) -> int:
    import asyncio

    from penstock.env import pass_on_json_log
    from penstock.runtime.ranks.stage_server import reserved_port
    from penstock.serving.service import run_service

    settings = settings_of(args)
    if not is_text:
        pass_on_json_log()
    if sys.stdout.isatty():  # the addresses follow when the models are ready
        print(f"penstock {__version__} opens {', '.join(args.models)}. Ctrl-C stops it.", flush=True)
    with reserved_port(settings.options.stage_server) as server:
        options = replace(settings.options, stage_server=server)
        return asyncio.run(run_service(replace(settings, options=options)))


def settings_of(args: argparse.Namespace) -> ServiceSettings:
    """Return the settings that the command line asks for."""
    from penstock.processes.supervision import SupervisionPolicy
    from penstock.serving.service_settings import ServiceSettings

    num_workers, scale = _workers_of(args)
    roles = _roles_of(args)
    num_workers = roles.num_workers or num_workers
    for name in ("hang_seconds", "drain_seconds"):
        check_number(name, getattr(args, name), 86_400)
    models, servables = _split_sources([_resolve(args, source) for source in args.models])
    if args.cluster is not None and args.stage_port is not None:
        raise InvalidArgumentError("--stage-port: expected none with --cluster, got both", param="stage_port")
    placement, listener = cluster_placement(args, [path for _, path in models])
    return ServiceSettings(
        models=models,
        servables=servables,
        networks=_networks(args.network or (), models),
        num_workers=num_workers,
        scale=scale,
        roles=roles,
        route_policy=args.route_policy,
        options=options_of(args, num_workers if scale is None else scale.max_replicas),
        gateway=_gateway_settings(args),
        supervision=SupervisionPolicy(hang_s=args.hang_seconds, drain_s=args.drain_seconds),
        worker_listener=_worker_listener(args) if placement is None else listener,
        placement=placement,
        admin_socket=args.admin_socket,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )


def _roles_of(args: argparse.Namespace) -> WorkerRoles:
    """Return how many workers compute prompts and how many go on with answers; 0 and 0: each does both."""
    from penstock.serving.workers.worker_roles import NO_ROLES, WorkerRoles

    numbers = (args.prefill_workers, args.decode_workers)
    if numbers == (None, None):
        return NO_ROLES
    for name in ("workers", "replicas"):
        if getattr(args, name) is not None:
            message = f"--{name}: expected none with --prefill-workers and --decode-workers, got both"
            raise InvalidArgumentError(message, param=name)
    for name, ranks in (("tp", args.tp), ("pp", args.pp), ("cp", args.cp)):
        if ranks != 1:
            raise UnsupportedError(f"--{name}: expected 1 with workers for prefill and decode, got {ranks}", param=name)
    if args.no_prefix_cache:
        message = "--no-prefix-cache: expected a prefix cache with roles, because the pages of prompts move through it"
        raise UnsupportedError(message, param="no_prefix_cache")
    counts = [1 if number is None else number for number in numbers]
    return WorkerRoles(*counts)


def _workers_of(args: argparse.Namespace) -> tuple[int, ScalePolicy | None]:
    """Return how many workers start, and how their number changes; None: it does not."""
    from penstock.cluster.autoscale import ScalePolicy, parse_range

    options = {"queue_s": args.scale_queue_seconds, "down_after_s": args.scale_down_seconds}
    options = {name: value for name, value in options.items() if value is not None}
    if args.replicas is None:
        if options:
            raise InvalidArgumentError("--scale-queue-seconds and --scale-down-seconds require --replicas")
        return check_integer("workers", 1 if args.workers is None else args.workers, 1, 256), None
    low, high = parse_range(args.replicas)
    check_integer("replicas", high, max(1, low), 256)
    scale = ScalePolicy(low, high, **options)
    least = max(1, low)
    return check_integer("workers", least if args.workers is None else args.workers, least, high), scale


def _networks(specs: Sequence[str], models: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the network script by name of the model, "" for all; InvalidArgumentError if it suits no folder."""
    from penstock.models.network_script import split_spec

    folders = {name or Path(path).stem for name, path in models if Path(path).is_dir() or is_gguf(Path(path))}
    networks: dict[str, str] = {}
    for spec in specs:
        name, script = named_model(spec)
        split_spec(script)
        if not folders or (name and name not in folders):
            names = ", ".join(sorted(folders)) or "none"
            raise InvalidArgumentError(f"--network {spec}: expected the name of a folder's model, which are: {names}")
        if name in networks:
            raise InvalidArgumentError(
                f"--network: expected one script for {name or 'all folders'}, got two", param="network"
            )
        networks[name] = script
    return networks


def _worker_listener(args: argparse.Namespace) -> RemoteWorkerSettings | None:
    from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings

    listener = read_listener(args, "worker", ("worker_token_file", "tls_certificate", "tls_key"))
    if listener is None:
        return None
    host, port, token = listener
    return RemoteWorkerSettings(host, port, args.tls_certificate, args.tls_key, token)


def _resolve(args: argparse.Namespace, source: str) -> str:
    """Return NAME=PATH for a model of a hub, downloaded with consent; other sources as they are."""
    from penstock.cli.model_source import model_path
    from penstock.hub.names import parse_model

    name, separator, text = source.partition("=")
    if not separator or Path(source).exists():
        name, text = "", source
    model = parse_model(text)
    return source if model is None else f"{name or model.short}={model_path(args, text)}"


def _split_sources(sources: list[str]) -> tuple[tuple[tuple[str, str], ...], tuple[Path, ...]]:
    """Split the MODEL arguments into models with their names, and folders of servables."""
    from penstock.servables.lifecycle.folder_scan import holds_servables

    models, servables = [], []
    for source in sources:
        name, path = named_model(source)
        _check_kind(source, Path(path))
        if not holds_servables(Path(path)):
            models.append((name, path))
        elif name:
            raise InvalidArgumentError(
                f"{source}: NAME= applies to models only; a servable has the name of its folder", param="model"
            )
        else:
            servables.append(Path(path))
    return tuple(models), tuple(servables)


def _check_kind(source: str, path: Path) -> None:
    """Refuse an ONNX file, and a folder that is neither a checkpoint nor holds servables.

    Folders with GGUF files pass: opening them gives a better error.
    """
    from penstock.checkpoint.side_files import model_folder
    from penstock.servables.lifecycle.folder_scan import holds_servables

    if path.suffix == ".onnx" and path.is_file():
        raise InvalidArgumentError(
            f"{source}: expected a language model, got an ONNX file; make a bundle with penstock export, and serve it "
            "with servable.model",
            param="model",
        )
    if not path.is_dir() or holds_servables(path) or (model_folder(path) / "config.json").exists():
        return
    if any(entry.suffix.lower() == ".gguf" for entry in path.iterdir()):
        return
    raise InvalidArgumentError(
        f"{source}: expected a checkpoint folder (config.json) or a folder of servables (NAME/servable.py), got "
        "neither file",
        param="model",
    )


def named_model(text: str) -> tuple[str, str]:
    """Split NAME=PATH; the name is "" for a path only.

    A text that exists as a path, or that begins with ".", "/" or "~", is a path.
    """
    name, separator, path = text.partition("=")
    if separator and name and path and name[0] not in "./~" and not Path(text).exists():
        return name, str(Path(path).absolute())
    return "", str(Path(text).absolute())


def options_of(args: argparse.Namespace, num_workers: int) -> WorkerModelOptions:
    """Return how each of ``num_workers`` workers runs its model."""
    from penstock.core.rank_layout import RankLayout
    from penstock.engine.options import EngineOptions
    from penstock.quant.scheme import find_scheme
    from penstock.runtime.machine import affinity
    from penstock.serving.workers.worker_config import WorkerModelOptions

    check_integer("threads", args.threads, 0, MAX_THREADS)
    layout = RankLayout(args.tp, args.pp, args.cp)
    if args.scheme is not None:
        find_scheme(args.scheme)
    weights = args.weights
    if weights == "auto" and num_workers > 1:
        weights = "mmap"  # which workers share
    args.weights = "mmap"
    limits = limits_of(args, max_requests=args.max_requests, max_tokens=max(512, args.max_requests))
    threads = args.threads
    if threads == 0 and num_workers > 1:
        threads = max(1, len(affinity()) // (num_workers * layout.num_computing))
    engine = EngineOptions(prefix_cache=not args.no_prefix_cache, max_waiting=args.max_waiting)
    return WorkerModelOptions(
        scheme=args.scheme,
        threads=threads,
        weights=weights,
        limits=limits,
        engine=engine,
        use_cache=not args.no_cache,
        verify=args.verify,
        tensor_parallel_size=args.tp,
        pipeline_parallel_size=args.pp,
        context_parallel_size=args.cp,
        stage_server=stage_server(args, join_s=SERVICE_JOIN_S),
    )


def _gateway_settings(args: argparse.Namespace) -> GatewaySettings:
    from penstock.serving.settings import GatewayLimits, GatewaySettings

    for name in ("max_body_bytes", "max_open", "max_seconds"):
        check_number(name, getattr(args, name), 1 << 40)
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
        tool_format=args.tool_format,
        reasoning_format=args.reasoning_format,
    )
