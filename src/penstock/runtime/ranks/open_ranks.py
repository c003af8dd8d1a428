"""Open a bundle as a program of several ranks on this host: this process is rank 0, the others are its children."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core import native
from penstock.core.metadata import read_metadata
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, InvalidFileError, UnavailableError
from penstock.graph.ir import Graph
from penstock.graph.metadata import decode_metadata
from penstock.graph.passes.pipeline import cut_rank
from penstock.graph.rank_bundle import WHOLE, repeated_kv_bytes, widest_exchange, widest_partials, write_rank_bundle
from penstock.graph.without_weights import write_without_weights
from penstock.runtime.machine import memory
from penstock.runtime.native import NativeProgram, fit_limits, plan_limits
from penstock.runtime.program import ProgramLimits, pages_for
from penstock.runtime.ranks.rank_group import RankComms, RankGroup
from penstock.runtime.stored_kv import with_stored_kv
from penstock.runtime.temporary_folder import temporary_folder
from penstock.runtime.verify import open_verified

if TYPE_CHECKING:
    from penstock.runtime.ranks.remote_group import RemoteGroup
    from penstock.runtime.ranks.stage_server import StageServer

__all__ = [
    "RankPlan", "check_rank_bundle", "default_threads", "graph_of_rank", "layout_of", "open_rank", "open_ranks",
    "plan_ranks", "threads_of",
]  # fmt: skip


MIN_PART_BYTES: Final = 4096
"""The size of the first message of a batch (core/src/program/ranks.cpp)."""


@dataclass(frozen=True)
class RankPlan:
    """The graphs and the memory of all ranks, and the sizes that they have in common.

    ``models``: the descriptions of the ranks that have weights.  ``threads``: of each of these.  ``verify_s``: the
    seconds of verifying the checksums.  ``repeated_kv_bytes``: of keys and values of heads that several ranks have.
    """

    graphs: list[Graph]
    plans: list[native.MemoryPlan]
    models: list[native.ModelInfo]
    limits: ProgramLimits
    threads: int
    verify_s: float
    repeated_kv_bytes: int = 0


def plan_ranks(
    source: Path | Sequence[Path],
    layout: RankLayout,
    *,
    threads: int = 0,
    limits: ProgramLimits | None = None,
    available: int | None = None,
    verify: str = "never",
) -> RankPlan:
    """Plan the memory of all ranks before a weight is read or cut.  The arguments are those of ``open_ranks``.

    ``available``: bytes for all ranks, of which each that has weights may use an equal share (None: what this machine
    has left).  Raises OutOfMemoryError, with the plan, when the requested sizes do not fit, and what ``open_ranks``
    raises.
    """
    threads = threads or max(1, default_threads() // layout.num_computing)
    whole, graphs, verify_s = _rank_graphs(source, layout, verify)
    limits = with_stored_kv(limits or ProgramLimits(), _first(source))
    if available is None and (machine := memory()).total:
        available = machine.available
    return _with_repeats(_plan_graphs(graphs, layout, threads, limits, available, verify_s), whole, layout)


def _first(source: Path | Sequence[Path]) -> Path:
    return source if isinstance(source, Path) else source[0]


def _with_repeats(plan: RankPlan, whole: Graph | None, layout: RankLayout) -> RankPlan:
    """Add the bytes of repeated heads.  ``whole``: None where there are only the bundles of ranks, which do not say."""
    if whole is None:
        return plan
    repeated = repeated_kv_bytes(whole, plan.graphs, layout, [part_plan.kv_bytes for part_plan in plan.plans])
    return dataclasses.replace(plan, repeated_kv_bytes=repeated)


def _plan_graphs(
    graphs: list[Graph],
    layout: RankLayout,
    threads: int,
    limits: ProgramLimits,
    available: int | None,
    verify_s: float,
) -> RankPlan:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(temporary_folder()))
        context = stack.enter_context(native.Context(threads))
        models = []
        for rank, graph in enumerate(graphs):
            write_without_weights(folder / f"{rank}.psm", graph)
            models.append(stack.enter_context(native.Model.open(folder / f"{rank}.psm")))
        computing = models[layout.world - layout.num_computing :]
        share = None if available is None else available // layout.num_computing
        fitted = [fit_limits(model, context, limits, share, layout.cp)[0] for model in computing]
        least = min(fitted, key=lambda sizes: (sizes.context_len, sizes.num_pages))
        least = dataclasses.replace(least, max_rows=max(sizes.max_rows for sizes in fitted))
        plans = [plan_limits(model, context, least, layout.cp) for model in models]
        return RankPlan(graphs, plans, [model.info for model in computing], least, threads, verify_s)


def open_ranks(
    source: Path | Sequence[Path],
    layout: RankLayout,
    *,
    threads: int = 0,
    limits: ProgramLimits | None = None,
    verify: str = "never",
    server: StageServer | None = None,
) -> tuple[NativeProgram, native.Model]:
    """Open all ranks; return the program of rank 0 and its bundle.

    ``source``: a whole bundle, which each rank cuts, or the bundles of all ranks.  ``threads``: of each rank; 0 divides
    the cores.  ``limits``: as for one rank; the memory is divided.  ``server``: where the stages of other machines
    join, instead of processes of this one; each has its own memory, threads and bundle, so ``source`` needs only that
    of rank 0.  Raises InvalidArgumentError if the network has too few heads or layers, OutOfMemoryError,
    UnavailableError if a rank ends or a stage does not come, and what a rank raises.
    """
    group: RankGroup | RemoteGroup
    if server is None:
        plan = plan_ranks(source, layout, threads=threads, limits=limits, verify=verify)
        part_bytes = _part_bytes(plan.graphs, plan.limits)
        oversubscribed = default_threads() < layout.num_computing * plan.threads
        group = RankGroup(layout, part_bytes, oversubscribed=oversubscribed)
    else:
        group, plan = _gather_stages(server, source, layout, limits, verify)
    limits, threads = plan.limits, plan.threads
    parts = _parts_of(source, layout, is_local=server is None)
    try:
        # Each rank cuts its part while this process cuts its own.
        group.start({"parts": parts, "threads": threads, "limits": dataclasses.asdict(limits)})
        with ExitStack() as opened:
            model, checksum = _open_part(parts, 0, layout)
            opened.callback(model.close)
            context = _open_context(group.comms, threads, layout)
            opened.callback(context.close)
            if limits.weights == "huge":
                model.load_huge(context)
            group.await_ready()
            program = _make_program(model, context, limits, plan.plans, checksum, group, layout.cp)
            group.opened()
            opened.pop_all()
    except UnavailableError as error:
        reported = group.first_error()
        group.close()
        raise (reported or error) from None
    except BaseException:
        group.close()
        raise
    program.verify_s = plan.verify_s
    program.info = dataclasses.replace(program.info, repeated_kv_bytes=plan.repeated_kv_bytes)
    if layout.pp > 1:  # rank 0 has no weights and no attention
        program.info = dataclasses.replace(
            program.info,
            weight_bytes=plan.models[0].weight_bytes,
            weight_bytes_per_token=plan.models[0].weight_bytes_per_token,
            num_threads=threads,
            bidirectional=any(info.bidirectional for info in plan.models),
            context_ranks=layout.cp,
        )
    return program, model


def _parts_of(source: Path | Sequence[Path], layout: RankLayout, *, is_local: bool) -> list[str]:
    """Return the whole bundle, or a bundle for each rank; unless ``is_local`` that of rank 0 in the place of each."""
    if isinstance(source, Path):
        return [str(source)]
    return [str(path) for path in source] if is_local else [str(source[0])] * layout.world


def _gather_stages(
    server: StageServer, source: Path | Sequence[Path], layout: RankLayout, limits: ProgramLimits | None, verify: str
) -> tuple[RemoteGroup, RankPlan]:
    """Wait for the stages of other machines, and plan for the one with the least memory."""
    from penstock.runtime.ranks.remote_group import RemoteGroup

    own = source if isinstance(source, Path) else source[0]
    model, verify_s = open_verified(own, verify)
    with model:
        metadata = read_metadata(own, model.stamp)
    graph = decode_metadata(metadata)[0]
    if own != source:
        check_rank_bundle(own, graph, 0, layout)
    group = RemoteGroup(server, layout, graph.properties.get(WHOLE) or hashlib.sha256(metadata).hexdigest())
    try:
        joined = group.await_stages()
        least = min(int(machine["available"]) for machine in joined)
        threads = min(threads_of(int(machine["threads"]), int(machine["cores"]), layout) for machine in joined)
        available = least * layout.pp or None
        if own == source:
            graphs = [cut_rank(graph, rank, layout)[0] for rank in range(layout.world)]
        else:
            graphs = [graph, *_graphs_of_stages(group.read_metadata(), layout)]
        limits = with_stored_kv(limits or ProgramLimits(), _first(source))
        plan = _plan_graphs(graphs, layout, threads, limits, available, verify_s)
        plan = _with_repeats(plan, graph if own == source else None, layout)
        group.connect(_part_bytes(plan.graphs, plan.limits))
    except BaseException:
        group.close()
        raise
    return group, plan


def _graphs_of_stages(metadata: Sequence[bytes], layout: RankLayout) -> list[Graph]:
    """Return the graphs of the stages, whose machines have sent them."""
    graphs = []
    for rank, data in enumerate(metadata, 1):
        try:
            graph = graph_of_rank(data, rank, layout)
        except (ValueError, LookupError, struct.error) as error:
            raise InvalidFileError(
                f"stage_server: rank {rank} sent no metadata of a bundle: {error}", param="stage_server"
            ) from error
        check_rank_bundle(Path(f"rank {rank}"), graph, rank, layout)
        graphs.append(graph)
    return graphs


def graph_of_rank(metadata: bytes, rank: int, layout: RankLayout) -> Graph:
    """Return the graph of a rank from the metadata of its part or of the whole bundle."""
    graph = decode_metadata(metadata)[0]
    return graph if WHOLE in graph.properties else cut_rank(graph, rank, layout)[0]


def open_rank(
    parts: Sequence[str],
    comms: RankComms,
    layout: RankLayout,
    threads: int,
    limits: ProgramLimits,
    on_opened: Callable[[], None],
) -> NativeProgram:
    """Open the part of a rank other than 0.

    ``parts``: the whole bundle, or the bundles of all ranks.  ``limits``: those of the group.  ``on_opened`` is called
    when this rank has its weights.
    """
    model, checksum = _open_part(parts, comms.all_ranks.rank, layout)
    context = _open_context(comms, threads, layout)
    if limits.weights == "huge":
        model.load_huge(context)
    on_opened()
    plans = [plan_limits(model, context, limits, layout.cp)]
    return _make_program(model, context, limits, plans, checksum, None, layout.cp)


def _open_context(comms: RankComms, threads: int, layout: RankLayout) -> native.Context:
    if layout.pp == 1:
        return native.Context(threads, comm=comms.all_ranks)
    is_coordinator = comms.all_ranks.rank == 0  # only samples
    num_threads = 1 if is_coordinator else threads
    return native.Context(num_threads, comm=comms.stage, links=comms.all_ranks, stage_ranks=layout.stage_ranks)


def _make_program(
    model: native.Model,
    context: native.Context,
    limits: ProgramLimits,
    plans: Sequence[native.MemoryPlan],
    checksum: str,
    group: RankGroup | RemoteGroup | None,
    contexts: int,
) -> NativeProgram:
    """Make the program of a rank, while the others make theirs, if all have the same bundle and limits.

    The program closes ``group``; until it is returned, the caller does.
    """
    context.agree(_agreement(checksum, limits))
    program = NativeProgram(model, context, limits, plans[0], group, plans, contexts)
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


def _rank_graphs(
    source: Path | Sequence[Path], layout: RankLayout, verify: str
) -> tuple[Graph | None, list[Graph], float]:
    """Return the whole graph if it is there, the graphs of all ranks, and the seconds of the verification.

    Raises InvalidArgumentError (``tensor_parallel_size``, ``pipeline_parallel_size``, ``context_parallel_size``) for
    the bundles of another layout.
    """
    graphs, seconds = [], 0.0
    for path in [source] if isinstance(source, Path) else source:
        model, verify_s = open_verified(path, verify)
        with model:
            graphs.append(decode_metadata(read_metadata(path, model.stamp))[0])
        seconds += verify_s
    if isinstance(source, Path):
        return graphs[0], [cut_rank(graphs[0], rank, layout)[0] for rank in range(layout.world)], seconds
    for rank, graph in enumerate(graphs):
        check_rank_bundle(source[rank], graph, rank, layout)
    return None, graphs, seconds


def check_rank_bundle(path: Path, graph: Graph, rank: int, layout: RankLayout) -> None:
    """Raise InvalidArgumentError, which names the option, unless a bundle is that of a rank of the layout."""
    world, bundle_layout = graph.properties.get("world", "1"), layout_of(graph)
    if bundle_layout == layout and graph.properties.get("rank") == str(rank):
        return
    own_rank = graph.properties.get("rank")
    about = "is whole" if own_rank is None else f"is that of rank {own_rank} of {world} ({bundle_layout})"
    difference = bundle_layout.first_difference(layout)
    if own_rank is None or difference is None:  # the files are mixed up, whatever the options are
        raise InvalidFileError(
            f"{path}: expected the bundle of rank {rank} of {layout.world} ({layout}), but it {about}"
        )
    name, expected, own = difference
    raise InvalidArgumentError(
        f"{name}: {path}: expected {expected}, because the bundle {about}, got {own} for rank {rank}", param=name
    )


def layout_of(graph: Graph) -> RankLayout:
    """Return the layout that the graph of a rank was cut for; that of one process of a whole graph."""
    world, stages, contexts = (int(graph.properties.get(key, "1")) for key in ("world", "stages", "context_world"))
    is_coordinated = stages > 1  # its rank 0 has no layers
    return RankLayout(((world - 1) // stages if is_coordinated else world) // contexts, stages, contexts)


def _open_part(parts: Sequence[str], rank: int, layout: RankLayout) -> tuple[native.Model, str]:
    """Open a rank's bundle; return it and the checksum of the whole.

    If the whole bundle is cut here, the file of the part is deleted at once: it stays readable as long as it is open.
    """
    if len(parts) > 1:
        model = native.Model.open(parts[rank])
        return model, decode_metadata(read_metadata(parts[rank], model.stamp))[0].properties.get(WHOLE, "")
    with temporary_folder(Path(parts[0])) as folder:
        part = Path(folder) / f"rank_{rank}.psm"
        checksum = write_rank_bundle(parts[0], part, rank, layout, durable=False)
        return native.Model.open(part), checksum


def _part_bytes(graphs: Sequence[Graph], limits: ProgramLimits) -> int:
    """Return the most bytes that a rank sends at once within these limits: rows of values, or the batch.

    Memory is taken only for what is sent.
    """
    graph = graphs[0]
    num_rows = max(limits.max_tokens, limits.max_rows, limits.max_requests)
    tables = len(graph.page_groups) * limits.max_requests * pages_for(limits.context_len or graph.context_len)
    batch = 64 + 4 * (2 * limits.max_tokens + limits.max_requests + 1 + num_rows + tables)
    partials = widest_partials(graphs, limits.max_tokens)
    return max(4 * widest_exchange(graphs) * num_rows, batch, partials, MIN_PART_BYTES)


def threads_of(threads: int, cores: int, layout: RankLayout) -> int:
    """Return the threads of each rank of a stage on a machine with ``cores``; ``threads`` 0 divides the cores."""
    return threads or max(1, cores // layout.stage_ranks)


def default_threads() -> int:
    """Return the number of threads that the machine and the cgroup allow this process."""
    with native.Context() as context:
        return context.num_threads
