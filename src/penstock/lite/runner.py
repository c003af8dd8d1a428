"""Parallel predictions that share one copy of the weights."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from penstock.core.forked import check_process, is_forked
from penstock.core.predict import GENERAL_NETWORK
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite.affinity import BoundContext
from penstock.lite.device import Context
from penstock.lite.inputs import check_inputs, check_outputs, input_tensors
from penstock.lite.open_model import ModelType, OpenModel
from penstock.lite.sequences import Sequences
from penstock.lite.settings import ModelConfig
from penstock.lite.tensor import Tensor, array_of

__all__ = ["ModelParallelRunner"]


class _Worker(NamedTuple):
    """A program with its own threads."""

    context: BoundContext
    sequences: Sequences


class ModelParallelRunner:
    """Several workers, each with a program, over one bundle.

    Any number of threads may call ``predict``.  Each worker serves one call at a time, and further calls wait.
    ``context.parallel.workers_num`` is the number of workers (0: one for every ``cpu.thread_num`` cores), and
    ``cpu.thread_num`` the number of threads of each (0: 1).  If threads are bound to cores, each worker uses the cores
    after those of the previous worker, and starts at the first core again after the last.

    Inputs and outputs are those of Model, with any [B, T] up to the config's ``batch_size`` and the context length.
    Calls do not share state, so each ``reset`` must be 1.  Use a Model to continue sequences.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: OpenModel | None = None
        self._workers: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._pid = 0
        self._num_waiting = 0

    def build_from_file(
        self,
        model_path: str | os.PathLike[str],
        model_type: ModelType,
        context: Context | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None = None,
    ) -> None:
        """Open a bundle and create the workers; arguments and errors are those of ``Model.build_from_file``."""
        check_process(self._pid, "runner", "built", "build")
        with self._lock:
            if self._pid:
                raise InvalidArgumentError(
                    "runner: already built or closed; create another ModelParallelRunner", param="runner"
                )
            opened = OpenModel(model_path, model_type, context, config)
            workers: list[_Worker] = []
            try:
                if opened.rank.world > 1:
                    raise UnsupportedError(f"{opened.path}: expected a whole bundle, got that of a rank; use a Model")
                if opened.info.kind == GENERAL_NETWORK:
                    raise UnsupportedError(
                        f"{opened.path}: expected a language model, got a general network; use a Model for each thread",
                        param="model_path",
                    )
                num_threads = opened.context.cpu.thread_num or 1
                cores = len(os.sched_getaffinity(0))
                for index in range(opened.context.parallel.workers_num or max(1, cores // num_threads)):
                    bound = opened.bind(num_threads, index * num_threads)
                    sequences = Sequences(opened.native, bound, opened.config, opened.config.batch_size)
                    workers.append(_Worker(bound, sequences))
            except BaseException:
                _end(opened, workers)
                raise
            self._opened, self._workers, self._pid = opened, workers, os.getpid()
        for worker in workers:
            self._free.put(worker)

    @property
    def workers_num(self) -> int:
        """The number of simultaneous predictions."""
        return len(self._workers)

    def get_inputs(self) -> list[Tensor]:
        """Return new tensors for ``predict``, with [batch_size, seq_len] of the config."""
        config = self._ready().config
        return input_tensors(config.batch_size, config.seq_len)

    def get_outputs(self) -> list[Tensor]:
        """Return new tensors with the names, types and shapes of the outputs."""
        config = self._ready().config
        sequences = self._workers[0].sequences
        return [
            Tensor(name=spec.name, dtype=spec.dtype, shape=sequences.shape_of(spec, config.batch_size, config.seq_len))
            for spec in sequences.specs
        ]

    def predict(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Wait for a free worker and compute the outputs; otherwise as ``Model.predict``."""
        opened = self._ready()
        token_ids, num_tokens, reset = check_inputs(inputs, opened.info.vocab_size, None)
        batch_size, seq_len = token_ids.shape
        if not 0 < batch_size <= opened.config.batch_size:
            raise InvalidArgumentError(
                f"token_ids: expected 1 to {opened.config.batch_size} sequences (the config's batch_size), got "
                f"{batch_size}",
                param="token_ids",
            )
        if (reset != 1).any():
            raise InvalidArgumentError(
                f"reset: expected 1, because calls of a runner share no state, got 0 at "
                f"[{np.flatnonzero(reset != 1)[0]}]",
                param="reset",
            )
        specs, shape_of = self._workers[0].sequences.specs, self._workers[0].sequences.shape_of
        targets = None
        if outputs is not None:
            targets = check_outputs(outputs, specs, [shape_of(spec, batch_size, seq_len) for spec in specs])
        worker = self._free.get()
        if worker is None:
            self._free.put(None)  # wakes the next waiting call
            raise InvalidArgumentError("runner: expected a built runner, got one that is closed", param="runner")
        try:
            rows = worker.sequences.forward(token_ids, num_tokens, reset)
        finally:
            self._free.put(worker)
        if targets is None:
            return [Tensor(row, name=spec.name) for row, spec in zip(rows, specs, strict=True)]
        for tensor, row in zip(targets, rows, strict=True):
            array_of(tensor)[...] = row
        return list(targets)

    def close(self) -> None:
        """Wait for running calls and free the memory.  Waiting calls raise InvalidArgumentError."""
        if is_forked(self._pid):
            return  # the threads and the memory belong to the parent
        with self._lock:
            opened, self._opened = self._opened, None
            if opened is None:
                return
            ended = [self._free.get() for _ in self._workers]
            self._free.put(None)
            _end(opened, [worker for worker in ended if worker is not None])

    def _ready(self) -> OpenModel:
        check_process(self._pid, "runner", "built", "build")
        opened = self._opened
        if opened is None:
            state = "closed" if self._pid else "not built; call build_from_file first"
            raise InvalidArgumentError(f"runner: expected a built runner, got one that is {state}", param="runner")
        return opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(opened: OpenModel, workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.sequences.close()
    opened.close()
    for worker in workers:
        worker.context.native.close()
