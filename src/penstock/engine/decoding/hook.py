"""Hooks: what sees the row of logits of a request before its token is chosen, and the token after that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.engine.decoding.rows import edited_row, filtered_row, forced_row
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, RequestStatus, to_penstock_error
from penstock.engine.row_state import RowState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.engine.decoding.row_hook import RowHook
    from penstock.engine.scheduler import Chunk
    from penstock.errors import PenstockError
    from penstock.runtime.program import Program

__all__ = ["AnswerHook", "Callables", "apply_hooks", "hooked"]


@dataclass(frozen=True)
class Callables:
    """A caller's own functions.

    ``processors`` get the tokens of prompt and answer and a row of scores, and return the row to go on with.
    ``criteria`` get the tokens and the rows of scores so far, or None, and return True to end the answer.  ``put`` gets
    each token.
    """

    processors: Sequence[Callable[[list[int], NDArray[np.float32]], NDArray[np.float32]]] = ()
    criteria: Sequence[Callable[[list[int], list[NDArray[np.float32]] | None], bool]] = ()
    put: Callable[[int], None] | None = None

    def process(self, tokens: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the row after all processors."""
        for processor in self.processors:
            row = processor(tokens, row)
        return row

    def stop(self, tokens: list[int], scores: list[NDArray[np.float32]] | None) -> bool:
        """Return True if a criterion ends the answer.  Each is called, because it may count."""
        results = [criterion(tokens, scores) for criterion in self.criteria]
        return any(results)


@dataclass
class AnswerHook:
    """The hook of an answer that is sampled or greedy.  ``logits`` and ``scores`` collect rows unless they are None."""

    sampling: ResolvedSampling
    callables: Callables
    logits: list[NDArray[np.float32]] | None = None
    scores: list[NDArray[np.float32]] | None = None
    _state: RowState | None = field(default=None, init=False)

    def join(self, request: Request) -> Sequence[Request]:
        """Return nothing: the request ends alone."""
        return ()

    def process(self, request: Request, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """Apply what would change the row, then the caller's functions; temperature and filters come later."""
        if self._state is None:
            self._state = RowState(self.sampling, len(row), request.max_tokens)
        mask, forced = None if request.matcher is None else request.matcher.mask, request.forced_token
        edited = edited_row(row, self._state, request.own_prompt_ids, request.output_ids, mask, forced)
        edited = forced_row(self.callables.process(self._tokens(request), edited), forced)
        if self.logits is not None:
            self.logits.append(row.copy())
        if self.scores is not None:
            self.scores.append(filtered_row(edited, self.sampling))
        return edited

    @staticmethod
    def _tokens(request: Request) -> list[int]:
        return request.tokens(request.num_encoded, request.num_tokens)

    def accept(self, request: Request, token: int) -> None:
        """Append the token, and end the answer if a criterion says so.

        The caller's functions come first: one that raises ends a request that has not ended.
        """
        if self.callables.put is not None:
            self.callables.put(token)
        stops = bool(self.callables.criteria) and self.callables.stop([*self._tokens(request), token], self.scores)
        request.accept(token)
        if stops and request.status is not RequestStatus.FINISHED:
            request.finish("stop")


def hooked(sampling: ResolvedSampling, hook: RowHook) -> ResolvedSampling:
    """Return the parameters that are left to the core when ``hook`` changes the rows: how to draw, and the grammar.

    The thoughts' limit stays, too, but the hook forces its tokens.
    """
    return replace(
        sampling,
        hook=hook,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0,
        logit_bias=(),
        allowed_token_ids=None,
        bad_words=(),
        bad_words_ids=(),
        no_repeat_ngram_size=0,
        forced_bos_token_id=-1,
        forced_eos_token_id=-1,
    )


def apply_hooks(program: Program, chunks: Sequence[Chunk]) -> list[tuple[Request, PenstockError]]:
    """Let the hooks of a step change the rows in the program's memory.  Returns the requests whose hook failed."""
    if all(chunk.request.sampling.hook is None for chunk in chunks):
        return []
    failed: list[tuple[Request, PenstockError]] = []
    row, logits = -1, program.logits()
    for chunk in chunks:
        row += chunk.num_rows
        request, hook = chunk.request, chunk.request.sampling.hook
        if hook is None or not chunk.samples or request.status is RequestStatus.FINISHED:
            continue
        try:
            changed = hook.process(request, logits[row])
            if changed is not None:
                logits[row] = changed
        except Exception as error:  # of a caller's function: only its request fails
            failed.append((request, to_penstock_error("A function of the caller", error)))
    return failed
