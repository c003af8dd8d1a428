"""A Model over several processes, the ranks of a group: which rank this process is, and how it meets the others."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any, Final

from penstock.core import native as core
from penstock.core.comm import JoinedComm, MpiComm, SharedComm
from penstock.core.metadata import read_metadata
from penstock.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from penstock.launch.environment import RankEnvironment, read_rank_environment
from penstock.lite.affinity import default_threads
from penstock.lite.device import CpuOptions
from penstock.lite.settings import ModelConfig

__all__ = ["agree", "agreement", "check_rank", "join_group", "rank_of", "share_of_cores", "threads_of_rank"]

_DIFFERENCE: Final = re.compile(
    r"text: expected equal values on all ranks, (?:found|got) (.+) on rank (\d+) and (.+) on rank (\d+)$"
)


def check_rank(path: str | os.PathLike[str], info: core.RankInfo, options: CpuOptions) -> None:
    """Raise InvalidArgumentError unless the bundle is that of this process's rank.

    A launcher may start several processes that each run a whole bundle.
    """
    place = read_rank_environment()
    if info.world == 1:
        if options.explicit_rank not in (None, 0):
            raise InvalidArgumentError(
                f"rank_id: {path}: expected 0, because this is a whole bundle, got {options.rank_id}; "
                "use penstock export --tp",
                param="rank_id",
            )
        return
    _check_same("rank_id", options.explicit_rank, place.rank if place else None)
    if place is not None and place.world != info.world:
        raise InvalidArgumentError(
            f"group_size: {path}: expected {info.world} processes, the ranks that the bundle was cut for, got "
            f"{place.world}, as the launcher says",
            param="group_size",
        )
    if place is None and options.explicit_rank is None:
        raise InvalidArgumentError(
            f"rank_id: {path} is the bundle of rank {info.rank} of {info.world}; start each rank with penstock launch, "
            "or set rank_id",
            param="rank_id",
        )
    if options.rank_id != info.rank:
        raise InvalidArgumentError(
            f"rank_id: {path}: expected the bundle of rank {options.rank_id}, got that of rank {info.rank}",
            param="rank_id",
        )


def rank_of(path: str | os.PathLike[str], native: core.Model, options: core.ProgramOptions) -> core.RankInfo:
    """Return what the open bundle needs of a group.

    Raises UnsupportedError for one of a pipeline or of context parallelism.
    """
    try:
        info = core.rank_info(native, options)
    except UnsupportedError:
        _check_layout(path, native.stamp)  # with the number of stages, and what to do
        raise
    if info.world > 1:
        _check_layout(path, native.stamp)
    return info


def _check_layout(path: str | os.PathLike[str], stamp: Sequence[int]) -> None:
    from penstock.graph.metadata import decode_metadata

    properties = decode_metadata(read_metadata(path, stamp))[0].properties
    for name, key in (("pipeline_parallel_size", "stages"), ("context_parallel_size", "context_world")):
        if properties.get(key, "1") != "1":
            raise UnsupportedError(
                f"{name}: {path}: expected 1, since penstock.lite runs bundles of penstock export --tp only, got "
                f"{properties[key]}; use penstock.LLM or penstock run",
                param=name,
            )


def _check_same(name: str, explicit: int | None, launched: int | None) -> None:
    if explicit is not None and launched is not None and explicit != launched:
        raise InvalidArgumentError(
            f"{name}: expected {launched}, as the launcher of this process says, got {explicit}", param=name
        )


def _local_world(info: core.RankInfo, place: RankEnvironment | None) -> int:
    return place.local_world if place else info.world


def threads_of_rank(options: CpuOptions, info: core.RankInfo) -> int:
    """Return the number of threads of this rank; by default the ranks of this host share its cores."""
    if options.thread_num or info.world == 1:
        return options.thread_num
    return max(1, default_threads() // _local_world(info, read_rank_environment()))


def share_of_cores(options: CpuOptions, info: core.RankInfo) -> list[int]:
    """Return the cores of ``device_id``, one of as many shares as this host has ranks; an empty list binds no thread.

    Ranks share cores if there are fewer.
    """
    if options.device_id < 0:
        return []
    num_devices = _local_world(info, read_rank_environment())
    if options.device_id >= num_devices:
        raise InvalidArgumentError(
            f"device_id: expected -1 to {num_devices - 1}, one per process of this host, got {options.device_id}",
            param="device_id",
        )
    if options.thread_affinity_mode or options.thread_affinity_core_list:
        raise InvalidArgumentError("device_id: expected no thread affinity beside it", param="device_id")
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // num_devices)
    begin = options.device_id * size % len(cores)
    return cores[begin : begin + size]


def join_group(info: core.RankInfo, config: ModelConfig, num_threads: int) -> SharedComm | None:
    """Wait for the other ranks of the bundle; return the connection, or None for a whole bundle."""
    if info.world == 1:
        return None
    place = read_rank_environment()
    at, timeout_s = (info.rank, info.world, info.part_bytes), config.rank_timeout_s
    if config.transport == "mpi":
        if place and place.source == "Open MPI":  # it has no standard ABI, and MPICH would end the process
            raise UnsupportedError(
                "transport: expected 'shared' under Open MPI, which only starts the ranks, got 'mpi', which needs "
                "MPICH's mpirun",
                param="transport",
            )
        trusted, join_s = config.trusted_network, config.join_timeout_s
        return MpiComm(*at, timeout_s=timeout_s, trusted_network=trusted, join_timeout_s=join_s)
    local_world = _local_world(info, place)
    if local_world < info.world:
        raise UnsupportedError(
            f"transport: expected 'mpi', because {local_world} of {info.world} ranks are on this host, got 'shared'",
            param="transport",
        )
    return JoinedComm(
        *at,
        timeout_s=timeout_s,
        join_timeout_s=config.join_timeout_s,
        oversubscribed=default_threads() < local_world * num_threads,
    )


def agree(context: core.Context, text: str) -> None:
    """Compare ``text``, an agreement, with that of the other ranks; the error names the value that differs."""
    try:
        context.agree(text)
    except (InvalidArgumentError, UnavailableError) as error:  # the second one if another rank was first to compare
        match = _DIFFERENCE.search(str(error))
        pairs = zip(match[1].split(", "), match[3].split(", "), strict=False) if match else ()
        for own, other in pairs:
            if match is not None and own != other:
                (name, _, value), (_, _, other_value) = own.partition(" "), other.partition(" ")
                raise InvalidArgumentError(
                    f"{name}: expected equal values on all ranks, got {value} on rank {match[2]} and "
                    f"{other_value} on rank {match[4]}",
                    param=name,
                ) from None
        raise


def agreement(path: str | os.PathLike[str], stamp: Any, config: ModelConfig) -> str:
    """Return what all ranks must have in common: what their bundles were cut from, and the configuration."""
    from penstock.graph.metadata import decode_metadata
    from penstock.graph.rank_bundle import WHOLE

    checksum = decode_metadata(read_metadata(path, stamp))[0].properties.get(WHOLE, "")
    values = {**dataclasses.asdict(config), "weights": "", "verify": ""}  # these change nothing
    return f"bundle {checksum[:32]}, " + ", ".join(f"{name} {value}" for name, value in values.items() if value != "")
