"""The models of ``penstock batch``: a model in this process, or workers on this machine or on a cluster."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.options import open_llm
from penstock.cli.service.cluster_options import add_cluster_options, check_cluster_options, cluster_placement
from penstock.config import check_integer
from penstock.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from penstock.cluster.autoscale import ScalePolicy
    from penstock.llm.backend import Models

__all__ = ["OpenModels", "add_worker_options", "check_worker_options", "file_pairs", "open_models"]

_OPEN_PER_SLOT: Final = 4
"""Requests that are open per request of a step, so that the engine never waits for the next one."""
_MAX_TRIES: Final = 6
_PAUSE_S: Final = 0.5


@dataclass(frozen=True)
class OpenModels:
    """Open models.

    ``num_open``: how many requests to keep open, for each worker that is ready or in all.  ``num_tries``: how often to
    begin a request whose worker is lost.
    """

    models: Models
    num_open: int
    num_tries: int = 1
    is_per_worker: bool = False

    def limit(self) -> int:
        """Return how many requests should be open now."""
        if not self.is_per_worker:
            return self.num_open
        workers = [worker for backend in self.models.list() for worker in backend.workers()]
        return self.num_open * max(1, sum(worker.status == "ready" for worker in workers))

    async def retried(self, answer: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Return an answer; a request whose worker is lost runs again, as no part of its answer was written."""
        for number in range(1, self.num_tries):
            try:
                return await answer()
            except UnavailableError:
                await asyncio.sleep(_PAUSE_S * 2**number)
        return await answer()


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where workers run."""
    group = parser.add_argument_group("workers")
    group.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="worker processes that share the requests; 0 (default): run them in this process",
    )
    group.add_argument(
        "--replicas",
        metavar="MIN..MAX",
        help="change the number of workers with the number of open requests, within these limits; workers for which "
        "there is no room are tried again while the others go on (default: --workers)",
    )
    add_cluster_options(parser)


def check_worker_options(args: argparse.Namespace) -> None:
    """Refuse options that do not go together; InvalidArgumentError."""
    check_integer("workers", args.workers, 0, 256)
    check_cluster_options(args)
    if args.replicas is not None:
        if args.workers:
            raise InvalidArgumentError("--replicas: expected no --workers", param="replicas")
        _scale_of(args)
    elif args.cluster is not None and not args.workers:
        raise InvalidArgumentError("--cluster requires --workers or --replicas, the number of workers on the cluster")


def _scale_of(args: argparse.Namespace) -> ScalePolicy | None:
    """Return how the number of workers changes; None: it does not.  InvalidArgumentError."""
    if args.replicas is None:
        return None
    from penstock.cluster.autoscale import ScalePolicy, parse_range

    low, high = parse_range(args.replicas)
    check_integer("replicas", low, 1, 256)
    check_integer("replicas", high, low, 256)
    return ScalePolicy(low, high)


def file_pairs(sources: Sequence[str], output: str) -> list[tuple[str, str]]:
    """Return the files of requests with the files of their results.

    A folder stands for its ``*.jsonl`` files, in the order of their names.  InvalidArgumentError for a folder without
    any, and for two files of one name; FileExistsError if the output of several is a file.
    """
    is_folder = len(sources) > 1 or Path(sources[0]).is_dir()
    if not is_folder and not Path(output).is_dir():
        return [(sources[0], output)]
    files: list[Path] = []
    for source in sources:
        matches = sorted(Path(source).glob("*.jsonl")) if Path(source).is_dir() else [Path(source)]
        if not matches:
            raise InvalidArgumentError(f"{source}: expected a folder with *.jsonl files, got none")
        files += matches
    names = [file.name for file in files]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidArgumentError(
            f"{min(twice)}: expected files of different names, as their results go to one folder"
        )
    Path(output).mkdir(parents=True, exist_ok=True)
    return [(str(file), str(Path(output) / file.name)) for file in files]


@asynccontextmanager
async def open_models(args: argparse.Namespace) -> AsyncIterator[OpenModels]:
    """Open the model that the options describe, and close it at the end."""
    if args.workers or args.replicas is not None:
        async with _workers(args) as opened:
            yield opened
        return
    from penstock.llm.local_backend import LocalBackend, LocalModels

    with open_llm(args, args.max_requests) as llm:
        backend = LocalBackend(llm, llm.info.network)
        try:
            yield OpenModels(LocalModels([backend]), _OPEN_PER_SLOT * llm.engine.scheduler.max_requests)
        finally:
            await backend.close()


@asynccontextmanager
async def _workers(args: argparse.Namespace) -> AsyncIterator[OpenModels]:
    from penstock.cli.model_source import model_path
    from penstock.cli.service.serve import options_of
    from penstock.serving.workers.primary import Primary
    from penstock.serving.workers.remote_models import RemoteModels

    path = str(Path(model_path(args, args.model)).absolute())
    scale = _scale_of(args)
    num_workers, most = (args.workers, args.workers) if scale is None else (scale.min_replicas, scale.max_replicas)
    num_open = _OPEN_PER_SLOT * args.max_requests
    defaults = {"weights": "mmap", "tp": 1, "pp": 1, "cp": 1, "max_waiting": num_open * most}
    options = options_of(argparse.Namespace(**(defaults | vars(args))), most)
    options = replace(options, network=args.network)
    placement, listener = cluster_placement(args, [path])
    primary = Primary(remote=listener, placement=placement)
    await primary.open()
    networks = {"": args.network} if args.network else None
    models = RemoteModels(primary, options, num_workers, networks, scale=scale)
    try:
        await models.load(path, "model")
        if scale is not None:
            yield OpenModels(models, num_open, _MAX_TRIES, is_per_worker=True)
        else:
            yield OpenModels(models, num_open * num_workers, _MAX_TRIES)
    finally:
        await models.stop()
        await primary.close()
