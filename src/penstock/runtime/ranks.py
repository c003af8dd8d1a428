"""Open a bundle as a program of several ranks on this host: this process is rank 0, the others are its children."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from penstock.core import native
from penstock.core.comm import SharedComm
from penstock.core.metadata import read_metadata
from penstock.errors import UnavailableError
from penstock.graph.ir import Graph
from penstock.graph.metadata import decode_metadata
from penstock.graph.rank_bundle import checksum_of, widest_exchange, write_rank_bundle
from penstock.runtime.machine import memory
from penstock.runtime.native import NativeProgram, fit_limits, plan_limits
from penstock.runtime.program import ProgramLimits, pages_for
from penstock.runtime.rank_group import RankGroup
from penstock.runtime.verify import open_verified

__all__ = ["open_rank", "open_ranks"]


def open_ranks(
    path: Path, world: int, *, threads: int = 0, limits: ProgramLimits | None = None, verify: str = "never"
) -> tuple[NativeProgram, native.Model]:
    """Open the whole bundle ``path`` as ``world`` ranks; return the program of rank 0 and its bundle.

    ``threads``: of each rank; 0 divides the cores.  ``limits``: as for one rank; the memory is divided.  Raises
    InvalidArgumentError if the network has too few heads, UnavailableError if a rank ends, and what a rank raises.
    """
    num_cores = _num_cores()
    threads = threads or max(1, num_cores // world)
    whole, verify_s = open_verified(path, verify)
    with whole:
        graph, segments = decode_metadata(read_metadata(path, whole.stamp))
        width = widest_exchange(graph, world)
    model = _open_part(path, 0, world)
    try:
        fitted, plan = _fit(model, limits or ProgramLimits(), world)
        group = RankGroup(world, _part_bytes(graph, width, fitted), oversubscribed=num_cores < world * threads)
        try:
            agreement = checksum_of(segments)
            settings = {"path": str(path), "threads": threads, "limits": dataclasses.asdict(fitted)}
            group.start({**settings, "agreement": agreement})
            context = native.Context(threads, comm=group.comm)
            context.agree(agreement)
            if fitted.weights == "huge":
                model.load_huge(context)
            program = NativeProgram(model, context, fitted, plan, group)
            program.verify_s = verify_s
            group.await_ready()
            return program, model
        except UnavailableError as error:
            reported = group.first_error()
            group.close()
            raise (reported or error) from None
        except BaseException:
            group.close()
            raise
    except BaseException:
        model.close()
        raise


def open_rank(path: str, comm: SharedComm, *, threads: int, limits: ProgramLimits, agreement: str) -> NativeProgram:
    """Open the part of a rank other than 0, with the limits of rank 0."""
    context = native.Context(threads, comm=comm)
    context.agree(agreement)
    model = _open_part(Path(path), comm.rank, comm.world)
    if limits.weights == "huge":
        model.load_huge(context)
    return NativeProgram(model, context, limits, plan_limits(model, context, limits))


def _open_part(path: Path, rank: int, world: int) -> native.Model:
    """Open a rank's part of a bundle.  Its file is deleted at once: it stays readable as long as it is open."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        part = Path(folder) / f"rank_{rank}.psm"
        write_rank_bundle(path, part, rank, world)
        return native.Model.open(part)


def _fit(model: native.Model, limits: ProgramLimits, world: int) -> tuple[ProgramLimits, native.Plan]:
    """Return limits whose plan fits into each rank's share of the memory, and the plan."""
    machine = memory()
    with native.Context(1) as context:
        return fit_limits(model, context, limits, machine.available // world if machine.total else None)


def _part_bytes(graph: Graph, width: int, limits: ProgramLimits) -> int:
    """Return the most bytes that a rank sends at once: rows of values, or the batch."""
    tables = len(graph.page_groups) * limits.max_requests * pages_for(limits.context_len)
    batch = 64 + 4 * (2 * limits.max_tokens + limits.max_requests + 1 + limits.max_rows + tables)
    return max(4 * width * max(limits.max_tokens, limits.max_rows), batch)


def _num_cores() -> int:
    with native.Context() as context:
        return context.num_threads
