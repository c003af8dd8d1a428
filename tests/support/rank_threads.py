"""Ranks as threads of one process: quick, and visible to sanitizers."""

from __future__ import annotations

import dataclasses
import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from penstock.core.comm import SharedComm, shared_bytes
from penstock.core.native import ALL_THREADS, POISON, Context, CoreProgram, Model, ProgramOptions, StepBatch
from penstock.errors import UnavailableError
from tests.support.core_steps import batch

PART_BYTES = 1 << 23
OPTIONS = ProgramOptions(
    max_tokens=128, max_requests=4, max_rows=128, num_pages=16, num_slots=4, flags=ALL_THREADS | POISON
)


class SharedMemory:
    """Zeroed memory that the ranks of one group share."""

    def __init__(self, world: int, part_bytes: int = PART_BYTES) -> None:
        self._map = mmap.mmap(-1, shared_bytes(world, part_bytes))
        self.address = np.frombuffer(self._map, np.uint8).ctypes.data

    def comm(self, rank: int, world: int, **changes: object) -> SharedComm:
        options = {"memory": self.address, "timeout_s": 60.0, "oversubscribed": True, **changes}
        return SharedComm(rank, world, PART_BYTES, **options)


class RankThreads:
    """The bundles of all ranks, open as one program; ``program`` is that of rank 0.

    ``comm_of``: makes the comm of a rank.  ``stage_ranks``: of a pipeline, ranks of each stage; 0: no pipeline.
    ``contexts``: the ranks that the pages of a context are dealt out to; a rank that needs every page has
    the pages of all, whereas ``options`` has those of one.  ``errors``: what ranks raised, by rank.
    """

    def __init__(
        self,
        parts: Sequence[Path],
        options: ProgramOptions = OPTIONS,
        num_threads: int = 1,
        comm_of: Callable[[int], SharedComm] | None = None,
        stage_ranks: int = 0,
        contexts: int = 1,
    ) -> None:
        self.world = len(parts)
        memory = SharedMemory(self.world)
        self._memory = memory
        self.comms = [comm_of(rank) if comm_of else memory.comm(rank, self.world) for rank in range(self.world)]
        self._stage_ranks = stage_ranks
        stages = range((self.world - 1) // stage_ranks if stage_ranks > 1 else 0)
        self._stage_memory = [SharedMemory(stage_ranks) for _ in stages]
        self._stage_comms = [
            self._stage_memory[s].comm(t, stage_ranks) for s in stages for t in range(stage_ranks)
        ]  # of ranks 1, 2 ...
        self.errors: dict[int, Exception] = {}
        self._parts, self._options, self._num_threads = parts, options, num_threads
        self._contexts = contexts
        self._followers = [
            threading.Thread(target=self._follow, args=(rank,), daemon=True) for rank in range(1, self.world)
        ]
        for thread in self._followers:
            thread.start()
        try:
            self.program, self._close = self._open(0)
        except BaseException:
            self._end()
            raise

    def _open(self, rank: int) -> tuple[CoreProgram, Callable[[], None]]:
        if self._stage_ranks:
            comm = self._stage_comms[rank - 1] if self._stage_comms and rank else None
            context = Context(self._num_threads, None, comm, self.comms[rank], self._stage_ranks)
        else:
            context = Context(self._num_threads, comm=self.comms[rank])
        context.agree("one bundle")
        model = Model.open(self._parts[rank])
        num_pages = self._options.num_pages * max(1, self._contexts // model.info.context_ranks)
        program = CoreProgram(model, context, dataclasses.replace(self._options, num_pages=num_pages))

        def close() -> None:
            for handle in (program, model, context):
                handle.close()

        return program, close

    def _follow(self, rank: int) -> None:
        try:
            program, close = self._open(rank)
            try:
                while True:
                    program.follow()
            finally:
                close()
        except UnavailableError as error:
            if not str(error).endswith("closed"):
                self.errors[rank] = error
        except Exception as error:
            self.errors[rank] = error
            for comm in (self.comms[rank], *self._stage_comms):
                comm.abort(f"rank {rank}: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        self._end()

    def _end(self) -> None:
        """End the other ranks before the memory that they use goes away."""
        for comm in (self.comms[0], *self._stage_comms):
            comm.abort("closed")
        for thread in self._followers:
            thread.join()
        for comm in (*self.comms, *self._stage_comms):
            comm.close()


def steps(num_groups: int, vocab_size: int = 1003) -> list[StepBatch]:
    """Whole and chunked prompts, cached beginnings, single tokens, and mixed batches; all rows, a few, one and none."""
    rng = np.random.default_rng(5)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, vocab_size, count)]

    def rows(*wanted: int) -> np.ndarray:
        return np.array(wanted, np.int32)

    first, second, third = (0, 1, 2), (5, 4), (9,)
    return [
        batch([(0, tokens(37), first)], num_groups),
        batch([(37, tokens(20), first), (0, tokens(5), second)], num_groups, output_rows=rows(19, 24)),
        batch([(57, tokens(1), first), (5, tokens(30), second), (0, tokens(3), third)], num_groups, output_rows=rows()),
        batch([(58, tokens(1), first), (35, tokens(1), second), (3, tokens(1), third)], num_groups),
        batch([(36, tokens(1), second)], num_groups),
        batch([(59, tokens(9), first), (4, tokens(2), third)], num_groups, output_rows=rows(10)),
    ]


def logits_of(program: CoreProgram, batches: Sequence[StepBatch]) -> list[bytes]:
    """The logits of each step, as bytes."""
    results = []
    for step in batches:
        program.run(step)
        results.append(program.logits().tobytes())
    return results


def whole_logits(
    path: Path, batches: Sequence[StepBatch], options: ProgramOptions = OPTIONS, num_threads: int = 1
) -> list[bytes]:
    """The logits of one process."""
    with Model.open(path) as model, Context(num_threads) as context, CoreProgram(model, context, options) as program:
        return logits_of(program, batches)


def with_kv(kv_layout: int) -> ProgramOptions:
    return dataclasses.replace(OPTIONS, kv_layout=kv_layout)
