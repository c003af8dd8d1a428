"""Answers which scheme and which way to run a model suit this machine and the user's wishes.

Memory is planned by the core, for the graph in each scheme.  Times come from real steps at the model's shapes, without
its weights (``step_probe``).  The quality of a scheme is what ``penstock eval`` measured of the model, or else the one
of the demo model in docs/guides/quantization.md.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.bench.open_model import check_size
from penstock.bench.step_probe import Expectation, Workload, expect, machine_of, probe_steps
from penstock.bench.weightless import Machine, Weightless
from penstock.checkpoint.folder import Checkpoint
from penstock.config import check_choice, check_integer
from penstock.core import native
from penstock.errors import FileAccessError, InvalidArgumentError, UnsupportedError
from penstock.file_kinds import is_gguf
from penstock.graph.ir import Graph
from penstock.graph.passes import assign_scheme
from penstock.graph.without_weights import read_source, table_dtype
from penstock.ops.table import LINEAR_SCHEMES
from penstock.quant.perplexity_cost import PERPLEXITY_COST
from penstock.runtime.build import Progress, ProgressCallback, build_in_child
from penstock.runtime.cache import Cache
from penstock.runtime.machine import memory
from penstock.runtime.open import check_network, registered_script
from penstock.runtime.program import KV_LAYOUTS
from penstock.validation import refusal

__all__ = ["PYTHON_BYTES", "Advice", "Advise", "SchemeRow", "Wishes", "advise", "misses", "recommend"]

PYTHON_BYTES: Final = 64 << 20
"""Memory for Python, the tokenizer and the text beside the plan, as ``runtime.native.fit_limits`` reserves it."""
EQUAL_QUALITY: Final = 0.002
"""Schemes whose perplexity differs by less than this share count as equally good."""
_PROMPT_TOKENS, _NEW_TOKENS = 512, 128
_SECONDS = 50.0
_MAX_SECONDS_PER_SCHEME = 6.0


@dataclass(frozen=True)
class Wishes:
    """The wishes of the user, each None if it does not matter.

    ``first_token_s``: the longest time to the first token of a prompt, when nothing else runs.  ``latency_s``: the
    longest time per further token, with all requests running.  ``tokens_per_s``: the least rate of generated tokens of
    all requests together, prompts included.  ``memory_bytes``: the most memory.
    """

    first_token_s: float | None = None
    latency_s: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Advise:
    """The question.  Sizes in tokens; None is 512 and 128, or as many as the model's context holds.

    ``model``: a bundle or a checkpoint folder.  ``network``: the user's script, for a folder.  ``threads``: 0 is all
    allowed cores.  ``schemes``: those to compare.  ``seconds``: the approximate time of the whole measurement.
    ``costs``: by scheme, the measured increase of this model's perplexity as a share (``quality.costs.read_costs``);
    schemes without one have that of the demo model.
    """

    model: Path | str
    wishes: Wishes = Wishes()
    concurrency: int = 1
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    schemes: tuple[str, ...] = LINEAR_SCHEMES
    kv_cache: str = "auto"
    threads: int = 0
    network: str | None = None
    seconds: float = _SECONDS
    costs: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the sizes, the wishes and the schemes; errors name the field."""
        check_integer("concurrency", self.concurrency, 1, 1024)
        for name in ("prompt_tokens", "new_tokens"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if not self.schemes or len(set(self.schemes)) != len(self.schemes):
            raise refusal("schemes", "a list of different schemes", self.schemes)
        for scheme in self.schemes:
            if scheme not in LINEAR_SCHEMES:
                raise refusal("schemes", f"some of {', '.join(LINEAR_SCHEMES)}", scheme)
        check_choice("kv_cache", self.kv_cache, KV_LAYOUTS)
        check_network(self.network)


@dataclass
class SchemeRow:
    """A scheme: its memory in bytes, its expected times, and the wishes that it misses.

    ``plan`` is the core's, for all requests with their whole contexts; ``memory_bytes`` adds Python.  ``device_bytes``
    is the plan of one request.  ``fits``: this machine has that memory now; otherwise nothing was measured.  ``token``
    is a step of all requests, ``token_alone`` of one.  ``tokens_per_s`` counts generated tokens of all requests,
    prompts included.  ``num_layers`` and ``probed_prompt`` are what was measured.
    ``is_measured``: the cost in perplexity is that of this model, and not of the demo model.
    """

    scheme: str
    perplexity_cost: float
    plan: native.MemoryPlan
    memory_bytes: int
    device_bytes: int
    fits: bool
    first_token: Expectation | None = None
    token: Expectation | None = None
    token_alone: Expectation | None = None
    tokens_per_s: float = 0.0
    num_layers: int = 0
    probed_prompt: int = 0
    missed: list[str] = field(default_factory=list)
    is_measured: bool = False


@dataclass
class Advice:
    """The answer.

    ``recommended`` is a scheme of ``rows``, None if none meets every wish.  ``script`` is the user's network, None
    without one.  ``load_average``: of the minute before.  ``only_scheme`` is the scheme of a bundle or a quantized
    folder: others need the original checkpoint.  ``mixed_schemes``: by how many linears each scheme has in such a
    model whose layers have several; its row is the model as it is.  Empty for other models.
    """

    network: str
    script: str | None
    work: Workload
    kv_cache: str
    machine: Machine
    load_average: float
    available_bytes: int
    only_scheme: str | None
    num_layers: int
    rows: list[SchemeRow]
    recommended: str | None
    mixed_schemes: dict[str, int] = field(default_factory=dict)


def advise(question: Advise, progress: ProgressCallback | None = None) -> Advice:
    """Plan memory, measure for a minute at most, and compare.

    Raises InvalidArgumentError if the sizes do not fit the model, UnsupportedError for a model that generates no text,
    and the errors of opening or capturing it.
    """
    begin, load_average = time.monotonic(), os.getloadavg()[0]
    graph, files, only_scheme = _source(question, progress)
    work = _workload(question, graph.context_len)
    rows = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as name, native.Context(question.threads) as context:
        folder = Path(name)
        machine = machine_of(context)
        for number, scheme in enumerate(question.schemes):
            left = question.seconds - (time.monotonic() - begin)
            seconds = min(_MAX_SECONDS_PER_SCHEME, left / (len(question.schemes) - number))
            if progress is not None:
                progress(Progress(f"measuring {scheme}"))
            own = graph if scheme == only_scheme else assign_scheme(graph, scheme, table_dtype(graph))
            model = Weightless(folder / "model.psm", own, files)
            try:
                rows.append(_plan(model, context, work, question.kv_cache))
                rows[-1].is_measured = scheme in question.costs
                rows[-1].perplexity_cost = question.costs.get(scheme, rows[-1].perplexity_cost)
                if rows[-1].fits:
                    _measure(rows[-1], model, work, question.kv_cache, machine, seconds)
            finally:
                model.close()
    for row in rows:
        row.missed = misses(row, question.wishes)
    return Advice(
        graph.network,
        question.network,
        work,
        question.kv_cache,
        machine,
        load_average,
        memory().available,
        only_scheme,
        len(graph.states),
        rows,
        recommend(rows),
        _mix(graph) if only_scheme is not None else {},
    )


def _mix(graph: Graph) -> dict[str, int]:
    """Return how many linears have each scheme; nothing if they are those that one scheme gives to all."""
    counts = _scheme_counts(graph)
    is_uniform = graph.scheme in LINEAR_SCHEMES and counts == _scheme_counts(assign_scheme(graph, graph.scheme))
    return {} if is_uniform else counts


def _scheme_counts(graph: Graph) -> dict[str, int]:
    return dict(Counter(str(node.attrs["scheme"]) for node in graph.nodes if "scheme" in node.attrs))


def _source(question: Advise, progress: ProgressCallback | None) -> tuple[Graph, dict[str, bytes], str | None]:
    """Return the graph, the files beside the weights, and the scheme if the source can have no other."""
    path = Path(question.model)
    if path.is_dir() or (is_gguf(path) and path.exists()):
        only_scheme = Checkpoint.open(path).scheme
        network = question.network or registered_script(path)
        cached = Cache().find_any(path, network)
        if cached is not None:
            graph, files = read_source(cached)
        else:
            with tempfile.TemporaryDirectory(prefix="penstock-") as name:
                bundle = Path(name) / "model.psm"
                build_in_child(path, bundle, network=network, kind="without-weights", progress=progress)
                graph, files = read_source(bundle)
    elif not path.exists():
        raise FileAccessError(
            f"{path}: no such file or folder; expected a local checkpoint folder or a .psm bundle", param="model"
        )
    elif question.network is not None:
        raise InvalidArgumentError(
            f"network: expected none for the bundle {path}, which already contains its graph", param="network"
        )
    else:
        graph, files = read_source(path)
        only_scheme = graph.scheme
    attends = [node for node in graph.nodes if node.op in ("attention", "sink_attention", "relative_attention")]
    if not attends or not all(node.attrs["causal"] for node in attends):
        raise UnsupportedError(f"model: expected one that generates text, got {graph.network}", param="model")
    if graph.values[graph.output].shape[-1].offset != graph.vocab_size:
        raise UnsupportedError(f"model: expected a graph that ends in logits, got {graph.network}", param="model")
    return graph, files, only_scheme


def _workload(question: Advise, context_len: int) -> Workload:
    """Return the sizes as set, or the defaults limited by the model's context."""
    new = question.new_tokens or min(_NEW_TOKENS, max(1, context_len // 4))
    prompt = question.prompt_tokens or min(_PROMPT_TOKENS, max(1, context_len - new))
    if prompt + new > context_len:
        name = "prompt_tokens" if question.prompt_tokens is not None else "new_tokens"
        raise InvalidArgumentError(
            f"{name}: expected a prompt and an answer of together at most {context_len} tokens, the model's context, "
            f"got {prompt} and {new}",
            param=name,
        )
    return Workload(prompt, new, question.concurrency)


def _plan(model: Weightless, context: native.Context, work: Workload, kv_cache: str) -> SchemeRow:
    scheme = model.graph.scheme
    plan = model.plan(context, work.limits(work.concurrency, kv_cache))
    needed = plan.total_bytes + PYTHON_BYTES
    machine_memory = memory()
    return SchemeRow(
        scheme,
        PERPLEXITY_COST[scheme],
        plan,
        needed,
        model.plan(context, work.limits(1, kv_cache)).total_bytes,
        not machine_memory.total or needed <= machine_memory.available,
    )


def _measure(
    row: SchemeRow, model: Weightless, work: Workload, kv_cache: str, machine: Machine, seconds: float
) -> None:
    """Fill in the expected times of a scheme."""
    probe = probe_steps(model.graph, model.path.parent, work, kv_cache, machine, seconds)
    row.num_layers, row.probed_prompt = probe.num_layers, probe.prompt_tokens
    steps = work.prefill()
    row.first_token = expect(model.bound(steps, row.plan.kv_page_bytes, kv_cache, machine), probe.prefill, len(steps))
    by_batch = {
        batch: expect(model.bound([work.decode(batch)], row.plan.kv_page_bytes, kv_cache, machine), measured)
        for batch, measured in probe.decode.items()
    }
    row.token, row.token_alone = by_batch[work.concurrency], by_batch[1]
    row.tokens_per_s = _rate(work, row.first_token.seconds, row.token.seconds)


def _rate(work: Workload, first_s: float, token_s: float) -> float:
    """Return the generated tokens per second of all requests, when each follows another: prompts take turns."""
    request_s = work.concurrency * first_s + (work.new_tokens - 1) * token_s
    return work.concurrency * work.new_tokens / request_s


def misses(row: SchemeRow, wishes: Wishes) -> list[str]:
    """Return the wishes that a scheme misses, by field of ``Advise``; "available_memory" if the machine lacks it."""
    missed = [] if row.fits else ["available_memory"]
    if wishes.memory_bytes is not None and row.memory_bytes > wishes.memory_bytes:
        missed.append("memory")
    if row.first_token is None or row.token is None:
        return missed
    if wishes.first_token_s is not None and row.first_token.seconds > wishes.first_token_s:
        missed.append("first_token")
    if wishes.latency_s is not None and row.token.seconds > wishes.latency_s:
        missed.append("latency")
    if wishes.tokens_per_s is not None and row.tokens_per_s < wishes.tokens_per_s:
        missed.append("throughput")
    return missed


def recommend(rows: list[SchemeRow]) -> str | None:
    """Return the scheme to recommend; None if every scheme misses a wish.

    Among the schemes that miss none, those within EQUAL_QUALITY of the lowest perplexity count as equally good.  The
    fastest of these is returned.
    """
    meeting = [row for row in rows if not row.missed]
    if not meeting:
        return None
    best = min(row.perplexity_cost for row in meeting)
    equal = [row for row in meeting if row.perplexity_cost <= best + EQUAL_QUALITY]
    return min(equal, key=lambda row: -row.tokens_per_s).scheme
