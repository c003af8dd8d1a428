"""Open a bundle as a program of several ranks on this host: this process is rank 0, the others are its children."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.core import native
from penstock.core.comm import SharedComm
from penstock.core.metadata import read_metadata
from penstock.errors import InvalidArgumentError, UnavailableError
from penstock.graph.ir import Graph
from penstock.graph.metadata import decode_metadata
from penstock.graph.passes.shard import shard
from penstock.graph.rank_bundle import WHOLE, widest_exchange, write_rank_bundle
from penstock.graph.without_weights import write_without_weights
from penstock.runtime.machine import memory
from penstock.runtime.native import NativeProgram, fit_limits, plan_limits
from penstock.runtime.program import ProgramLimits, pages_for
from penstock.runtime.rank_group import RankGroup
from penstock.runtime.verify import open_verified

__all__ = ["RankPlan", "default_threads", "open_rank", "open_ranks", "plan_ranks"]


@dataclass(frozen=True)
class RankPlan:
    """The graphs and the memory of all ranks, and the sizes that they have in common.

    ``threads``: of each rank.  ``verify_s``: the seconds of verifying the checksums.
    """

    graphs: list[Graph]
    plans: list[native.Plan]
    limits: ProgramLimits
    threads: int
    verify_s: float


def plan_ranks(
    source: Path | Sequence[Path],
    world: int,
    *,
    threads: int = 0,
    limits: ProgramLimits | None = None,
    available: int | None = None,
    verify: str = "never",
) -> RankPlan:
    """Plan the memory of ``world`` ranks before a weight is read or cut.  The arguments are those of ``open_ranks``.

    ``available``: bytes for all ranks, of which each may use an equal share (None: what this machine has left).  Raises
    OutOfMemoryError, with the plan, when the requested sizes do not fit, and what ``open_ranks`` raises.
    """
    threads = threads or max(1, default_threads() // world)
    graphs, verify_s = _rank_graphs(source, world, verify)
    if available is None and (machine := memory()).total:
        available = machine.available
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        context = stack.enter_context(native.Context(threads))
        models = []
        for rank, graph in enumerate(graphs):
            write_without_weights(folder / f"{rank}.psm", graph)
            models.append(stack.enter_context(native.Model.open(folder / f"{rank}.psm")))
        largest = max(models, key=lambda model: model.info.weight_bytes)
        fitted, _ = fit_limits(
            largest, context, limits or ProgramLimits(), None if available is None else available // world
        )
        plans = [plan_limits(model, context, fitted) for model in models]
    return RankPlan(graphs, plans, fitted, threads, verify_s)


def open_ranks(
    source: Path | Sequence[Path],
    world: int,
    *,
    threads: int = 0,
    limits: ProgramLimits | None = None,
    verify: str = "never",
) -> tuple[NativeProgram, native.Model]:
    """Open ``world`` ranks; return the program of rank 0 and its bundle.

    ``source``: a whole bundle, which each rank cuts, or the bundles of the ranks.  ``threads``: of each rank; 0 divides
    the cores.  ``limits``: as for one rank; the memory is divided.  Raises InvalidArgumentError if the network has too
    few heads, OutOfMemoryError, UnavailableError if a rank ends, and what a rank raises.
    """
    plan = plan_ranks(source, world, threads=threads, limits=limits, verify=verify)
    limits, threads = plan.limits, plan.threads
    group = RankGroup(world, _part_bytes(plan.graphs, limits), oversubscribed=default_threads() < world * threads)
    parts = [str(source)] if isinstance(source, Path) else [str(path) for path in source]
    try:
        # Each rank cuts its part while this process cuts its own.
        group.start({"parts": parts, "threads": threads, "limits": dataclasses.asdict(limits)})
        with ExitStack() as opened:
            model, checksum = _open_part(parts, 0, world)
            opened.callback(model.close)
            context = native.Context(threads, comm=group.comm)
            opened.callback(context.close)
            if limits.weights == "huge":
                model.load_huge(context)
            group.await_ready()
            program = _make_program(model, context, limits, plan.plans, checksum, group)
            opened.pop_all()
    except UnavailableError as error:
        reported = group.first_error()
        group.close()
        raise (reported or error) from None
    except BaseException:
        group.close()
        raise
    program.verify_s = plan.verify_s
    return program, model


def open_rank(
    parts: Sequence[str],
    comm: SharedComm,
    threads: int,
    limits: ProgramLimits,
    on_opened: Callable[[], None],
) -> NativeProgram:
    """Open the part of a rank other than 0.

    ``parts``: the whole bundle, or the bundles of all ranks.  ``limits``: those of the group.  ``on_opened`` is called
    when this rank has its weights.
    """
    model, checksum = _open_part(parts, comm.rank, comm.world)
    context = native.Context(threads, comm=comm)
    if limits.weights == "huge":
        model.load_huge(context)
    on_opened()
    return _make_program(model, context, limits, [plan_limits(model, context, limits)], checksum, None)


def _make_program(
    model: native.Model,
    context: native.Context,
    limits: ProgramLimits,
    plans: Sequence[native.Plan],
    checksum: str,
    group: RankGroup | None,
) -> NativeProgram:
    """Make the program of a rank, while the others make theirs, if all have the same bundle and limits.

    The program closes ``group``; until it is returned, the caller does.
    """
    context.agree(_agreement(checksum, limits))
    program = NativeProgram(model, context, limits, plans[0], group, plans)
    try:
        context.agree("")  # a rank that could not make its program ends the group before the first step
    except BaseException:
        program.group = None  # the caller asks it for the reason first
        program.close()
        raise
    return program


def _agreement(checksum: str, limits: ProgramLimits) -> str:
    """Return what all ranks must have in common: the bundle, and the sizes that their memory is planned for."""
    return (
        f"bundle {checksum[:32]}, {', '.join(f'{name} {value}' for name, value in dataclasses.asdict(limits).items())}"
    )


def _rank_graphs(source: Path | Sequence[Path], world: int, verify: str) -> tuple[list[Graph], float]:
    """Return the graphs of all ranks, and the seconds of the verification.

    Raises InvalidArgumentError (``tensor_parallel_size``) for the bundles of another number of ranks.
    """
    graphs, seconds = [], 0.0
    for path in [source] if isinstance(source, Path) else source:
        model, verify_s = open_verified(path, verify)
        with model:
            graphs.append(decode_metadata(read_metadata(path, model.stamp))[0])
        seconds += verify_s
    if isinstance(source, Path):
        return [shard(graphs[0], rank, world)[0] for rank in range(world)], seconds
    for rank, graph in enumerate(graphs):
        found = graph.properties.get("rank"), graph.properties.get("world")
        if found != (str(rank), str(world)):
            raise InvalidArgumentError(
                f"tensor_parallel_size: {source[rank]}: expected the bundle of rank {rank} of {world}, found that of "
                f"rank {found[0]} of {found[1]}",
                param="tensor_parallel_size",
            )
    return graphs, seconds


def _open_part(parts: Sequence[str], rank: int, world: int) -> tuple[native.Model, str]:
    """Open a rank's bundle; return it and the checksum of the whole.

    If the whole bundle is cut here, the file of the part is deleted at once: it stays readable as long as it is open.
    """
    if len(parts) == world > 1:
        model = native.Model.open(parts[rank])
        return model, decode_metadata(read_metadata(parts[rank], model.stamp))[0].properties.get(WHOLE, "")
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        part = Path(folder) / f"rank_{rank}.psm"
        checksum = write_rank_bundle(parts[0], part, rank, world, durable=False)
        return native.Model.open(part), checksum


def _part_bytes(graphs: Sequence[Graph], limits: ProgramLimits) -> int:
    """Return the most bytes that a rank sends at once within these limits: rows of values, or the batch.

    Memory is taken only for what is sent.
    """
    graph = graphs[0]
    num_rows = max(limits.max_tokens, limits.max_rows, limits.max_requests)
    tables = len(graph.page_groups) * limits.max_requests * pages_for(limits.context_len or graph.context_len)
    batch = 64 + 4 * (2 * limits.max_tokens + limits.max_requests + 1 + num_rows + tables)
    return max(4 * widest_exchange(graphs) * num_rows, batch)


def default_threads() -> int:
    """Return the number of threads that the machine and the cgroup allow this process."""
    with native.Context() as context:
        return context.num_threads
