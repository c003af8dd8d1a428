"""Beam search: several continuations of one prompt, of which each step keeps the likeliest.

Each beam is a request of the engine.  When the rows of all beams have come, the search chooses their next tokens.  A
beam that continues another one shares its full pages and copies its last one, or computes the tokens of that page
again if the memory of pages cannot be reached.  Scores, the order of equal ones apart, and the rules of when a search
ends are those of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.decoding.hook import Callables, hooked
from penstock.engine.decoding.rows import edited_row, log_softmax
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, RequestStatus
from penstock.engine.row_state import RowState
from penstock.errors import InternalError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.engine.engine import Engine

__all__ = ["BeamOptions", "BeamSearch", "Hypothesis"]

_NEVER: Final = np.float32(-1e9)
"""The score of what must not be chosen."""


@dataclass(frozen=True)
class BeamOptions:
    """The options of a search.

    ``early_stopping``: True ends it when ``num_beams`` continuations are complete; False when no beam is likely to
    become better; "never" when none can.  ``ends``: the tokens that complete one.  ``length_penalty``: scores are
    divided by the length to this power.  ``keeps_rows``: collect the rows of each step.
    """

    num_beams: int
    num_results: int
    length_penalty: float
    early_stopping: bool | str
    ends: frozenset[int]
    keeps_rows: bool


@dataclass(frozen=True)
class Hypothesis:
    """A complete continuation: ``path`` has the beam whose row each token was chosen from."""

    score: np.float32
    token_ids: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    is_complete: bool = False


@dataclass
class _Beam:
    """One beam, the hook of its request.  ``row``: its log-probabilities [vocab] until all beams have theirs."""

    search: BeamSearch
    request: Request | None = None  # once its first row has come
    row: NDArray[np.float32] | None = None
    logits: NDArray[np.float32] | None = None
    path: tuple[int, ...] = ()
    state: RowState | None = None

    def join(self, request: Request) -> list[Request]:
        """Return the requests of all beams."""
        self.search.group.append(request)
        return self.search.group

    def process(self, request: Request, row: NDArray[np.float32]) -> None:
        """Keep the log-probabilities of the row."""
        search = self.search
        if self.state is None:
            self.state = RowState(search.sampling, len(row), request.max_tokens)
        self.request, self.logits = request, row.copy() if search.options.keeps_rows else None
        edited = edited_row(log_softmax(row), self.state, request.own_prompt_ids, request.output_ids)
        self.row = search.callables.process(request.tokens(request.num_encoded, request.num_tokens), edited)

    def accept(self, request: Request, token: int) -> None:
        """Wait for the other beams; the last one goes on with the search."""
        if any(other.status is RequestStatus.FINISHED for other in self.search.group):
            raise InternalError("The request of another beam has ended.")
        request.is_parked = True
        if all(beam.request is not None and beam.request.is_parked for beam in self.search.beams):
            self.search.advance()


@dataclass
class _Candidates:
    """The likeliest continuations of all beams, best first."""

    scores: NDArray[np.float32]
    beams: list[int]
    tokens: list[int]
    hits: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))


class BeamSearch:
    """The search of one prompt.  Submit a request for each entry of ``samplings``; all of them end together.

    ``results``: after the end the best continuations, the likeliest first, which the first requests have.  ``scores``
    and ``logits``: for each step the rows of all beams [num_beams, vocab].
    """

    def __init__(self, engine: Engine, sampling: ResolvedSampling, options: BeamOptions, callables: Callables) -> None:
        self.sampling, self.options, self.callables = sampling, options, callables
        self.scores: list[NDArray[np.float32]] = []
        self.logits: list[NDArray[np.float32]] = []
        self.results: list[Hypothesis] = []
        self.group: list[Request] = []
        self._engine = engine
        self._memory = engine.program.page_memory()
        self.beams = [_Beam(self) for _ in range(options.num_beams)]
        self._running = np.full(options.num_beams, _NEVER, np.float32)
        self._running[0] = 0  # all beams begin alike: only one counts
        self._complete = [Hypothesis(_NEVER)] * options.num_beams
        self._can_improve = True

    @property
    def samplings(self) -> list[ResolvedSampling]:
        """The parameters of each beam's request."""
        return [hooked(self.sampling, beam) for beam in self.beams]

    def advance(self) -> None:
        """Choose the next tokens of all beams, and end their requests if the search is over."""
        requests = self._requests()
        if self.options.keeps_rows:
            self.scores.append(np.stack([beam.row for beam in self.beams if beam.row is not None]))
            self.logits.append(np.stack([beam.logits for beam in self.beams if beam.logits is not None]))
        candidates = self._candidates()
        length, max_len = len(requests[0].output_ids) + 1, requests[0].max_tokens
        candidates.hits = self._hits(candidates, requests, length >= max_len)
        later = candidates.scores + candidates.hits.astype(np.float32) * _NEVER
        chosen = np.argsort(-later, kind="stable")[: len(self.beams)]
        self._complete = self._completed(candidates, requests, length)
        self._running = later[chosen]
        best_len = max_len if self.options.early_stopping == "never" and self.options.length_penalty > 0 else length
        best = self._running[0] / np.float32(best_len**self.options.length_penalty)
        least = min(hypothesis.score for hypothesis in self._complete)
        self._can_improve &= any(best > (least if hypothesis.is_complete else _NEVER) for hypothesis in self._complete)
        is_full = self.options.early_stopping is True and all(hypothesis.is_complete for hypothesis in self._complete)
        if not self._can_improve or is_full or candidates.hits.all():
            self._finish()
        else:
            self._continue([(candidates.beams[i], candidates.tokens[i]) for i in chosen])

    def _requests(self) -> list[Request]:
        return [beam.request for beam in self.beams if beam.request is not None]

    def _candidates(self) -> _Candidates:
        """Return enough continuations that as many as there are beams remain if all others end."""
        num_kept = max(2, 1 + len(self.options.ends)) * len(self.beams)
        parts = []
        for index, beam in enumerate(self.beams):
            if beam.row is None:
                continue
            row = beam.row + self._running[index]
            first = np.argpartition(-row, num_kept - 1)[:num_kept] if num_kept < len(row) else np.arange(len(row))
            parts.append((row[first], np.full(len(first), index), first))
        scores, beams, tokens = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.lexsort((tokens, beams, -scores))[:num_kept]
        return _Candidates(scores[order], beams[order].tolist(), tokens[order].tolist())

    def _hits(self, candidates: _Candidates, requests: list[Request], is_last: bool) -> NDArray[np.bool_]:
        """Return True for each continuation that is complete."""
        hits = np.array([is_last or token in self.options.ends for token in candidates.tokens])
        if self.callables.criteria:
            for i, (beam, token) in enumerate(zip(candidates.beams, candidates.tokens, strict=True)):
                tokens = [*requests[beam].tokens(requests[beam].num_encoded, requests[beam].num_tokens), token]
                hits[i] |= self.callables.stop(tokens, self.scores if self.options.keeps_rows else None)
        return hits

    def _completed(self, candidates: _Candidates, requests: list[Request], length: int) -> list[Hypothesis]:
        """Return the best complete continuations, those of this step included."""
        scores = candidates.scores / np.float32(length**self.options.length_penalty)
        if self.options.early_stopping is True and all(hypothesis.is_complete for hypothesis in self._complete):
            scores = scores + _NEVER
        if not self._can_improve:
            scores = scores + _NEVER
        is_complete = candidates.hits & (np.arange(len(candidates.tokens)) < len(self.beams))
        scores = np.where(is_complete, scores, scores + _NEVER)
        merged = np.concatenate([[hypothesis.score for hypothesis in self._complete], scores])
        best: list[Hypothesis] = []
        for place in np.argsort(-merged, kind="stable")[: len(self.beams)]:
            if place < len(self._complete):
                best.append(self._complete[place])
                continue
            i = place - len(self._complete)
            beam, token = candidates.beams[i], candidates.tokens[i]
            path = (*self.beams[beam].path, beam)
            best.append(Hypothesis(scores[i], (*requests[beam].output_ids, token), path, bool(is_complete[i])))
        return best

    def _finish(self) -> None:
        """End the requests; the first ones get the results."""
        self.results = self._complete[: self.options.num_results]
        num_others = len(self.group) - len(self.results)
        pairs = [*zip(self.group, [*self.results, *[Hypothesis(_NEVER)] * num_others], strict=True)]
        for request, result in pairs:  # an error of a text ends all of them, so none may have ended
            request.output_ids = list(result.token_ids)
            if request.text is not None:
                for token in result.token_ids:
                    request.text.push(token)
        for request, result in pairs:
            request.finish("stop" if result.token_ids and result.token_ids[-1] in self.options.ends else "length")

    def _continue(self, chosen: list[tuple[int, int]]) -> None:
        """Let each beam continue one of the old ones.  A beam that goes on keeps its request and its pages."""
        old, paths = self.beams, [beam.path for beam in self.beams]
        outputs = [list(request.output_ids) for request in self._requests()]
        keeps: dict[int, int] = {}  # from an old beam to the new one that keeps its request
        for index, (parent, _) in enumerate(chosen):
            keeps.setdefault(parent, index)
        places = {index: old[parent] for parent, index in keeps.items()}
        free = [beam for parent, beam in enumerate(old) if parent not in keeps]
        for index, (parent, _) in enumerate(chosen):
            if index not in places:
                places[index] = free.pop()
                self._fork(places[index], old[parent])
        self.beams = [places[index] for index in range(len(chosen))]
        for beam, (parent, token) in zip(self.beams, chosen, strict=True):
            beam.path, beam.row, beam.logits = (*paths[parent], parent), None, None
            if beam.request is not None:
                beam.request.output_ids = [*outputs[parent], token]
                beam.request.is_parked = False

    def _fork(self, beam: _Beam, parent: _Beam) -> None:
        """Give a beam what its new parent has computed."""
        request, source, scheduler = beam.request, parent.request, self._engine.scheduler
        if request is None or source is None:
            raise InternalError("A beam has no request.")
        beam.state, request.page_keys = None, list(source.page_keys)
        if request.pages is None:
            return  # it was preempted, and is computed again
        if source.pages is None:
            scheduler.preempt(request)
            return
        copy = self._copy_page if self._memory else None
        request.num_computed = scheduler.ledger.fork(request.pages, source.pages, source.num_computed, copy)
        if scheduler.whole_prompts and request.num_computed < source.num_computed:
            scheduler.preempt(request)  # a part of its prompt would be left, which runs whole

    def _copy_page(self, group: int, source: int, target: int) -> None:
        for state in self._memory[group]:
            state[target] = state[source]
