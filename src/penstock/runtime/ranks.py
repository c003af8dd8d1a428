"""Open a bundle as a program of several ranks on this host: this process is rank 0, the others are its children."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.core import native
from penstock.core.comm import SharedComm
from penstock.core.metadata import read_metadata
from penstock.errors import UnavailableError
from penstock.graph.ir import Graph
from penstock.graph.metadata import decode_metadata
from penstock.graph.rank_bundle import widest_exchange, write_rank_bundle
from penstock.runtime.machine import memory
from penstock.runtime.native import NativeProgram, fit_limits, plan_limits
from penstock.runtime.program import ProgramLimits, pages_for
from penstock.runtime.rank_group import RankGroup
from penstock.runtime.verify import open_verified

__all__ = ["default_threads", "open_rank", "open_ranks"]


def open_ranks(
    path: Path, world: int, *, threads: int = 0, limits: ProgramLimits | None = None, verify: str = "never"
) -> tuple[NativeProgram, native.Model]:
    """Open the whole bundle ``path`` as ``world`` ranks; return the program of rank 0 and its bundle.

    ``threads``: of each rank; 0 divides the cores.  ``limits``: as for one rank; the memory is divided.  Raises
    InvalidArgumentError if the network has too few heads, UnavailableError if a rank ends, and what a rank raises.
    """
    limits, num_cores = limits or ProgramLimits(), default_threads()
    threads = threads or max(1, num_cores // world)
    whole, verify_s = open_verified(path, verify)
    with whole:
        graph, _ = decode_metadata(read_metadata(path, whole.stamp))
    group = RankGroup(world, _part_bytes(graph, world, limits), oversubscribed=num_cores < world * threads)
    try:
        group.start({"path": str(path), "threads": threads})  # each cuts its part while this process cuts its own
        model, checksum = _open_part(path, 0, world)
        try:
            fitted, plan = _fit(model, limits, world)
            group.send(dataclasses.asdict(fitted))
            context = native.Context(threads, comm=group.comm)
            if fitted.weights == "huge":
                model.load_huge(context)
            group.await_ready()
            program = _make_program(model, context, fitted, plan, checksum, group)
        except BaseException:
            model.close()
            raise
    except UnavailableError as error:
        reported = group.first_error()
        group.close()
        raise (reported or error) from None
    except BaseException:
        group.close()
        raise
    program.verify_s = verify_s
    return program, model


def open_rank(
    path: str, comm: SharedComm, threads: int, limits_of: Callable[[], ProgramLimits], on_opened: Callable[[], None]
) -> NativeProgram:
    """Open the part of a rank other than 0.

    ``limits_of`` returns the limits of rank 0, which plans its own part first.  ``on_opened`` is called when this rank
    has its weights.
    """
    model, checksum = _open_part(Path(path), comm.rank, comm.world)
    limits, context = limits_of(), native.Context(threads, comm=comm)
    if limits.weights == "huge":
        model.load_huge(context)
    on_opened()
    return _make_program(model, context, limits, plan_limits(model, context, limits), checksum, None)


def _make_program(
    model: native.Model,
    context: native.Context,
    limits: ProgramLimits,
    plan: native.Plan,
    checksum: str,
    group: RankGroup | None,
) -> NativeProgram:
    """Make the program of a rank, while the others make theirs, if all have the same bundle and limits."""
    context.agree(_agreement(checksum, limits))
    program = NativeProgram(model, context, limits, plan, group)
    try:
        context.agree("")  # a rank that could not make its program ends the group before the first step
    except BaseException:
        program.close()
        raise
    return program


def _agreement(checksum: str, limits: ProgramLimits) -> str:
    """Return what all ranks must have in common: the bundle, and the sizes that their memory is planned for."""
    return (
        f"bundle {checksum[:32]}, {', '.join(f'{name} {value}' for name, value in dataclasses.asdict(limits).items())}"
    )


def _open_part(path: Path, rank: int, world: int) -> tuple[native.Model, str]:
    """Open a rank's part of a bundle; return it and the checksum of the whole.

    The file of the part is deleted at once: it stays readable as long as it is open.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        part = Path(folder) / f"rank_{rank}.psm"
        checksum = write_rank_bundle(path, part, rank, world, durable=False)
        return native.Model.open(part), checksum


def _fit(model: native.Model, limits: ProgramLimits, world: int) -> tuple[ProgramLimits, native.Plan]:
    """Return limits whose plan fits into each rank's share of the memory, and the plan."""
    machine = memory()
    with native.Context(1) as context:
        return fit_limits(model, context, limits, machine.available // world if machine.total else None)


def _part_bytes(graph: Graph, world: int, limits: ProgramLimits) -> int:
    """Return the most bytes that a rank sends at once within these limits: rows of values, or the batch.

    Memory is taken only for what is sent.
    """
    num_rows = max(limits.max_tokens, limits.max_rows, limits.max_requests)
    tables = len(graph.page_groups) * limits.max_requests * pages_for(limits.context_len or graph.context_len)
    batch = 64 + 4 * (2 * limits.max_tokens + limits.max_requests + 1 + num_rows + tables)
    return max(4 * widest_exchange(graph, world) * num_rows, batch)


def default_threads() -> int:
    """Return the number of threads that the machine and the cgroup allow this process."""
    with native.Context() as context:
        return context.num_threads
