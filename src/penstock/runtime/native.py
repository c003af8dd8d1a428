"""Graph mode: a bundle that the native core executes."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.core import native
from penstock.core.layouts import GENERAL_NETWORK, KV_NUMBERS
from penstock.core.library import CLOSED
from penstock.core.memory import make_memory, use_small_pages
from penstock.core.metadata import read_metadata, state_groups
from penstock.errors import OutOfMemoryError, PenstockError, UnsupportedError
from penstock.runtime.machine import memory
from penstock.runtime.page_prefault import PagePrefault
from penstock.runtime.program import (
    PAGE_TOKENS,
    PARTITION_PAGES,
    ProgramInfo,
    ProgramLimits,
    kv_layout_of,
    pages_by_group,
    pages_for,
    whole_partitions,
)
from penstock.runtime.stored_kv import kv_layout_in
from penstock.runtime.verify import open_verified

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.runtime.ranks.rank_group import RankGroup
    from penstock.runtime.ranks.remote_group import RemoteGroup

__all__ = ["NativeProgram", "fit_limits", "plan_limits", "refuse_general_network"]

_Result = TypeVar("_Result")
MIN_CONTEXT = 2048
"""A context length that the caller left open may shrink to fit the memory, down to this many tokens."""
_HUGE_PAGE_BYTES = 2 << 20
_UNKNOWN_BYTES = 1 << 62
"""The value for an unknown amount of memory, which fits every plan."""
_MAX_PAGES = 1 << 30
"""The limit of the core on pages."""
HEADROOM_BYTES = 64 << 20
"""Memory left for Python, the tokenizer and the text."""


def _options(limits: ProgramLimits, info: native.ModelInfo, contexts: int = 0) -> native.ProgramOptions:
    return native.ProgramOptions(
        max_tokens=limits.max_tokens,
        max_requests=limits.max_requests,
        max_rows=limits.max_rows,
        num_pages=limits.num_pages // info.context_ranks,
        num_slots=limits.max_requests,
        kv_layout=KV_NUMBERS[kv_layout_of(limits.kv_layout, info.scheme)],
        group_pages=tuple(count // info.context_ranks for count in _group_pages(limits, info, contexts)),
    )


def _group_pages(limits: ProgramLimits, info: native.ModelInfo, contexts: int) -> tuple[int, ...]:
    """Return the pages of each page group, those of all ranks that they are dealt out to."""
    ranks = max(info.context_ranks, contexts)
    return pages_by_group(info.page_windows, limits.num_pages, limits.max_requests, limits.max_tokens, ranks)


def plan_limits(
    model: native.Model, context: native.Context, limits: ProgramLimits, contexts: int = 0
) -> native.MemoryPlan:
    """Return the memory that a program with these limits would need.  Allocates nothing.

    ``contexts``: the ranks that pages are dealt out to, of which a stage that needs every page does not know; 0: as the
    model says.
    """
    return native.plan(model, context, _options(limits, model.info, contexts))


def refuse_general_network(kind: int, name: str = "model") -> None:
    """Raise UnsupportedError if ``kind`` is that of a general network; ``name`` begins the message."""
    if kind == GENERAL_NETWORK:
        raise UnsupportedError(
            f"{name}: expected a language model, got a general network; run it with `penstock predict` or "
            "penstock.open_predictor, or serve it with servable.model",
            param="model",
            code="general_network",
        )


def fit_limits(
    model: native.Model,
    context: native.Context,
    limits: ProgramLimits,
    available: int | None = None,
    contexts: int = 0,
) -> tuple[ProgramLimits, native.MemoryPlan]:
    """Replace zeros in ``limits`` by values whose plan fits into ``available`` bytes (None: the machine's memory).

    The default number of pages lets every request use its whole context, within a quarter of the memory that the
    weights leave, but at least one context; an encoder has only those that the tokens of its steps fill.  A context
    length that the caller left open shrinks when even one context does not fit.  ``contexts``: as of ``plan_limits``.
    Raises OutOfMemoryError, with the plan, when the requested sizes do not fit.
    """
    if available is None:
        machine = memory()
        available = machine.available
        if not machine.total:  # unknown: plan one context and let the system decide
            limits = dataclasses.replace(limits, num_pages=limits.num_pages or _pages_of_one_context(model, limits))
            available = _UNKNOWN_BYTES
    refuse_general_network(model.info.kind)
    longest, ranks = model.info.context_len, max(model.info.context_ranks, contexts)
    context_len = min(limits.context_len or longest, longest)
    max_tokens = min(limits.max_tokens, context_len * limits.max_requests)
    # With bidirectional attention a prompt runs whole, so one step may need a row for each of its tokens.
    runs_whole = model.info.bidirectional or model.info.prefix_token >= 0
    max_rows = max(max_tokens, limits.max_requests) if runs_whole else limits.max_requests
    base = ProgramLimits(
        max_tokens=max_tokens,
        max_requests=limits.max_requests,
        max_rows=limits.max_rows or max_rows,
        num_pages=whole_partitions(limits.num_pages or pages_for(context_len), ranks),
        context_len=context_len,
        kv_layout=kv_layout_in(limits.kv_layout, model),
        weights=limits.weights,
    )
    plan = plan_limits(model, context, base, contexts)
    fixed = plan.total_bytes - plan.kv_bytes + HEADROOM_BYTES
    if limits.num_pages == 0:
        kv = _KvMemory(model, context, base, plan, ranks)
        max_pages = pages_for(context_len) * limits.max_requests
        if model.info.bidirectional:  # no request outlives its step, of which two may be in flight
            max_pages = min(max_pages, 2 * (pages_for(max_tokens) + limits.max_requests))
        affordable = kv.most_pages(max(0, (available - fixed) // 4), max_pages)
        num_pages = whole_partitions(max(pages_for(context_len), affordable), ranks)
        if fixed + kv.num_bytes(num_pages) > available and limits.context_len == 0:
            shrunk = kv.most_pages(max(0, available - fixed), num_pages)
            shrunk -= shrunk % (PARTITION_PAGES * ranks) if ranks > 1 else 0
            if shrunk >= min(pages_for(context_len), pages_for(MIN_CONTEXT)):
                num_pages = shrunk
                context_len = min(context_len, shrunk * PAGE_TOKENS)
        base = dataclasses.replace(base, num_pages=num_pages, context_len=context_len)
        plan = plan_limits(model, context, base, contexts)
    if plan.total_bytes + HEADROOM_BYTES > available:
        raise OutOfMemoryError(_does_not_fit(plan, base, available))
    return base, plan


class _KvMemory:
    """The bytes of KV pages on a rank.  Groups with a window stop growing, so bytes are not in proportion to pages.

    ``plan``: the memory within ``limits``.  ``ranks``: those that pages are dealt out to; of some groups each has the
    pages of all.
    """

    def __init__(
        self, model: native.Model, context: native.Context, limits: ProgramLimits, plan: native.MemoryPlan, ranks: int
    ) -> None:
        self._model, self._context, self._limits, self._ranks = model, context, limits, ranks
        self._page_bytes = max(1, plan.kv_page_bytes if ranks == 1 else plan.kv_bytes // (limits.num_pages // ranks))
        self._has_windows = any(model.info.page_windows)

    def num_bytes(self, num_pages: int) -> int:
        """Return the bytes for ``num_pages`` pages of each group without a window."""
        if not self._has_windows:
            return num_pages // self._ranks * self._page_bytes
        limits = dataclasses.replace(self._limits, num_pages=max(num_pages, self._ranks))
        return plan_limits(self._model, self._context, limits, self._ranks).kv_bytes

    def most_pages(self, num_bytes: int, limit: int) -> int:
        """Return the largest number of pages up to ``limit`` that fit into ``num_bytes``."""
        if not self._has_windows:
            return min(limit, num_bytes // self._page_bytes * self._ranks)
        fits, too_many = 0, min(limit, _MAX_PAGES) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if self.num_bytes(middle) <= num_bytes else (fits, middle)
        return fits


def _pages_of_one_context(model: native.Model, limits: ProgramLimits) -> int:
    longest = model.info.context_len
    return pages_for(min(limits.context_len or longest, longest))


def _does_not_fit(plan: native.MemoryPlan, limits: ProgramLimits, available: int) -> str:
    def mib(num_bytes: int) -> str:
        return f"{num_bytes / (1 << 20):,.0f} MiB"

    return (
        f"The model needs {mib(plan.total_bytes + HEADROOM_BYTES)}, but only {mib(available)} are available: weights "
        f"{mib(plan.weight_bytes)}, keys and values {mib(plan.kv_bytes)} ({limits.num_pages} pages of {PAGE_TOKENS} "
        f"tokens, {limits.kv_layout}), temporaries {mib(plan.temporary_bytes + plan.scratch_bytes)}, logits "
        f"{mib(plan.logits_bytes)}, to spare {mib(HEADROOM_BYTES)}. Use a smaller context length, fewer requests, "
        "kv_cache int8 or int4, or a scheme with fewer bits"
    )


class Recorder(Protocol):
    """Observes the steps of a program."""

    def record(self, batch: native.StepBatch, call: Callable[[], _Result]) -> _Result:
        """Call ``call``, which computes the step, and return its result."""


class NativeProgram:
    """A bundle with its memory, run by the native core: one native call per step, without the interpreter lock.

    ``model``: the bundle.  ``context``: its instruction level and threads.  ``core_program`` records spans.
    ``group``: the other ranks, which end with this program; None if there are none.  ``contexts``: as of
    ``plan_limits``.
    """

    def __init__(
        self,
        model: native.Model,
        context: native.Context,
        limits: ProgramLimits,
        plan: native.MemoryPlan,
        group: RankGroup | RemoteGroup | None = None,
        rank_plans: Sequence[native.MemoryPlan] = (),
        contexts: int = 0,
    ) -> None:
        self.model = model
        self.context = context
        self.core_program = native.CoreProgram(model, context, _options(limits, model.info, contexts))
        self._call: native.StepCall | None = None
        self._calls: deque[native.StepCall] = deque()  # the last launches, as many as stages
        self._in_flight: deque[native.StepCall] = deque()
        self.group = group
        self.limits = limits
        self.path = Path()
        """The bundle's file, if it was opened by its path."""
        info = model.info
        self.info = ProgramInfo(
            network=info.network,
            scheme=info.scheme,
            mode="graph",
            vocab_size=info.vocab_size,
            context_len=min(info.context_len, limits.context_len),
            page_windows=tuple(info.page_windows),
            weight_bytes=info.weight_bytes,
            weight_bytes_per_token=info.weight_bytes_per_token,
            num_threads=context.num_threads,
            cpu_level=context.cpu_level,
            plan=plan,
            hidden_size=info.hidden_size,
            tail=info.tail,
            bidirectional=info.bidirectional,
            prefix_token=info.prefix_token,
            num_stages=1 if group is None else group.layout.pp,
            num_ranks=1 if group is None else group.layout.num_computing,
            rank_plans=tuple(rank_plans),
            context_ranks=info.context_ranks,
            group_pages=_group_pages(limits, info, contexts),
        )
        self.populate_s = 0.0
        """Seconds spent on copying the weights; 0 when they are mapped."""
        self.verify_s = 0.0
        """Seconds spent on verifying the checksums; 0 when they were not verified."""
        self.recorder: Recorder | None = None
        """Observes each step that ``run`` and ``step`` compute; set it in the thread of the steps."""
        self._closed = False
        pages = self.info.group_pages
        self._largest_groups = [group for group, count in enumerate(pages) if count == max(pages)]
        run_len = max(1, _HUGE_PAGE_BYTES * info.num_states // max(1, plan.kv_page_bytes))
        self._prefault = PagePrefault(
            self._make_pages, info.num_states, limits.num_pages // info.context_ranks, run_len
        )
        for state in range(info.num_states):  # a short request must not wait for a huge page in each layer
            use_small_pages(*self._memory_of(state, 0, run_len))

    def _memory_of(self, state: int, start: int, stop: int) -> tuple[int, int]:
        """Return the address and the size in bytes of some KV pages of a state."""
        pages = self.core_program.kv(state)[start:stop]
        return pages.__array_interface__["data"][0], pages.nbytes

    def _make_pages(self, state: int, start: int, stop: int) -> bool:
        """Allocate the memory of some KV pages of a state; False when the kernel cannot."""
        return make_memory(*self._memory_of(state, start, stop))

    def _prefault_pages(self, batch: native.StepBatch) -> None:
        """Tell the prefault thread how many pages the batch uses.

        The number is that of the group with the fewest used pages, among the largest groups.  Layers with a window are
        in smaller groups.
        """
        if batch.page_tables.size:
            last = int(batch.page_tables.max(axis=(1, 2))[self._largest_groups].min())
            self._prefault.use(last // self.info.context_ranks + 1)

    @classmethod
    def open(
        cls, path: Path | str, *, threads: int = 0, limits: ProgramLimits | None = None, verify: str = "never"
    ) -> tuple[NativeProgram, native.Model]:
        """Open a bundle, plan its memory, copy the weights if the limits require it, and create the program.

        Returns the program and the model, which gives access to the file's segments.  ``verify`` as in
        ``runtime.verify.open_verified``.
        """
        context = native.Context(threads)
        try:
            model, verify_s = open_verified(path, verify)
            try:
                refuse_general_network(model.info.kind, str(path))
                fitted, plan = fit_limits(model, context, limits or ProgramLimits())
                start = time.perf_counter()
                if fitted.weights == "huge":  # after the plan: weights that do not fit are refused before they are read
                    model.load_huge(context)
                populated = time.perf_counter()
                program = cls(model, context, fitted, plan)
                program.path = Path(path)
                program.populate_s = populated - start if fitted.weights == "huge" else 0.0
                program.verify_s = verify_s
                return program, model
            except BaseException:
                model.close()
                raise
        except BaseException:
            context.close()
            raise

    def run(self, batch: native.StepBatch) -> None:
        """Compute one step."""
        self._prefault_pages(batch)
        if self.recorder is None:
            self.core_program.run(batch)
        else:
            self.recorder.record(batch, lambda: self.core_program.run(batch))

    def logits(self) -> NDArray[np.float32]:
        """Return the last step's logits, [R, vocab]: a view."""
        return self.core_program.logits()

    def hidden(self) -> NDArray[np.float32]:
        """Return the last step's hidden rows, [T, hidden_size]: a view."""
        return self.core_program.hidden()

    def sample(self, sampling: native.Sampling) -> native.Sampled:
        """Sample every row of the last step."""
        return self.core_program.sample(sampling)

    def step(self, batch: native.StepBatch, sampling: native.Sampling) -> native.Sampled:
        """Compute one step and sample its rows in one native call."""
        call = self._call
        if call is None or call.batch is not batch or call.sampling is not sampling:
            self._prefault_pages(batch)
            call = self._call = self.core_program.step_call(batch, sampling)
        return call() if self.recorder is None else self.recorder.record(batch, call)

    def launch(self, batch: native.StepBatch, sampling: native.Sampling | None) -> None:
        """Start a step of a pipeline."""
        calls = (call for call in self._calls if call.batch is batch and call.sampling is sampling)
        call = next(calls, None) or self.core_program.step_call(batch, sampling)
        call.launch()
        self._in_flight.append(call)
        self._calls.append(call)
        if len(self._calls) > self.info.num_stages:
            self._calls.popleft()

    def collect(self) -> native.Sampled | None:
        """Wait for the oldest step in flight."""
        return self._in_flight.popleft().collect()

    def page_memory(self) -> list[list[NDArray[np.uint8]]]:
        """Return the KV pages of each page group; empty with several ranks, or if the file is no longer there."""
        states = range(self.model.info.num_states)
        groups = [0] * len(states)
        if self.group is not None or self.info.context_ranks > 1:
            return []
        if len(self.info.page_windows) > 1:
            try:
                groups = state_groups(read_metadata(self.path, self.model.stamp))
            except PenstockError:  # a temporary bundle was removed, or the file was replaced
                return []
        return [
            [self.core_program.kv(state) for state in states if groups[state] == group]
            for group in range(len(self.info.page_windows))
        ]

    def end_exchanges(self) -> None:
        """Fail the step of another thread if it waits for other ranks.  The program can then only be closed."""
        if self.group is not None:
            self.group.abort(CLOSED)

    def close(self) -> None:
        """Free the program, the model and the threads."""
        if not self._closed:
            self._closed = True
            self._prefault.close()
            self._call = None
            self._calls.clear()
            self._in_flight.clear()
            self.core_program.close()
            self.model.close()
            self.context.close()
            if self.group is not None:
                self.group.close()
