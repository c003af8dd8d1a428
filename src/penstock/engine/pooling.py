"""Embeddings: the hidden rows of a prompt as one vector.

A request that is embedded goes through the scheduler like any other and ends with its prompt.  Its rows are added one
by one in the order of its tokens, so that the vector has the same bits however the prompt was chunked or batched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from penstock.engine.prompts import of_prompt
from penstock.engine.request import Status
from penstock.engine.waiting import OpenRequests
from penstock.errors import InternalError, InvalidArgumentError, PenstockError

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.options import RequestOptions
    from penstock.engine.request import Request
    from penstock.engine.scheduler import Chunk
    from penstock.runtime.program import Program

__all__ = ["POOLINGS", "Embedding", "Pooling", "check_embedding", "embed", "pool"]

POOLINGS: Final = ("mean", "last")


@dataclass(frozen=True, eq=False)
class Embedding:
    """A prompt as a vector [hidden_size] float32; ``num_cached_tokens`` of its tokens were not computed but shared."""

    token_ids: list[int]
    vector: NDArray[np.float32]
    num_cached_tokens: int = 0


class Pooling:
    """Takes a request's hidden rows: the "mean" of all, or the "last" one."""

    def __init__(self, kind: str) -> None:
        self.takes_all = kind == "mean"
        self._total: NDArray[np.float64] = np.zeros(0)
        self._num_rows = 0

    def take(self, rows: NDArray[np.float32], start: int) -> None:
        """The rows of the tokens from ``start`` on; 0 begins anew, as a request that was preempted does."""
        if not self.takes_all:
            self._total, self._num_rows = rows[-1].astype(np.float64), 1
            return
        if start == 0:
            self._total, self._num_rows = np.zeros(rows.shape[1]), 0
        for row in rows:  # one after another: a sum of several at once would depend on how many there are
            self._total += row
        self._num_rows += len(rows)

    def error(self) -> InternalError | None:
        """What is wrong with the rows that were taken."""
        if np.isfinite(self._total).all():
            return None
        return InternalError("the model's hidden rows are not finite: its weights or its keys and values are damaged")

    def vector(self, normalize: bool) -> NDArray[np.float32]:
        """The pooled row; with ``normalize`` of length 1 (a vector of zeros stays)."""
        vector = self._total / self._num_rows
        if normalize:
            vector /= np.sqrt(np.sum(vector * vector)) or 1.0
        return vector.astype(np.float32)


def pool(program: Program, chunks: Sequence[Chunk]) -> list[tuple[Request, InternalError | None]]:
    """Hand the step's hidden rows to the requests that want them; returns those whose prompt is through, and what is
    wrong with their rows."""
    if all(chunk.request.pooling is None for chunk in chunks):
        return []
    hidden, begin = program.hidden(), 0
    ended: list[tuple[Request, InternalError | None]] = []
    for chunk in chunks:
        end, pooling = begin + chunk.num_tokens, chunk.request.pooling
        if pooling is not None:
            pooling.take(hidden[begin:end], chunk.start)
            if chunk.start + chunk.num_tokens == chunk.request.num_tokens:
                ended.append((chunk.request, pooling.error()))
        begin = end
    return ended


def check_embedding(pooling: object, normalize: object) -> None:
    """InvalidArgumentError for what is neither."""
    if pooling not in POOLINGS:
        raise InvalidArgumentError(
            f"pooling must be one of {', '.join(POOLINGS)}, not {pooling!r:.60}", param="pooling"
        )
    if not isinstance(normalize, bool):
        raise InvalidArgumentError(f"normalize must be True or False, not {normalize!r:.60}", param="normalize")


def embed(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    pooling: str,
    normalize: bool,
    *,
    is_one: bool = False,
    options: RequestOptions | None = None,
    opened: OpenRequests | None = None,
) -> list[Embedding]:
    """The prompts' embeddings in their order.  A few steps' worth of requests is open at a time, and a full queue is
    waited for, so that any number of prompts may come; raises the error that one of them ended with, naming it.
    ``opened`` takes the requests, so that another thread may end them.
    """
    opened = opened or OpenRequests(engine)
    todo = deque(enumerate(prompts))
    unfinished: dict[int, Request] = {}
    done: dict[int, Embedding] = {}
    try:
        while todo or unfinished:
            while todo and len(unfinished) < 4 * engine.scheduler.max_requests:
                index, ids = todo.popleft()
                unfinished[index] = opened.submit(ids, pooling=Pooling(pooling), options=options)
            engine.wait(next(iter(unfinished.values())), 0)
            for index in [i for i, request in unfinished.items() if request.status is Status.FINISHED]:
                try:
                    done[index] = _embedding(unfinished.pop(index), normalize)
                except PenstockError as error:
                    raise of_prompt(index, is_one, error) from None
    finally:
        for request in unfinished.values():
            engine.abort(request)
    return [done[index] for index in range(len(done))]


def _embedding(request: Request, normalize: bool) -> Embedding:
    if request.error is not None:
        raise request.error
    if request.finish_reason != "stop" or request.pooling is None:
        raise InvalidArgumentError("embed: the request was aborted")
    return Embedding(request.prompt_ids, request.pooling.vector(normalize), request.num_cached)
