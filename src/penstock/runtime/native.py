"""Graph mode: a bundle executed by the native core."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core import native
from penstock.core.kv import KV_NUMBERS
from penstock.core.memory import make_memory, use_small_pages
from penstock.errors import OutOfMemoryError
from penstock.runtime.machine import memory
from penstock.runtime.page_prefault import PagePrefault
from penstock.runtime.program import PAGE_TOKENS, ProgramInfo, ProgramLimits, kv_layout_of, pages_for
from penstock.runtime.verify import open_verified

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["NativeProgram", "fit_limits", "plan_limits"]

MIN_CONTEXT = 2048
"""A context that was not asked for by name may shrink to fit the memory, down to this many tokens."""
_HUGE_PAGE_BYTES = 2 << 20
_UNKNOWN_BYTES = 1 << 62
"""Stands for an unknown amount of memory: no plan is refused for it."""
_HEADROOM_BYTES = 64 << 20
"""Left for Python, the tokenizer and the text."""


def _options(limits: ProgramLimits, scheme: str) -> native.ProgramOptions:
    return native.ProgramOptions(
        max_tokens=limits.max_tokens,
        max_requests=limits.max_requests,
        max_rows=limits.max_rows,
        num_pages=limits.num_pages,
        num_slots=limits.max_requests,
        kv_layout=KV_NUMBERS[kv_layout_of(limits.kv_layout, scheme)],
    )


def plan_limits(model: native.Model, context: native.Context, limits: ProgramLimits) -> native.Plan:
    """The memory that a program of these limits would take.  Allocates nothing."""
    return native.plan(model, context, _options(limits, model.info.scheme))


def fit_limits(
    model: native.Model, context: native.Context, limits: ProgramLimits, available: int | None = None
) -> tuple[ProgramLimits, native.Plan]:
    """Fill in what the caller left open, so that the plan fits into ``available`` bytes (None: the machine's).

    Pages: enough for every request to use its whole context, within a quarter of what is left beside the
    weights; one context at least.  A context that nobody asked for shrinks when even one does not fit.
    OutOfMemoryError with the plan's figures when the sizes that were asked for do not fit.
    """
    if available is None:
        found = memory()
        available = found.available
        if not found.total:  # unknown: one context, and the system decides
            limits = dataclasses.replace(limits, num_pages=limits.num_pages or _pages_of_one_context(model, limits))
            available = _UNKNOWN_BYTES
    longest = model.info.context_len
    context_len = min(limits.context_len or longest, longest)
    max_tokens = min(limits.max_tokens, context_len * limits.max_requests)
    # A prompt whose rows are wanted cannot be cut into steps by the rows when it must run whole.
    max_rows = max(max_tokens, limits.max_requests) if model.info.bidirectional else limits.max_requests
    base = ProgramLimits(
        max_tokens=max_tokens,
        max_requests=limits.max_requests,
        max_rows=limits.max_rows or max_rows,
        num_pages=limits.num_pages or pages_for(context_len),
        context_len=context_len,
        kv_layout=kv_layout_of(limits.kv_layout, model.info.scheme),
        weights=limits.weights,
    )
    plan = plan_limits(model, context, base)
    fixed = plan.total_bytes - plan.kv_bytes + _HEADROOM_BYTES
    page = max(1, plan.kv_page_bytes)
    if limits.num_pages == 0:
        most = pages_for(context_len) * limits.max_requests
        wanted = min(most, max(0, (available - fixed) // 4) // page)
        num_pages = max(pages_for(context_len), wanted)
        if fixed + num_pages * page > available and limits.context_len == 0:
            shrunk = max(0, available - fixed) // page
            if shrunk >= min(pages_for(context_len), pages_for(MIN_CONTEXT)):
                num_pages = shrunk
                context_len = min(context_len, shrunk * PAGE_TOKENS)
        base = dataclasses.replace(base, num_pages=num_pages, context_len=context_len)
        plan = plan_limits(model, context, base)
    if plan.total_bytes + _HEADROOM_BYTES > available:
        raise OutOfMemoryError(_does_not_fit(plan, base, available))
    return base, plan


def _pages_of_one_context(model: native.Model, limits: ProgramLimits) -> int:
    longest = model.info.context_len
    return pages_for(min(limits.context_len or longest, longest))


def _does_not_fit(plan: native.Plan, limits: ProgramLimits, available: int) -> str:
    def mib(num_bytes: int) -> str:
        return f"{num_bytes / (1 << 20):,.0f} MiB"

    return (
        f"the plan takes {mib(plan.total_bytes)}, but {mib(available)} can be had: weights {mib(plan.weight_bytes)}, "
        f"keys and values {mib(plan.kv_bytes)} ({limits.num_pages} pages of 32 tokens, {limits.kv_layout}), "
        f"temporaries {mib(plan.temporary_bytes + plan.scratch_bytes)}, logits {mib(plan.logits_bytes)}; "
        f"a smaller context length, fewer requests, kv_cache int8 or a scheme of fewer bits takes less"
    )


class NativeProgram:
    """A bundle with its memory, run by the native core: one native call a step, the interpreter lock released."""

    def __init__(self, model: native.Model, context: native.Context, limits: ProgramLimits, plan: native.Plan) -> None:
        self._model = model
        self._context = context
        self._core = native.CoreProgram(model, context, _options(limits, model.info.scheme))
        self._call: native.StepCall | None = None
        self._limits = limits
        info = model.info
        self._info = ProgramInfo(
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
        )
        self.populate_s = 0.0
        """Seconds that copying the weights took; 0 when they are mapped."""
        self.verify_s = 0.0
        """Seconds that verifying the checksums took; 0 when they were not read."""
        self._closed = False
        run_len = max(1, _HUGE_PAGE_BYTES * info.num_states // max(1, plan.kv_page_bytes))
        self._ahead = PagePrefault(self._make_pages, info.num_states, limits.num_pages, run_len)
        for state in range(info.num_states):  # who needs a few tokens shall not wait for a huge page in each layer
            use_small_pages(*self._memory_of(state, 0, run_len))

    def _memory_of(self, state: int, start: int, stop: int) -> tuple[int, int]:
        """Address and bytes of some KV pages of a state."""
        pages = self._core.kv(state)[start:stop]
        return pages.__array_interface__["data"][0], pages.nbytes

    def _make_pages(self, state: int, start: int, stop: int) -> bool:
        """Have the memory of some KV pages of a state made; False when the system cannot."""
        return make_memory(*self._memory_of(state, start, stop))

    def _look_ahead(self, batch: native.StepBatch) -> None:
        """Of several page groups that which uses least counts: layers with a window never need as many."""
        if batch.page_tables.size:
            self._ahead.use(int(batch.page_tables.max(axis=(1, 2)).min()) + 1)

    @classmethod
    def open(
        cls, path: Path | str, *, threads: int = 0, limits: ProgramLimits | None = None, verify: str = "never"
    ) -> tuple[NativeProgram, native.Model]:
        """Open a bundle, plan its memory, copy the weights where the limits say so, and make the program; the model
        gives access to the file's segments. ``verify`` is that of ``runtime.verified.open_verified``."""
        context = native.Context(threads)
        try:
            model, verify_s = open_verified(path, verify)
            try:
                fitted, plan = fit_limits(model, context, limits or ProgramLimits())
                start = time.perf_counter()
                if fitted.weights == "huge":  # planned first: what does not fit is refused before it is read
                    model.load_huge(context)
                populated = time.perf_counter()
                program = cls(model, context, fitted, plan)
                program.populate_s = populated - start if fitted.weights == "huge" else 0.0
                program.verify_s = verify_s
                return program, model
            except BaseException:
                model.close()
                raise
        except BaseException:
            context.close()
            raise

    @property
    def info(self) -> ProgramInfo:
        """What the program is."""
        return self._info

    @property
    def limits(self) -> ProgramLimits:
        """The sizes it was planned for."""
        return self._limits

    @property
    def context(self) -> native.Context:
        """Its instruction level and threads."""
        return self._context

    @property
    def model(self) -> native.Model:
        """The bundle it runs."""
        return self._model

    @property
    def core_program(self) -> native.CoreProgram:
        """The native core's program, whose spans say where a step's time went."""
        return self._core

    def run(self, batch: native.StepBatch) -> None:
        """Compute one step."""
        self._look_ahead(batch)
        self._core.run(batch)

    def logits(self) -> NDArray[np.float32]:
        """The last step's logits, [R, vocab], a view."""
        return self._core.logits()

    def hidden(self) -> NDArray[np.float32]:
        """The last step's hidden rows, [T, hidden_size], a view."""
        return self._core.hidden()

    def sample(self, sampling: native.Sampling) -> native.Sampled:
        """Sample every row of the last step."""
        return self._core.sample(sampling)

    def step(self, batch: native.StepBatch, sampling: native.Sampling) -> native.Sampled:
        """Compute one step and sample its rows in one native call."""
        call = self._call
        if call is None or call.batch is not batch or call.sampling is not sampling:
            self._look_ahead(batch)
            call = self._call = self._core.step_call(batch, sampling)
        return call()

    def close(self) -> None:
        """Give back program, model and threads."""
        if not self._closed:
            self._closed = True
            self._ahead.close()
            self._call = None
            self._core.close()
            self._model.close()
            self._context.close()
